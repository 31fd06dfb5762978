"""Runs that lose workers: where a worker is struck, what its run is held against, and what may be left afterwards."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from driver_script import wait_until
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import PeerLost
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.run import Run
from manyhands.replica.replica import Replica
from manyhands.server.client import ServerClient, ShardConnection
from manyhands.training import joining, worker_main
from manyhands.training.epochs import AsyncEpochs
from manyhands.training.loop import Loop
from manyhands.training.saving import Saver
from manyhands.training.validation import Validator
from manyhands.worker import Worker
from open_files import open_files

ROWS, BATCH, EPOCHS = 100, 39, 3
STEPS = 9  # three an epoch, the last one of an epoch on 22 rows
GLOBAL_ROWS = [39, 39, 22] * EPOCHS

# -- what befalls a worker ---------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def raise_value_error() -> None:
    raise ValueError("these rows are odd")


def raise_key_error() -> None:
    raise KeyError("another defect")


def raise_memory_error() -> None:
    raise MemoryError("no room for the activations")


def raise_bad_input() -> None:
    raise mh.BadInput("targets must be below 3")


def lose_peer() -> None:
    raise PeerLost(0, "here", "barrier", 0, 0.0)


def leave() -> None:
    sys.exit(3)


def hang() -> None:
    time.sleep(600)


@dataclass(frozen=True)
class Strike:
    """What befalls a worker at a place that `faults=` has no name for: once in a run, whatever processes it has.

    call: at the so manieth time that a process comes there. process: of its processes only this one, None: any.
    It is reported as a fault of the engine's is, and so counted in `run.info["faults"]`.
    """

    worker_id: int
    place: str
    act: Callable[[], None] = kill
    call: int = 1
    process: int | None = None

    def __str__(self) -> str:
        process = "" if self.process is None else f" of process {self.process}"
        return f"{self.act.__name__}={self.worker_id}@{self.place}{process}"


class Strikes:
    """A task's model function that arms the worker's process in which it is called. folder: for marks."""

    def __init__(self, folder: Path, *strikes: Strike, model: Callable[[], nn.Module] = plain.mlp) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._strikes, self._model = folder, strikes, model

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.driver.__class__.__name__ == "ProcessDriverClient":
            number = self._numbered(f"process-{worker.worker_id}")
            own = [one for one in self._strikes if one.worker_id == worker.worker_id and one.process in (None, number)]
            _armed(own, self._befall)
        return self._model()

    def _numbered(self, name: str) -> int:
        """How often this name was given in the run; a process counts each of its own calls apart."""
        number = 1
        while True:
            try:
                os.close(os.open(self._folder / f"{name}-{number}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                number += 1

    def _befall(self, strike: Strike) -> None:
        if self._numbered(str(strike).replace("/", "-")) > 1:
            return
        worker = mh.worker()
        worker.driver.report(
            Event(type="fault", time_s=time.perf_counter(), rank=worker.worker_id, values={"fault": str(strike)})
        )
        strike.act()


def _armed(strikes: list[Strike], befall: Callable[[Strike], None]) -> None:
    """Have this process, which trains for one worker, pass the places of its strikes."""
    calls: Counter[str] = Counter()

    def reach(place: str) -> None:
        calls[place] += 1
        for strike in strikes:
            if (strike.place, strike.call) == (place, calls[place]):
                befall(strike)

    def asks(loop: Loop, type: str, **values: Any) -> str:
        return type

    def evaluates(validator: Validator, feed: Any, parameters: Any, buffers: Any, prefix: str) -> str:
        return prefix.rstrip("_")

    _around(Loop, "_ask", asks, reach)  # on all workers, of whom the first asks the driver
    _around(Worker, "ask", lambda worker, type, **values: type, reach, "tell")
    _around(Validator, "_evaluate", evaluates, reach)
    for owner, name in (
        (Replica, "backward"),
        (Saver, "save"),
        (Loop, "outcome"),
        (worker_main, "join"),
        (joining, "_bring"),
        (joining, "_train_extra"),
        (joining, "_push_extra"),
        (Loop, "step_extra"),
        (Worker, "lease"),
        (AsyncEpochs, "_meet"),
        (AsyncEpochs, "take_back"),
        (ServerClient, "push"),
    ):
        _around(owner, name, lambda *_, **__: "", reach)
    _around(ShardConnection, "push", lambda *_, **__: "", reach, "push to a shard")
    _within_complete(reach)
    atexit.register(reach, "deliver")  # what is delivered is made by then
    reach("start")


def _around(owner: Any, name: str, what: Callable[..., str], reach: Callable[[str], None], called: str = "") -> None:
    """Pass "before …" and "after …" the place called so, else by its name, with `what` of the arguments."""
    plain_call = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        place = " ".join(filter(None, (called or name.strip("_"), what(*args, **options))))
        reach(f"before {place}")
        value = plain_call(*args, **options)
        reach(f"after {place}")
        return value

    setattr(owner, name, call)


def _within_complete(reach: Callable[[str], None]) -> None:
    """Pass "in complete" once all have a round's result, before it is this replica's."""
    plain_call = Replica.complete

    def complete(replica: Replica, group: Any, action: Callable[[], Any], **options: Any) -> Any:
        def barrier() -> None:
            group.barrier()
            reach("in complete")

        reach("before complete")
        return plain_call(replica, SimpleNamespace(barrier=barrier), action, **options)

    Replica.complete = complete


# -- a run and what it is held against ---------------------------------------------------------------------------------


class Recording(mh.Callback):
    """All that callbacks are told."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.steps: list[int] = []
        self.validations: list[tuple[int, int]] = []
        self.metrics: list[dict[str, float]] = []
        self.best: list[bool] = []
        self.epochs: list[int] = []
        self.rates: list[float] = []
        self.faults: list[str] = []
        self.changes: list[str] = []
        self.ends: list[str] = []

    def on_start(self, event: Event) -> None:
        self.order.append("start")

    def on_step(self, event: Event) -> None:
        self.order.append(f"step {event.tick}")
        self.steps.append(event.tick)
        self.rates.append(event.values["rate"])

    def on_validation(self, event: Event) -> None:
        self.order.append("validation")
        self.validations.append((event.values["epoch"], event.step))
        self.metrics.append(event.values["metrics"])
        self.best.append(event.values["best"])

    def on_epoch(self, event: Event) -> None:
        self.order.append("epoch")
        self.epochs.append(event.values["epoch"])

    def on_notice(self, event: Event) -> None:
        if event.type == "fault":
            self.faults.append(event.values["fault"])
        if event.type == "change":
            self.changes.append(event.values["message"])

    def on_end(self, event: Event) -> None:
        self.ends.append(event.type)


