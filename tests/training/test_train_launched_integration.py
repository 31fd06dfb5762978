"""train() where every worker makes the same call: in a script under torchrun or `manyhands run`, in a function under launch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.callbacks.base import Callback
from manyhands.checkpoint.paths import AnyPath, path_of
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, PeerLost, Preempted
from manyhands.events import Event
from manyhands.own_loop.launch import launch, run_script

STRATEGIES = ("allreduce", "local-sgd:period=3", "ensemble")
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


# -- what every worker does, whoever launched it; JSON -----------------------------------------------------------------


def everything(folder: str, rank: int) -> dict[str, Any]:
    return {
        "strategies": {strategy: trained(strategy) for strategy in STRATEGIES},
        "directory": in_a_directory(Path(folder) / "run"),
        "url": in_a_directory(path_of(f"local://{folder}/url")),
        "stopped": stopped(Path(folder) / "stopped"),
        "terminated": [terminated(Path(folder) / f"terminated{who}", rank, who) for who in (0, 1)],
        "refused": refused(Path(folder), rank),
    }


def facts(run: mh.Run) -> dict[str, Any]:
    return {
        "parameters": [plain.flat(model).tolist() for model in run.models],
        "metrics": run.metrics,
        "history": [row["loss"] for row in run.history],
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
    went_on = mh.train(task(), run_dir=directory, resume=True)
    again = mh.train(task(), run_dir=directory, resume=True)
    message = error_of(lambda: mh.train(task(), run_dir=directory))
    return {"begun": begun.steps, "went on": facts(went_on), "again": facts(again), "refused": message}


def stopped(directory: Path) -> dict[str, Any]:
    run = mh.train(task(), run_dir=directory, callbacks=[Heard(at=5)])
    return {"steps": run.steps, "reason": run.info["stopped"]}


def terminated(directory: Path, rank: int, who: int) -> dict[str, Any]:
    """SIGTERM comes to one worker alone; what it did is resumed."""
    loss = Interrupting(6 if rank == who else 0)
    with pytest.raises(Preempted, match=r"stopped at step \d+ .*resume it with resume=True") as raised:
        mh.train(task(loss=loss), run_dir=directory)
    saved = sorted(path.name for path in (directory / "checkpoints").iterdir())
    resumed = mh.train(task(), run_dir=directory, resume=True)
    return {"message": str(raised.value), "saved": saved, "resumed": facts(resumed)}


class Interrupting:
    """The loss; at step `at`, counted from 1, SIGTERM comes to this process."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.left -= model.training
        if self.left == 0 and model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain.cross_entropy(model, batch)


def refused(folder: Path, rank: int) -> list[str]:
    """What cannot be, each on all workers alike; training goes on to work afterwards."""
    messages = [
        error_of(lambda: mh.train(task(), workers=3)),
        error_of(lambda: mh.train(task(), workers=1)),
        error_of(lambda: mh.train(task(), resume=True)),
        error_of(lambda: mh.train(task(), strategy="solo")),
        error_of(lambda: mh.train(task(), run_dir=folder / f"of-{rank}")),
    ]
    assert mh.train(task(max_steps=1)).steps == 1
    return messages


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BadInput) as raised:
        call()
    return str(raised.value)


# -- what must come of it -----------------------------------------------------------------------------------------------


