"""Runs that lose workers: where a worker is struck, and what its run is held against."""

import atexit
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from driver_script import wait_until
from torch import nn

import manyhands as mh
import plain
from manyhands.engines.fault_injector import FaultInjector
from manyhands.engines.local.engine import Local
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.sim.driver_client import SimDriverClient
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.timeline import Killed
from manyhands.errors import PeerLost
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.run import Run
from manyhands.worker import DriverClient, Worker

ROWS, BATCH, EPOCHS = 100, 39, 3
STEPS = 9  # three an epoch, the last one of an epoch on 22 rows
GLOBAL_ROWS = [39, 39, 22] * EPOCHS

# -- what befalls a worker ---------------------------------------------------------------------------------------------


def kill() -> None:
    driver = mh.worker().driver
    if isinstance(driver, SimDriverClient):
        driver._lease_server.timeline.running.killed = True
        raise Killed
    os.kill(os.getpid(), signal.SIGKILL)


def raises(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    act.__name__ = type(error).__name__
    return act


lose_peer = raises(PeerLost(0, "here", "barrier", 0, 0.0))


def leave() -> None:
    sys.exit(3)


def hang() -> None:
    time.sleep(600)


@dataclass(frozen=True)
class Strike:
    """What befalls a worker at a place that `faults=` has no name for: once in a run, whatever processes it has.

    place: a phase that it reports to the driver, or "ask …", "told …": before and after a question to the driver;
    "extra": a slice of a lost worker; "model": its model is built; "exit": its process has returned.
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
    """A task's model function that arms the worker in which it is called. folder: for marks."""

    def __init__(self, folder: Path, *strikes: Strike, model: Callable[[], nn.Module] = plain.mlp) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._strikes, self._model = folder, strikes, model

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and isinstance(worker.driver, ProcessDriverClient | SimDriverClient):
            number = self._numbered(f"process-{worker.worker_id}")
            own = [one for one in self._strikes if one.worker_id == worker.worker_id and one.process in (None, number)]
            calls: Counter[str] = Counter()

            def reach(place: str) -> None:
                calls[place] += 1
                for strike in own:
                    if (strike.place, strike.call) == (place, calls[place]):
                        self._befall(strike)

            _follow(worker.driver, reach)
            reach("model")
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
        event = Event(type="fault", time_s=worker.clock(), rank=worker.worker_id, values={"fault": str(strike)})
        getattr(worker.driver, "report", worker.driver.emit)(event)
        strike.act()


def _follow(driver: DriverClient, reach: Callable[[str], None]) -> None:
    """The phases that a worker reports to its driver, and what it asks, are its places."""
    driver.injector = injector = driver.injector or FaultInjector([], lambda fault, step: None)
    reported, ask, collect, joining = injector.reach, driver.ask, driver.collect, False

    def reports(phase: str, step: int) -> None:
        nonlocal joining
        reported(phase, step)
        joining = phase == "join" or (joining and phase != "input")
        reach("extra" if joining and phase == "compute" else phase)

    def asks(event: Event) -> dict[str, Any]:
        reach(f"ask {event.type}")
        answer = ask(event)
        reach(f"told {event.type}")
        return answer

    def collects(group: Any) -> None:
        reach("collect")
        collect(group)

    injector.reach, driver.ask, driver.collect = reports, asks, collects
    if not isinstance(driver, SimDriverClient):
        atexit.register(reach, "exit")


# -- a run and what it is held against ---------------------------------------------------------------------------------


class Recording(mh.Callback):
    """What callbacks are told, in order, and of some of it the values."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.validations: list[tuple[int, int]] = []
        self.best: list[bool] = []
        self.epochs: list[int] = []
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
        self.validations.append((event.values["epoch"], event.step))
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

    def stepped_before_the_last_epoch_ended(self, step: int) -> bool:
        """Callbacks get steps as they are made, and not all of them at the end."""
        return self.order.index(f"step {step}") < len(self.order) - 1 - self.order[::-1].index("epoch")


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


def one_is_lost(worker: Worker) -> bool:
    """At their own pace the others would take all rows before it."""
    return worker.broken or worker.interrupted or worker.generation > 0


@dataclass
class Patient:
    """A loss in which a process waits, at each step from the so manieth on, for what is to happen first."""

    until: Callable[[Worker], object] = all_here
    call: int = 4
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
        return self.loss(model, batch)


@dataclass
class Trial:
    """Trains with workers that are lost: in processes on a warm fork server, or simulated."""

    folder: Path
    simulated: bool = False
    seen: Recording = field(default_factory=Recording)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def train(self, *befalls: str | Strike, of: mh.Task | None = None, **options: Any) -> Run:
        """befalls: what `faults=` says, or strikes; "" is nothing."""
        used = task() if of is None else of
        strikes = [one for one in befalls if isinstance(one, Strike)]
        faults = ",".join(one for one in befalls if isinstance(one, str) and one)
        engine: Any = Local(faults=faults)
        if self.simulated:
            engine = Sim(compute="step=100ms", faults=",".join(filter(None, (faults, "notice=10ms"))))
        given = {"workers": 3, "survive": "max_losses=3", "timeout_s": 60, "callbacks": [self.seen]}
        given["model"] = Strikes(self.folder / "marks", *strikes, model=used.model) if strikes else used.model
        return mh.train(used, engine=engine, **{**given, **options})

    def struck(self, *befalls: str | Strike, **options: Any) -> Run:
        """`train` in `run_dir`, where each of them befalls the run once, and nothing else."""
        run = self.train(*befalls, run_dir=self.run_dir, **options)
        fired(run, *befalls)
        return run

    def events(self, *types: str) -> list[Event]:
        return [event for event in event_log.read(self.run_dir / event_log.FILE) if event.type in types]


def survive(replaced: bool, losses: int = 3) -> str:
    return f"max_losses={losses},replace={str(replaced).lower()}"


def reference(of: mh.Task | None = None, **options: Any) -> Run:
    """The run of one worker, in this process, without faults."""
    return mh.train(task() if of is None else of, workers=1, engine="local", **options)


def fired(run: Run, *befalls: str | Strike) -> None:
    planned = [part for one in befalls for part in str(one).split(",") if part]
    assert run.info.get("faults", {}) == dict.fromkeys(planned, 1), run.info


def lost(run: Run) -> list[tuple[int, str]]:
    return [(one["worker_id"], one["cause"]) for one in run.losses]


def counted_once(run: Run, global_rows: list[int] = GLOBAL_ROWS) -> None:
    """The history has each global batch with its rows."""
    assert run.rows["total"] == sum(global_rows)
    assert [(row["tick"], row["rows"]) for row in run.history] == list(enumerate(global_rows))


def equal(run: Run, other: Run, tolerance: float = 1e-10) -> None:
    """Parameters and buffers, and the metrics that they give."""
    states = run.model.state_dict(), other.model.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=0, atol=tolerance), name
    assert run.metrics.keys() == other.metrics.keys()
    for name, value in run.metrics.items():
        assert abs(value - other.metrics[name]) <= 10 * tolerance, name


def recorded_once(run: Run, trial: Trial, global_rows: list[int] = GLOBAL_ROWS) -> None:
    """Each step once, with the rows of its global batch: in history, in the events on disk, for callbacks."""
    counted_once(run, global_rows)
    steps = list(range(len(global_rows)))
    assert trial.seen.steps == steps
    assert all(row["loss"] is not None and row["unused"] == 0 for row in run.history)
    written = list(mh.read_history(trial.run_dir))
    assert sorted(row["tick"] for row in written) == steps
    from_disk = {row["tick"]: row for row in written}
    for row in run.history:
        for name in ("rows", "unused", "epoch", "loss", "rate", "weight", "bytes"):
            assert from_disk[row["tick"]][name] == row[name], (row["tick"], name)
    events = list(event_log.read(trial.run_dir / event_log.FILE))  # raises for a line that is none
    assert events[-1].type == "end"
    assert max(event.generation for event in events) + 1 == run.generations
    last = json.loads((trial.run_dir / "result.json").read_text())
    assert last["rows"]["total"] == sum(global_rows)
    assert last["generations"] == run.generations


# -- the places of a run of `task()` -------------------------------------------------------------------------------------

PLACES: dict[str, str | tuple[str, int]] = {  # what `faults=` says of a worker, or a strike's place and call
    "join": "kill={}@step:0:join",
    "first collective": ("join", 1),
    "started": ("told start", 1),
    "joined": ("input", 1),
    "first step": "kill={}@step:0",
    "first commit": "kill={}@step:0:commit",
    "compute": "kill={}@step:4",
    "exchange": "kill={}@step:4:exchange",
    "commit": "kill={}@step:4:commit",
    "epoch's last step": "kill={}@step:5:exchange",
    "epoch's last commit": "kill={}@step:5:commit",
    "validation": ("validation", 2),
    "validated": ("collect", 4),
    "validation told": ("told validation", 2),
    "epoch": ("collect", 5),
    "epoch told": ("told epoch", 2),
    "save": "kill={}@step:3:save",
    "in a save": ("ask sync", 2),
    "synced": ("told sync", 2),
    "last step": "kill={}@step:8:exchange",
    "last commit": "kill={}@step:8:commit",
    "last save": "kill={}@step:9:save",
    "last epoch told": ("told epoch", 3),
    "outcome": ("end", 1),
    "test": ("validation", 4),
    "gathered": ("deliver", 1),
}
OF_THE_FIRST = ("started", "validation told", "epoch told", "last epoch told", "gathered")
"""Places of the first worker alone."""


def at_place(when: str, worker_id: int) -> str | Strike:
    place = PLACES[when]
    return place.format(worker_id) if isinstance(place, str) else Strike(worker_id, place[0], call=place[1])


def as_ever(run: Run, trial: Trial, one_worker: Run) -> None:
    """The result is one worker's, and callbacks hear of each step, validation and epoch once."""
    equal(run, one_worker)
    recorded_once(run, trial)
    assert trial.seen.validations == [(epoch + 1, 3 * (epoch + 1)) for epoch in range(EPOCHS)]
    assert trial.seen.epochs == [epoch + 1 for epoch in range(EPOCHS)]
    assert trial.seen.order.count("start") == 1
    assert trial.seen.ends == ["end"]
