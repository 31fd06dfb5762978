"""What every worker of a launched program does by train(), and what must come of it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.callbacks.base import Callback
from manyhands.checkpoint.paths import AnyPath
from manyhands.errors import BadInput, Preempted
from manyhands.events import Event

STEPS = 12  # 39 rows in batches of 12, three epochs


def task(**fields: Any) -> mh.Task:
    judged = {"validation_data": plain.rows(17, seed=2), "test_data": plain.rows(5, seed=3)}
    return plain.task(**{"epochs": 3, **judged, **fields})


class Heard(Callback):
    """Counts what it is told, and stops or fails where it is asked to."""

    def __init__(self, at: int = 0, output: Callable[[], str] = lambda: "stop") -> None:
        self.at, self.output, self.events = at, output, 0

    def on_step(self, event: Event) -> str | None:
        self.events += 1
        return self.output() if event.step == self.at else None


class Interrupting:
    """The loss; at step `at`, counted from 1, SIGTERM comes to this process."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.left -= model.training
        if self.left == 0 and model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain.cross_entropy(model, batch)


REFUSED: dict[str, dict[str, Any]] = {
    "workers=3": {"workers": 3},
    "workers=1": {"workers": 1},
    "give run_dir": {"resume": True},
    "strategy solo runs on one worker, and workers=2": {"strategy": "solo"},
}


def error_of(call: Callable[[], Any], kind: type[Exception] = BadInput) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


# -- what every worker does, whoever launched it; JSON -----------------------------------------------------------------


def everything(folder: str, rank: int, directory: AnyPath) -> dict[str, Any]:
    refused = [  # each on all workers alike; training goes on to work afterwards
        error_of(lambda options=options: mh.train(task(), **options))
        for options in (*REFUSED.values(), {"run_dir": f"{folder}/of-{rank}"})
    ]
    stopped = mh.train(task(), run_dir=f"{folder}/stopped", callbacks=[Heard(at=5)])
    return {
        "strategies": {strategy: trained(strategy) for strategy in ("allreduce", "ensemble")},
        "directory": in_a_directory(directory),
        "stopped": [stopped.steps, stopped.info["stopped"]],
        "terminated": [terminated(Path(folder) / f"terminated{who}", rank == who) for who in (0, 1)],
        "refused": refused,
    }


def facts(run: mh.Run) -> dict[str, Any]:
    return {
        "parameters": [plain.flat(model).tolist() for model in run.models],
        "history": [row["loss"] for row in run.history],
        "metrics": run.metrics,
        "rows": run.rows,
        "steps": run.steps,
        "ledger": run.ledger,
        "summary": run.summary().count("\n") > 3,
    }


def trained(strategy: str) -> list[dict[str, Any]]:
    """Twice: the second must not see the first. A module that is given holds the result."""
    heard, model = Heard(), plain.mlp()
    runs = [mh.train(task(), strategy=strategy, callbacks=[heard]) for _ in range(2)]
    given = mh.train(task(model=model), strategy=strategy)
    return [{**facts(run), "heard": heard.events, "given": given.models[0] is model} for run in runs]


def in_a_directory(directory: AnyPath) -> dict[str, Any]:
    """Two epochs of three; the third; the finished run again; refused without resume."""
    begun = mh.train(task(epochs=2), run_dir=directory)
    went_on, again = (facts(mh.train(task(), run_dir=directory, resume=True)) for _ in range(2))
    refused = error_of(lambda: mh.train(task(), run_dir=directory))
    return {"begun": begun.steps, "went on": went_on, "again": again, "refused": refused}


def terminated(directory: Path, me: bool) -> dict[str, Any]:
    """SIGTERM comes to one worker alone; what it did is resumed."""
    loss = Interrupting(6 if me else 0)
    message = error_of(lambda: mh.train(task(loss=loss), run_dir=directory), Preempted)
    saved = sorted(path.name for path in (directory / "checkpoints").iterdir())
    return {"message": message, "saved": saved, "resumed": facts(mh.train(task(), run_dir=directory, resume=True))}


# -- what must come of it -----------------------------------------------------------------------------------------------


def check(first: dict[str, Any], second: dict[str, Any], folder: Path) -> None:
    """CASE 2 and 19: as one worker alone, on all ranks; the first has what was heard on the way."""
    alone = mh.train(task(), workers=1, engine="local")
    for strategy, models in (("allreduce", 1), ("ensemble", 2)):
        runs = [*first["strategies"][strategy], *second["strategies"][strategy]]
        assert [len(run["parameters"]) for run in runs] == [models] * 4
        for key in ("parameters", "metrics", "rows", "steps", "ledger", "given", "summary"):
            assert len({json.dumps(run[key]) for run in runs}) == 1, (strategy, key)
        assert runs[0]["given"]
        assert runs[0]["summary"]
        assert runs[0]["rows"] == {"total": 117, "workers": [57, 60], "unused": 0}
        assert [len(run["history"]) for run in runs] == [STEPS, STEPS, 0, 0]
        assert [run["heard"] for run in runs] == [2 * STEPS] * 2 + [0] * 2
    as_alone(first["strategies"]["allreduce"][0], alone)
    check_directory(first["directory"], second["directory"], alone, folder / "run")
    assert first["stopped"] == second["stopped"] == [8, "callback"]  # heard at the epoch's end
    for one, other in zip(first["terminated"], second["terminated"], strict=True):
        assert one["message"] == other["message"]
        assert "stopped at step 7" in one["message"]
        assert "resume it with resume=True" in one["message"]
        assert one["saved"] == other["saved"] == ["step-00000004", "step-00000007"]
        for got in (one, other):
            as_alone(got["resumed"], alone)
    assert first["refused"] == second["refused"]
    wanted = *REFUSED, f"run_dir is {folder}/of-0 on worker 0 and {folder}/of-1 on worker 1: give all workers the same"
    assert all(text in message for text, message in zip(wanted, first["refused"], strict=True)), first["refused"]


def as_alone(got: dict[str, Any], alone: mh.Run) -> None:
    parameters = torch.tensor(got["parameters"][0], dtype=torch.float64)
    assert (parameters - alone.parameters).abs().max() < 1e-10
    assert got["metrics"] == pytest.approx(alone.metrics, abs=1e-10)
    assert got["steps"] == STEPS
    assert not got["history"] or got["history"] == pytest.approx([row["loss"] for row in alone.history], abs=1e-10)


def check_directory(first: dict[str, Any], second: dict[str, Any], alone: mh.Run, directory: Path) -> None:
    assert first["begun"] == second["begun"] == 8
    for got, history in ((first, STEPS), (second, 0)):
        as_alone(got["went on"], alone)
        assert [got["again"][key] == got["went on"][key] for key in ("parameters", "metrics")] == [True, True]
        assert (len(got["went on"]["history"]), len(got["again"]["history"])) == (history, STEPS)  # read from the files
        assert f"{directory} exists: resume it" in got["refused"]
    for rank, name in enumerate(("events.jsonl", "events-00001.jsonl")):
        events = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        assert [(e["tick"], e["rank"]) for e in events if e["type"] == "step"] == [(t, rank) for t in range(STEPS)]
        assert [e["values"]["launch"] for e in events if e["type"] == "start"] == [1, 2]
    assert sorted(path.name for path in directory.iterdir()) == [
        *("checkpoints", "config.json", "events-00001.jsonl", "events.jsonl", "launch.json", "model.safetensors"),
        "result.json",
    ]