def check(first: dict[str, Any], second: dict[str, Any], folder: Path) -> None:
    """CASE 2 and 19: as one worker alone, on all ranks; the first has what was heard on the way."""
    for strategy in STRATEGIES:
        check_strategy(strategy, first["strategies"][strategy], second["strategies"][strategy])
    alone = mh.train(task(), workers=1, engine="local")
    check_directory(first["directory"], second["directory"], alone, folder / "run")
    check_directory(first["url"], second["url"], alone, folder / "url")
    assert first["stopped"] == second["stopped"] == {"steps": 8, "reason": "callback"}  # heard at the epoch's end
    for one, other in zip(first["terminated"], second["terminated"], strict=True):
        assert one["message"] == other["message"]
        assert one["saved"] == other["saved"] == ["step-00000004", "step-00000007"]
        for got in (one, other):
            assert apart(got["resumed"]["parameters"][0], alone) < 1e-10
            assert got["resumed"]["steps"] == STEPS
    workers, one, resume, solo, elsewhere = first["refused"]
    assert first["refused"] == second["refused"]
    assert workers.startswith("workers=3")
    assert one.startswith("workers=1")
    assert "leave workers out" in workers
    assert "give run_dir" in resume
    assert "strategy solo runs on one worker, and workers=2" in solo
    assert f"run_dir is {folder}/of-0 on worker 0 and {folder}/of-1 on worker 1: give all workers the same" in elsewhere


def check_strategy(strategy: str, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    one, again = first
    assert len(one["parameters"]) == (2 if strategy == "ensemble" else 1)
    assert len({json.dumps(run["parameters"]) for run in (*first, *second)}) == 1
    for key in ("metrics", "rows", "steps", "ledger", "given", "summary"):
        assert one[key] == again[key] == second[0][key] == second[1][key], (strategy, key)
    assert one["given"]
    assert one["summary"]
    assert one["rows"] == {"total": 117, "workers": [57, 60], "unused": 0}
    assert [len(run["history"]) for run in (*first, *second)] == [STEPS, STEPS, 0, 0]
    assert (one["heard"], second[0]["heard"]) == (2 * STEPS, 0)
    if strategy == "allreduce":
        alone = mh.train(task(), workers=1, engine="local")
        assert apart(one["parameters"][0], alone) < 1e-10
        assert one["metrics"] == pytest.approx(alone.metrics, abs=1e-10)
        assert one["history"] == pytest.approx([row["loss"] for row in alone.history], abs=1e-10)


def check_directory(first: dict[str, Any], second: dict[str, Any], alone: mh.Run, directory: Path) -> None:
    assert first["begun"] == second["begun"] == 8
    for got in (first, second):
        assert apart(got["went on"]["parameters"][0], alone) < 1e-10
        assert got["again"]["parameters"] == got["went on"]["parameters"]
        assert got["again"]["metrics"] == got["went on"]["metrics"]
        assert len(got["again"]["history"]) == STEPS  # read from the directory
        assert f"{directory} exists: resume it" in got["refused"]
    assert len(first["went on"]["history"]) == STEPS
    assert second["went on"]["history"] == []
    for rank, name in enumerate(("events.jsonl", "events-00001.jsonl")):
        events = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        assert [(e["tick"], e["rank"]) for e in events if e["type"] == "step"] == [(t, rank) for t in range(STEPS)]
        assert [e["values"]["launch"] for e in events if e["type"] == "start"] == [1, 2]
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoints",
        "config.json",
        "events-00001.jsonl",
        "events.jsonl",
        "launch.json",
        "model.safetensors",
        "result.json",
    ]


def apart(parameters: list[float], alone: mh.Run) -> float:
    return float((torch.tensor(parameters, dtype=torch.float64) - alone.parameters).abs().max())


# -- the launchers ------------------------------------------------------------------------------------------------------


def everything_inside(folder: str) -> dict[str, Any]:
    rank = mh.worker().rank
    done = everything(folder, rank)
    options = [
        error_of(lambda: mh.train(task(), device="cpu")),
        error_of(lambda: mh.train(task(), threads_per_worker=1)),
    ]
    return {**done, "options": options, "apart": on_hosts_that_share_no_files(Path(folder), rank)}


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


@pytest.mark.slow
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    monkeypatch.delenv("MANYHANDS_STRATEGY", raising=False)

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    yield write
    assert not list(tmp_path.glob("manyhands*"))


