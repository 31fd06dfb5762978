"""train() where every worker makes the same call: in a script under torchrun, in a function under launch."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_training import STEPS, check, error_of, everything, task
from torch import nn

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import PeerLost
from manyhands.own_loop.launch import launch


def everything_inside(folder: str) -> dict[str, Any]:
    rank = mh.worker().rank
    done = everything(folder, rank, Path(folder) / "run")
    device = error_of(lambda: mh.train(task(), device="cpu"))
    threads = error_of(lambda: mh.train(task(), threads_per_worker=1))
    return {**done, "options": [device, threads], "apart": on_hosts_that_share_no_files(Path(folder), rank)}


def on_hosts_that_share_no_files(folder: Path, rank: int) -> str:
    """One name, but a directory of each worker's own; the first trains alone there, which needs nobody."""
    own = folder / f"host-{rank}"
    own.mkdir()
    os.chdir(own)
    if rank == 0:
        mh.train(task(max_steps=5), run_dir="run", engine="local", workers=1)
    return error_of(lambda: mh.train(task(), run_dir="run", resume=True))


class Failing:
    """A loss that raises on worker 1, in the middle of the first epoch."""

    calls = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4 and mh.worker().rank == 1:
            raise ZeroDivisionError("on purpose")
        return plain.cross_entropy(model, batch)


def fails(folder: str) -> None:
    mh.train(plain.task(loss=Failing()), run_dir=Path(folder) / "run")


def test_a_ranks_events_outlive_its_failure(local: Local, tmp_path: Path) -> None:
    """Each writes its own file as they happen: nothing waits for the epoch's end."""
    with pytest.raises(mh.WorkerFailed, match="on purpose"):
        launch(fails, str(tmp_path), workers=2, engine=local, threads_per_worker=1)
    lines = [json.loads(line) for line in (tmp_path / "run/events-00001.jsonl").read_text().splitlines()]
    assert [(one["type"], one["tick"]) for one in lines[:3]] == [("start", 0), ("step", 0), ("step", 1)]
    assert {one["rank"] for one in lines} == {1}
    assert lines[-1]["type"] == "failed"


@pytest.mark.slow
def test_inside_launch(local: Local, tmp_path: Path) -> None:
    first, second = launch(everything_inside, str(tmp_path), workers=2, engine=local, threads_per_worker=1)
    check(first, second, tmp_path)
    device, threads = first["options"]
    assert first["options"] == second["options"]
    assert "leave device out" in device
    assert "manyhands run --threads-per-worker" in threads
    assert first["apart"] == second["apart"]
    assert "in run/checkpoints is of step 5 on worker 0 and of step None on worker 1" in first["apart"]


TORCHRUN = """
import json, os, sys
import torch
import manyhands as mh
from manyhands.checkpoint.paths import path_of
from manyhands.errors import PeerLost
from launched_training import Heard, everything, task

rank, folder = int(os.environ["RANK"]), sys.argv[1]
done = everything(folder, rank, path_of(f"local://{folder}/run"))
try:  # a callback's own error, on the worker that has callbacks
    mh.train(task(), callbacks=[Heard(at=2, output=lambda: 1 / 0)])
except (ZeroDivisionError, PeerLost) as error:
    done["callback"] = type(error).__name__
done["after"] = mh.train(task(), threads_per_worker=1, device="cpu").steps
done["torch"] = torch.distributed.is_initialized()
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(done, file)
if rank == 1:
    raise KeyError("only here")
mh.train(task())
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """CASE 21 too: the error of a callback is raised as it is where callbacks are, and training works again afterwards.

    In the end one worker fails and never comes. The other, which waits for it, heeds torchrun's SIGTERM; the SIGKILL would
    come 30 seconds later.
    """
    (tmp_path / "script.py").write_text(TORCHRUN)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *launcher, "script.py", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert "KeyError: 'only here'" in done.stderr
    assert "SIGKILL" not in done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    check(first, second, tmp_path)
    assert (first["callback"], second["callback"]) == (ZeroDivisionError.__name__, PeerLost.__name__)
    assert first["after"] == second["after"] == STEPS
    assert not first["torch"]


def by_train() -> None:
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    mh.train(model=partial(nn.Linear, 1000, 1000), loss=loss, optimizer=adamw, train_data=torch.ones(4, 1000), epochs=1)


def by_prepare() -> None:
    model: Any = nn.Linear(1000, 1000)
    model, optimizer, loader = mh.prepare(model, adamw(model), [torch.ones(4, 1000)])
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def growth() -> list[int]:
    """KB by which the third training of each kind grew this process's part of shared memory."""

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssShmem:")).split()[1])

    grown = []
    for train in (by_train, by_prepare):
        train(), train()
        before, deadline = mapped(), time.monotonic() + 10
        train()
        while mapped() - before >= 4000 and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread that ends may hold its last reference for a moment
        grown.append(mapped() - before)
    return grown


def test_shared_memory_is_given_back_between_trainings(local: Local) -> None:
    """Each takes 4 MB for each of parameters, gradients and AdamW's moments."""
    for grown in launch(growth, workers=2, engine=local, threads_per_worker=1):
        assert max(grown) < 4000, grown
