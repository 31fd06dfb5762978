"""Stages on other engines than `local` compute what they compute there, and end when one of them does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import TASKS, masked

import manyhands as mh
from manyhands.engines.hosts.engine import Hosts
from manyhands.errors import WorkerFailed

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines" / "hosts"))
from joined_run import Run, joined_by

STEPS = 5


def trained(workers: int, model_parallel: str, engine: Any, run_dir: Path | None = None) -> mh.Run:
    return mh.train(
        TASKS["gpt"].with_fields(max_steps=STEPS),
        workers=workers,
        engine=engine,
        model_parallel=model_parallel,
        threads_per_worker=1,
        run_dir=run_dir,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "here", "stages"), [(2, 1, 2), (4, 2, 2), (4, 3, 4)])
def test_stages_on_two_hosts(
    workers: int, here: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    expected = trained(workers, f"stages={stages}", "local")
    run = Run(Hosts(local_workers=here), joined_by(workers - here))
    folder = tmp_path / "run" if stages == 4 else None
    found = run.during(lambda: trained(workers, f"stages={stages}", run.engine, folder))
    assert ("send" in found.ledger) == (folder is None)  # where both hosts see the folder they write the model there
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=0, atol=1e-10)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-10)


SCRIPT = """
    import json, os, sys
    sys.path.insert(0, {folder!r})
    import manyhands as mh
    from stage_models import TASKS
    run = mh.train(TASKS["gpt"].with_fields(max_steps={steps}), model_parallel="stages=2", threads_per_worker=1)
    with open(f"{out}." + os.environ["RANK"], "w") as file:
        json.dump([float(run.parameters.sum()), run.metrics, run.rows["total"]], file)
"""


@pytest.mark.slow
def test_stages_under_torchrun(tmp_path: Path) -> None:
    """Every rank gets the whole answer."""
    script = tmp_path / "script.py"
    lines = SCRIPT.format(folder=str(Path(__file__).parent), steps=STEPS, out=tmp_path / "out").splitlines()
    script.write_text("\n".join(line[4:] for line in lines))
    source = str(Path(mh.__file__).resolve().parents[1])
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        check=True,
        capture_output=True,
        timeout=100,
    )
    expected = trained(4, "stages=2", "local")
    for rank in range(4):
        total, metrics, rows = json.loads((tmp_path / f"out.{rank}").read_text())
        assert total == pytest.approx(float(expected.parameters.sum()), abs=1e-9)
        assert metrics == pytest.approx(expected.metrics, abs=1e-10)
        assert rows == expected.rows["total"]


def test_a_stage_that_is_killed_ends_the_run() -> None:
    """The others wait for its tensors, and hear of it at once."""
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="worker 1"):
        trained(3, "stages=3", "local:faults=kill=1@step:2")
    assert time.monotonic() - began < 15


def failing(model: Any, batch: Any) -> Any:
    value = masked(model, batch)
    if batch[0].shape[0] == 9:  # the last micro-batch of 39 rows, once the program is past the last cut
        raise ValueError("this row is no good")
    return value


def test_an_error_says_of_which_stage_and_micro_batch_it_is() -> None:
    with pytest.raises(WorkerFailed, match="this row is no good") as raised:
        mh.train(
            TASKS["gpt"].with_fields(loss=failing),
            workers=2,
            engine="local",
            model_parallel="stages=2",
            threads_per_worker=1,
        )
    assert raised.value.rank == 1
    assert "stage 1 of 2, micro-batch 3 of 4, forward" in raised.value.detail