@pytest.mark.slow
def test_in_a_script_that_manyhands_runs(
    local: Local, script: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first worker's summary is printed, once; SIGTERM to one worker is exit code 75, and resumed."""
    path = script(
        """
        import sys
        import manyhands as mh
        from test_train_launched_integration import Interrupting, task
        fatal = len(sys.argv) > 2 and mh.worker().rank == 1
        run = mh.train(task(loss=Interrupting(6 if fatal else 0)), run_dir=sys.argv[1], resume=True)
        print(run.steps, len(run.history), run.info["engine"])
        """
    )
    directory = tmp_path / "run"
    with pytest.raises(Preempted, match=f"stopped at step 7 .* from {directory}") as raised:
        run_script(path, [str(directory), "fatal"], workers=2, engine=local, threads_per_worker=1)
    assert raised.value.exit_code == 75
    for _ in range(2):  # goes on; is finished
        assert run_script(path, [str(directory)], workers=2, engine=local, threads_per_worker=1) == 0
        assert capfd.readouterr().out == f"{STEPS} {STEPS} inside\n"


TORCHRUN = """
import json, os, sys
import torch
import manyhands as mh
from manyhands.errors import PeerLost
from test_train_launched_integration import Heard, everything, task

rank, folder = int(os.environ["RANK"]), sys.argv[1]
done = everything(folder, rank)
try:  # a callback's own error, on the worker that has callbacks
    mh.train(task(), callbacks=[Heard(at=2, output=lambda: 1 / 0)])
except (ZeroDivisionError, PeerLost) as error:
    done["callback"] = type(error).__name__
done["after"] = mh.train(task(), threads_per_worker=1, device="cpu").steps
done["torch"] = torch.distributed.is_initialized()
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(done, file)
"""


def torchrun(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.run(
        [sys.executable, *launcher, path.name, *arguments],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(path.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_under_torchrun(script: Callable[[str], Path], tmp_path: Path) -> None:
    """CASE 21 too: the error of a callback is raised as it is where callbacks are, and training works again afterwards."""
    done = torchrun(script(TORCHRUN), str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    check(first, second, tmp_path)
    assert (first["callback"], second["callback"]) == (ZeroDivisionError.__name__, PeerLost.__name__)
    assert first["after"] == second["after"] == STEPS
    assert not first["torch"]


@pytest.mark.slow
def test_under_torchrun_a_worker_that_never_comes_ends_all_at_once(script: Callable[[str], Path]) -> None:
    """The worker that waits for it heeds torchrun's SIGTERM; the SIGKILL would come 30 seconds later."""
    done = torchrun(
        script(
            """
            import os
            import manyhands as mh
            from test_train_launched_integration import task
            if os.environ["RANK"] == "1":
                raise KeyError("only here")
            mh.train(task())
            """
        )
    )
    assert done.returncode != 0
    assert "KeyError: 'only here'" in done.stderr
    assert "SIGKILL" not in done.stderr


def wide() -> nn.Module:
    return nn.Linear(1000, 1000)


def by_train() -> None:
    mh.train(
        model=wide,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        train_data=(torch.ones(4, 1000),),
        batch_size=4,
        epochs=1,
    )


def by_prepare() -> None:
    model: Any = wide()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = mh.prepare(model, optimizer, [torch.ones(4, 1000)])
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()


def shared_memory() -> int:
    """KB of it that this process maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssShmem:")).split()[1])


def shared_memory_growth(train: Callable[[], None]) -> int:
    """KB by which the third and fourth training grew it: a thread that ends may hold its last reference for a moment."""
    train()
    train()
    before = shared_memory()
    train()
    train()
    deadline = time.monotonic() + 10
    while shared_memory() - before >= 4000 and time.monotonic() < deadline:
        time.sleep(0.05)
    return shared_memory() - before


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_train, by_prepare])
def test_shared_memory_is_given_back_between_trainings(local: Local, train: Callable[[], None]) -> None:
    """Each takes 4 MB for each of parameters, gradients and AdamW's moments."""
    for growth in launch(shared_memory_growth, train, workers=2, engine=local, threads_per_worker=1):
        assert growth < 4000