def cosine(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)


def task(**fields: Any) -> mh.Task:
    """Float64, AdamW with a schedule, 39 rows a batch and 22 in an epoch's last one, shuffled."""
    common = {
        "train_data": plain.rows(ROWS),
        "validation_data": plain.rows(30, seed=2),
        "test_data": plain.rows(30, seed=3),
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "schedule": cosine,
    }
    return plain.task(**{**common, **fields})


def all_here(worker: Worker) -> bool:
    """A replacement is a member, or it asked for its place and the members have heard of it, or another one is lost."""
    return worker.size >= 3 or worker.interrupted or worker.broken


@dataclass
class Patient:
    """A loss in which a worker waits, at each step of its process from the so manieth on, for what is to happen first."""

    until: Callable[[Worker], object] = all_here
    call: int = 4
    rests_s: float = 0.0  # at the one after
    loss: Callable[[nn.Module, Any], Any] = plain.cross_entropy
    calls: int = 0
    step: tuple[int, int] = (-1, -1)  # generation and step of the newest call: a large slice is computed in several

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        worker = mh.worker()
        if worker is not None and model.training and self.step != (step := (worker.generation, worker.group.step)):
            self.step = step
            self.calls += 1
            if self.calls >= self.call:
                wait_until(lambda: self.until(worker))
            if self.calls == self.call + 1:
                time.sleep(self.rests_s)
        return self.loss(model, batch)


