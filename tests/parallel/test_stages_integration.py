"""Stages in processes, here, on hosts and under torchrun, compute what they compute on engine `sim`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_run import Run, joined_by
from stage_models import masked
from stage_runs import expect_alike, train, trained

import manyhands as mh
from manyhands.engines.hosts.engine import Hosts
from manyhands.errors import WorkerFailed

slow = pytest.mark.slow
FAST = ("cnn", 3, "stages=3", "allreduce")


@pytest.mark.parametrize(
    ("name", "workers", "plan", "strategy"),
    [
        FAST,
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("lengths", 3, "stages=3", "allreduce"),
                ("tied", 2, "stages=2,cut=[join]", "allreduce"),
                ("dropout", 2, "stages=2,recompute=units", "allreduce"),
                ("mlp", 4, "stages=2", "allreduce:compress=topk:0.3"),
                ("mlp", 4, "stages=2,micro_batches=8", "diloco:period=4"),
                ("mlp", 4, "stages=2,schedule=gpipe", "eamsgd:period=3,via=group"),
            )
        ),
    ],
)
def test_the_bits_and_bytes_of_sim(name: str, workers: int, plan: str, strategy: str) -> None:
    """On a free network: parameters, buffers, metrics, each step's loss, and what crosses each cut."""
    simulated, real = (trained(name, workers, plan, strategy, engine) for engine in ("sim", "local"))
    assert torch.equal(simulated.parameters, real.parameters)
    expect_alike(simulated, real, within=0.0)
    assert (simulated.metrics, simulated.rows) == (real.metrics, real.rows)
    kept = [[(one["begins"], one["parameters"]) for one in run.info["stages"]] for run in (simulated, real)]
    assert kept[0] == kept[1]
    for way in ("forward", "back"):
        assert simulated.ledger.get(way) == real.ledger.get(way)


def test_what_a_run_says_of_its_stages(tmp_path: Path) -> None:
    run = train("gpt", 4, "stages=2", engine="local", max_steps=2, run_dir=tmp_path)
    held = run.info["stages"]
    assert [one["begins"] for one in held] == ["", "blocks.2"]
    tied = run.model.tokens.weight.numel()
    assert sum(one["parameters"] for one in held) == run.info["parameters"] + tied == run.parameters.numel() + tied
    assert "2 replicas of 2 workers" in run.summary()
    assert sum(one["bytes"] for one in held) == sum(entry["bytes"] for entry in run.ledger.values())
    assert [one["memory"] for one in held] == [max(run.memory_of_workers[stage::2]) for stage in range(2)]
    for stage, begins in enumerate(("the beginning", "blocks.2")):
        (line,) = [one for one in run.summary().splitlines() if f"{stage} from {begins}: " in one]
        assert f"{held[stage]['parameters']:,} parameters, waited " in line
    assert run.rows["workers"][1::2] == [0, 0]
    for row in run.history:
        assert all(row[f"{part}_s"] > -1e-3 for part in ("input", "compute", "exchange", "wait"))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    of_workers = [one for one in events if one["rank"] is not None]
    assert {one["type"] for one in of_workers} >= {"start", "step", "checkpoint", "epoch"}
    assert {one["rank"] for one in of_workers} == {0, 1, 2, 3}
    for one in of_workers:
        assert divmod(one["rank"], 2) == (one["values"]["replica"], one["values"]["stage"])


def failing(model: Any, batch: Any) -> Any:
    value = masked(model, batch)
    if batch[0].shape[0] == 9:  # the last micro-batch of 39 rows, once the program is past the last cut
        raise ValueError("this row is no good")
    return value


@slow
def test_a_stage_that_is_killed_or_raises_ends_the_run() -> None:
    """The others wait for its tensors, and hear of it at once."""
    with pytest.raises(WorkerFailed, match="worker 1"):
        train("gpt", 3, "stages=3", engine="local:faults=kill=1@step:2")
    with pytest.raises(WorkerFailed, match="this row is no good") as raised:
        train("gpt", 2, "stages=2", engine="local", loss=failing)
    assert raised.value.rank == 1
    assert "stage 1 of 2, micro-batch 3 of 4, forward" in raised.value.detail


@slow
@pytest.mark.nightly  # without a loss; with one: test_stages_survive_integration.py
@pytest.mark.parametrize(
    ("workers", "here", "plan", "strategy"), [(4, 3, "stages=4", "allreduce"), (4, 2, "stages=2", "downpour:bound=0")]
)
def test_stages_on_two_hosts(
    workers: int, here: int, plan: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's replicas have a shard beside them on the first host."""
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    served = strategy != "allreduce"
    expected = trained("gpt", workers, plan, strategy, "local" if served else "sim", max_steps=5)
    run = Run(Hosts(local_workers=here), joined_by(*([2] if served else [workers - here])))
    given: dict[str, Any] = {"servers": 2} if served else {}
    if not served:  # both hosts see the folder: they write the model there
        given["run_dir"] = tmp_path / "run"
    found = run.during(lambda: train("gpt", workers, plan, strategy, run.engine, max_steps=5, **given))
    assert served or "send" not in found.ledger
    expect_alike(found, expected)


SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import manyhands as mh
from stage_models import GPT, TASKS
out = sys.argv[2]
task, given = TASKS["gpt"].with_fields(max_steps=4, schedule=None), {"model_parallel": "stages=2", "threads_per_worker": 1}
torch.manual_seed(task.seed)
model = GPT().double()
run = mh.train(task.with_fields(model=model), run_dir=out + "/run", **given)
assert run.model is model
served = mh.train(task, strategy="downpour:bound=0", **given)
found = {"broadcast": run.ledger.get("broadcast_", {}).get("bytes"), "metrics": run.metrics, "rows": run.rows["total"]}
torch.save(found | {"model": run.model.state_dict(), "served": served.model.state_dict()}, f"{out}/{os.environ['RANK']}")
"""


@slow
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_stages_under_torchrun(workers: int, tmp_path: Path) -> None:
    """Every rank gets the whole answer, in a module of the script's, of which it was a stage."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = str(Path(mh.__file__).resolve().parents[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", str(script)]
    subprocess.run(
        [*launch, str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        check=True,
        timeout=100,
    )
    given = {"max_steps": 4, "schedule": None}
    expected = trained("gpt", workers, "stages=2", engine="local", **given)
    served = trained("gpt", workers // 2, None, "downpour:bound=0", engine="local", **given)
    broadcast = expected.ledger.get("broadcast_", {}).get("bytes")  # at the start, between the replicas
    for rank in range(workers):
        found = torch.load(tmp_path / str(rank))
        torch.testing.assert_close(found["model"], expected.model.state_dict(), rtol=0, atol=1e-10)
        torch.testing.assert_close(found["served"], served.model.state_dict(), rtol=0, atol=1e-10)
        assert found["metrics"] == pytest.approx(expected.metrics, abs=1e-10)
        assert found["rows"] == expected.rows["total"]
        assert found["broadcast"] == broadcast