def faulty(local: Local, faults: str) -> Local:
    """An engine with faults that uses the tests' warm fork server."""
    engine = Local(faults=faults)
    object.__setattr__(engine, "_slot", local._slot)
    return engine


@dataclass
class Trial:
    """Trains with workers that are lost, on a warm fork server."""

    local: Local
    folder: Path
    seen: Recording = field(default_factory=Recording)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def train(self, *strikes: Strike, faults: str = "", of: mh.Task | None = None, **options: Any) -> Run:
        given: dict[str, Any] = {"workers": 3, "survive": "max_losses=3", "timeout_s": 60, "callbacks": [self.seen]}
        used = task() if of is None else of
        model = Strikes(self.folder / "marks", *strikes, model=used.model) if strikes else used.model
        engine = faulty(self.local, faults) if faults else self.local
        return mh.train(used, engine=engine, **{**given, "model": model, **options})


def reference(of: mh.Task | None = None, **options: Any) -> Run:
    """The run of one worker, in this process, without faults."""
    return mh.train(task() if of is None else of, workers=1, engine="local", **options)


def fired(run: Run, *faults: str | Strike) -> None:
    assert run.info.get("faults", {}) == {str(one): 1 for one in faults}, run.info


def equal(run: Run, other: Run, tolerance: float = 1e-10) -> None:
    """Parameters and buffers, and the metrics that they give."""
    states = run.model.state_dict(), other.model.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=0, atol=tolerance), name
    assert run.metrics.keys() == other.metrics.keys()
    for name, value in run.metrics.items():
        assert abs(value - other.metrics[name]) <= 10 * tolerance, name


def recorded_once(run: Run, seen: Recording, run_dir: Path, global_rows: list[int]) -> None:
    """Each step once, with the rows of its global batch: in history, in the events on disk, for callbacks."""
    steps = list(range(len(global_rows)))
    assert run.rows["total"] == sum(global_rows)
    assert [(row["tick"], row["rows"], row["unused"]) for row in run.history] == [
        (tick, rows, 0) for tick, rows in enumerate(global_rows)
    ]
    assert seen.steps == steps
    assert all(row["loss"] is not None for row in run.history)
    from_disk = {row["tick"]: row for row in mh.read_history(run_dir)}
    assert len(list(mh.read_history(run_dir))) == len(from_disk)
    assert sorted(from_disk) == steps
    for row in run.history:
        for name in ("rows", "unused", "epoch", "loss", "rate", "weight", "bytes"):
            assert from_disk[row["tick"]][name] == row[name], (row["tick"], name)
    events = list(event_log.read(run_dir / event_log.FILE))  # raises for a line that is none
    assert events[-1].type == "end"
    assert max(event.generation for event in events) + 1 == run.generations
    last = json.loads((run_dir / "result.json").read_text())
    assert last["rows"]["total"] == sum(global_rows)
    assert last["generations"] == run.generations


# -- what is left ------------------------------------------------------------------------------------------------------


def descendants() -> set[int]:
    """All processes that descend from this one, zombies included."""
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parent_of[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parent_of.items() if parent in new} - found
        found |= new
    return found


def files() -> set[str]:
    """Where this library leaves files, if it leaves any, that are this test process's user's."""
    shared, scratch = Path("/dev/shm"), Path(tempfile.gettempdir())
    found = {str(path) for path in shared.iterdir()} if shared.is_dir() else set()
    return found | {str(path) for pattern in ("mh-*", "manyhands-*") for path in scratch.glob(pattern)}


@contextmanager
def nothing_left() -> Iterator[None]:
    """What was there before, is there afterwards, and nothing else."""
    before = descendants(), open_files(), files()
    yield
    wait_until(lambda: descendants() <= before[0], 5.0)
    assert open_files() <= before[1]
    assert files() <= before[2]


def flat(run: Run) -> Tensor:
    return plain.flat(run.model)
