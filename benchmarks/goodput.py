"""Goodput: which share of the workers' time ends up in the result when workers are killed again and again.

    python benchmarks/goodput.py killed [--seconds 300] [--mtbf 32] [--every 5] [--only survive] [--json FILE]
    python benchmarks/goodput.py simulated [--workers 1000] [--days 0.5] [--rates "Llama 3,RSC-1,OPT-175B"] [--json FILE]

**killed.** Four workers of this machine train with allreduce. Gradients sleep, so that a step of all four takes 0.2 s
and two cores are enough: with computing, a killed worker would only make room for the others. With fewer workers each
has more rows, and sleeps longer. Each worker's process is killed after 32 s on average (`faults=mtbf=32s`, SIGKILL),
and a process is started in its place. Beside it, **restarts**: the same task without `survive` in a loop of `train(…,
resume=True)`, with a checkpoint every `--every` steps. At the times of the first run's kills the worker of the same id
gets SIGKILL; where it has no process just then, its next one as it starts. The loop starts again in the same process,
with a warm fork server, and at once: what an operator or a supervisor would add is left out.

    goodput        productive worker-seconds / (workers · wall seconds), from the first step's begin. Productive is a
                   global batch that counts in the end, once: so many worker-seconds as it takes all workers while
                   nothing happens (their median step, exchange included).
    sleeping       the same with the sleep alone: 0.2 s
    formula        A · (1 − K/W · (p + τ/2 + q)), A = θ/(θ + R), with the kills that happened: K of them in W seconds,
                   θ the workers' living seconds a kill, R the seconds that a worker is away after one, p from a kill
                   until the others begin the next generation's first step, τ the step, q the seconds from the last
                   step of a generation to the next one, in which a worker is back: all as measured. Survivors notice
                   a death in the exchange, so that p holds what was left of their gradient.
    for restarts   λC·e^(−λR)/(e^(λ(C+s)) − 1), λ = K/W, C the seconds between two checkpoints, s a save, R from a kill
                   to the next launch's first step

**simulated.** A thousand workers on engine `sim` with `survive`, at three published rates of failures a host and day,
for half a day of virtual time. A step takes five minutes: few steps, and each loss is dear, so that there is something
to see; the formula holds while losses are rare against steps. A loss is noticed after 10 s, and another host is there
10 minutes later. Productive is a worker's part of a step that counts; a replacement that waits for the next step is away. `in general` is the formula before a run, with
the rate instead of the kills that happened.

    Llama 3     419 unexpected interruptions in 54 days on 2,048 hosts (16,384 GPUs): The Llama 3 Herd of Models, 2024
    RSC-1       6.5 failures per thousand node-days: Kokolis et al., Revisiting Reliability in Large-Scale Machine
                Learning Research Clusters, HPCA 2025, arxiv.org/abs/2410.21680
    OPT-175B    an interruption every 7.5 hours on 124 hosts (992 GPUs), 2021: glennklockwood.com/garden/job-reliability
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import manyhands as mh
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import WorkerFailed
from manyhands.events import Event

WORKERS = 4
STEP_S = 0.2  # of all workers
ROWS = 24  # a global batch
DAY_S = 86400.0
RATES = {"Llama 3": 419 / 54 / 2048, "RSC-1": 6.5e-3, "OPT-175B": 24 / 7.5 / 124}  # failures a host and day
SIM_STEP_S, SIM_NOTICE_S, SIM_BACK_S = 300.0, 10.0, 600.0


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the workers are ended, too
    facts = machine.facts()
    print(f"load {os.getloadavg()[0]:.1f} before")
    found = killed(options) if options.what == "killed" else simulated(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, **found}, indent=1) + "\n")


# -- the formulas ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Measured:
    """A run with kills, seen from outside. Seconds; absent_s and productive_s are worker-seconds."""

    workers: int
    wall_s: float
    step_s: float
    kills: int
    absent_s: float
    pause_s: float  # p, the mean
    join_s: float  # q, the sum over returns, divided by the kills
    productive_s: float = 0.0

    @property
    def goodput(self) -> float:
        return self.productive_s / (self.workers * self.wall_s)

    @property
    def back_s(self) -> float:
        """R"""
        return self.absent_s / max(1, self.kills)

    @property
    def formula(self) -> float:
        if not self.kills:
            return 1.0
        living_s = (self.workers * self.wall_s - self.absent_s) / self.kills  # θ
        share = living_s / (living_s + self.back_s)
        return share * (1 - self.kills / self.wall_s * (self.pause_s + self.step_s / 2 + self.join_s))

    def as_dict(self) -> dict[str, float]:
        return {**vars(self), "goodput": self.goodput, "formula": self.formula, "back_s": self.back_s}


def formula_of_restarts(rate: float, every_s: float, save_s: float, restart_s: float) -> float:
    """rate: kills a second, of the whole run."""
    return rate * every_s * math.exp(-rate * restart_s) / math.expm1(rate * (every_s + save_s)) if rate else 1.0


def mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


# -- a run's events, as they come in -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """Who trains from `begin` on, so many."""

    number: int
    begin: float
    size: int


class Watched(Observer):
    """Passes all on, and notes when what happened: on CLOCK_MONOTONIC, or in the simulation's time."""

    def __init__(self, observer: Observer, simulated: bool, workers: int) -> None:
        self._observer, self._simulated, self._workers = observer, simulated, workers
        self.kills: list[float] = []
        self.lost: list[int] = []  # worker ids
        self.generations: list[Generation] = []
        self.reported: dict[int, tuple[int, float]] = {}  # tick -> generation, and when the last worker reported it
        self.saves: list[float] = []  # seconds of each checkpoint

    def event(self, event: Event) -> None:
        if event.type == "fault":
            self.kills.append(event.time_s if self._simulated else time.perf_counter())
        elif event.type == "change" and event.values["kind"] == "lost":
            self.lost.append(event.values["worker_id"])
        elif event.type == "checkpoint":
            self.saves.append(event.values["seconds"])
        elif event.type == "step":
            self.reported[event.tick] = event.generation, event.time_s  # of a worker's own clock, which is this one
        self._observer.event(event)

    def answer(self, event: Event) -> dict[str, Any]:
        if event.type in ("start", "membership"):
            now = event.time_s if self._simulated else time.perf_counter()
            self.generations.append(Generation(event.generation, now, event.values.get("workers", self._workers)))
        return self._observer.answer(event)

    def own_event(self, event: Event) -> None:
        self._observer.own_event(event)

    def stopping(self) -> str:
        return self._observer.stopping()

    def step_s(self) -> float:
        """The median step of all workers."""
        whole = {generation.number for generation in self.generations if generation.size == self._workers}
        ticks = [self.reported[tick] for tick in sorted(self.reported)]
        return statistics.median(b[1] - a[1] for a, b in pairwise(ticks) if a[0] == b[0] and a[0] in whole)

    def measured(self, end: float, step_s: float) -> Measured:
        begin = self.generations[0].begin
        kills = [kill for kill in self.kills if begin < kill < end]
        changes = sorted([(kill, None) for kill in kills] + [(one.begin, one.size) for one in self.generations])
        absent_s, there = 0.0, self._workers
        for (now, size), (later, _) in pairwise([*changes, (end, None)]):
            there = there - 1 if size is None else size
            absent_s += (self._workers - there) * (later - now)
        pauses = [next((one.begin for one in self.generations if one.begin > kill), end) - kill for kill in kills]
        joins = [
            after.begin
            - max((at for number, at in self.reported.values() if number == before.number), default=after.begin)
            for before, after in pairwise(self.generations)
            if not any(before.begin < kill < after.begin for kill in kills)
        ]
        return Measured(
            workers=self._workers,
            wall_s=end - begin,
            step_s=step_s,
            kills=len(kills),
            absent_s=absent_s,
            pause_s=mean(pauses),
            join_s=sum(joins) / max(1, len(kills)),
        )


@dataclass(frozen=True, kw_only=True)
class WatchedLocal(Local):
    """Engine local; `seen` has the observers of its launches."""

    seen: list[Watched] = field(default_factory=list, compare=False)

    def launch(self, program: Callable[..., Any], spec: LaunchSpec) -> list[Any]:
        self.seen.append(Watched(spec.observer, False, spec.workers))
        return super().launch(program, replace(spec, observer=self.seen[-1]))


@dataclass(frozen=True, kw_only=True)
class WatchedSim(Sim):
    """Engine sim, in the same way."""

    seen: list[Watched] = field(default_factory=list, compare=False)

    def launch(self, program: Callable[..., Any], spec: LaunchSpec) -> list[Any]:
        self.seen.append(Watched(spec.observer, True, spec.workers))
        return super().launch(program, replace(spec, observer=self.seen[-1]))


# -- killed: real processes --------------------------------------------------------------------------------------------------


def killed(options: argparse.Namespace) -> dict[str, Any]:
    engine = WatchedLocal(faults=f"mtbf={options.mtbf}s")
    run = mh.train(
        _task(None),
        engine=engine,
        workers=WORKERS,
        threads_per_worker=1,
        survive="max_losses=any",
        max_seconds=options.seconds,
    )
    watched = engine.seen[-1]
    begin, end = watched.generations[0].begin, max(at for _, at in watched.reported.values())
    survived = watched.measured(end, watched.step_s())
    survived.productive_s = run.steps * WORKERS * survived.step_s
    print(
        f"\n{WORKERS} workers, {survived.wall_s:.0f} s, {survived.kills} kills (each every {options.mtbf:g} s on average)"
    )
    print(f"{'':10}{'goodput':>9}{'sleeping':>10}{'formula':>9}{'off':>8}   measured")
    _print_goodput("survive", survived.goodput, survived.step_s, survived.formula, " goal ≥ 0.83, off by 0.03 at most")
    print(
        f"{'':49}R {survived.back_s:.2f} s, p {survived.pause_s:.3f} s, q {survived.join_s:.3f} s, "
        f"a step {survived.step_s:.3f} s, {run.steps} steps",
        flush=True,
    )
    found: dict[str, Any] = {"survive": survived.as_dict()}
    if options.only != "survive":
        kills = [
            (kill - begin, worker) for kill, worker in zip(watched.kills, watched.lost, strict=False) if kill > begin
        ]
        found["restarts"] = restarts(options, kills, survived.wall_s)
    return found


def _print_goodput(name: str, goodput: float, step_s: float, formula: float, more: str = "") -> None:
    sleeping = goodput * STEP_S / step_s
    print(f"{name:10}{goodput:9.3f}{sleeping:10.3f}{formula:9.3f}{goodput - formula:+8.3f}  {more}", flush=True)


def _task(notes: Path | None) -> mh.Task:
    """A gradient sleeps for its rows. notes: each process appends a line there as it starts."""

    def model() -> nn.Module:
        if notes is not None:
            with notes.open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "worker": getattr(mh.worker(), "worker_id", -1)}) + "\n")
        torch.manual_seed(0)
        return nn.Linear(32, 1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(len(batch[0]) * STEP_S * WORKERS / ROWS)
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS * 1000, 32, generator=generator), torch.randn(ROWS * 1000, 1, generator=generator)
    return mh.Task(
        model=model,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        train_data=(x, y),
        batch_size=ROWS,
        epochs=1000,
    )


def restarts(options: argparse.Namespace, kills: list[tuple[float, int]], seconds: float) -> dict[str, float]:
    """The same kills, without `survive`: launches one after the other, each from the newest checkpoint."""
    steps, step_s, waits, saves = 0, STEP_S, [], []
    with tempfile.TemporaryDirectory() as folder, WatchedLocal() as engine:

        def begin() -> float:
            return min((one.generations[0].begin for one in engine.seen if one.generations), default=math.inf)

        notes = Path(folder, "notes")
        executioner = Executioner(kills, notes, begin)
        while (left := seconds - max(0.0, time.perf_counter() - begin())) > 0:
            with suppress(WorkerFailed):
                run = mh.train(
                    _task(notes),
                    engine=engine,
                    workers=WORKERS,
                    threads_per_worker=1,
                    run_dir=f"{folder}/run",
                    resume=True,
                    checkpoint_every=options.every,
                    max_seconds=left,
                )
                steps = run.steps
            notes.unlink(missing_ok=True)
            watched = engine.seen[-1]
            saves += watched.saves
            if len(watched.reported) > 20:
                step_s = watched.step_s()
        wall_s = time.perf_counter() - begin()
        executioner.over.set()
        begins = [one.generations[0].begin for one in engine.seen if one.generations]
        for kill in executioner.done:
            waits += [min(later - kill for later in begins if later > kill)] if kill < begins[-1] else []
        steps = steps or _steps_saved(Path(folder, "run"))
    kills_made, every_s = len(executioner.done), options.every * step_s
    goodput = steps * step_s / wall_s
    formula = formula_of_restarts(kills_made / wall_s, every_s, mean(saves), mean(waits))
    _print_goodput("restarts", goodput, step_s, formula)
    print(
        f"{'':49}R {mean(waits):.2f} s, a save {mean(saves):.3f} s, every {every_s:.2f} s; {kills_made} kills, "
        f"{steps} steps in {wall_s:.0f} s"
    )
    return {"goodput": goodput, "formula": formula, "kills": kills_made, "restart_s": mean(waits), "steps": steps}


def _steps_saved(directory: Path) -> int:
    """Of the newest checkpoint: what counts of a run that a kill has ended."""
    events = (json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines())
    return max((event["step"] for event in events if event["type"] == "checkpoint"), default=0)


class Executioner:
    """Kills the worker of an id at its time after `begin`, or its next process once that is there.

    begin: when the first launch's first step began; infinite until then.
    """

    def __init__(self, kills: list[tuple[float, int]], notes: Path, begin: Callable[[], float]) -> None:
        self._kills, self._notes, self._begin = kills, notes, begin
        self.over = threading.Event()
        self.done: list[float] = []  # when it killed
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for after_s, worker in self._kills:
            pid: int | None = None
            while time.perf_counter() < self._begin() + after_s or (pid := self._pid(worker)) is None:
                if self.over.wait(0.01):
                    return
            with suppress(ProcessLookupError):  # its launch is being ended just now
                os.kill(pid, signal.SIGKILL)
                self.done.append(time.perf_counter())
            while self._pid(worker) == pid:  # until the loop has noticed, and removed the notes
                if self.over.wait(0.01):
                    return

    def _pid(self, worker: int) -> int | None:
        """Of the process that is there now."""
        with suppress(FileNotFoundError):
            for line in self._notes.read_text().splitlines():
                with suppress(ValueError):  # half a line
                    note = json.loads(line)
                    if note["worker"] == worker:
                        return int(note["pid"])
        return None


# -- simulated ---------------------------------------------------------------------------------------------------------------


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    workers, found = options.workers, {}
    print(f"\n{workers:,} simulated hosts, {options.days:g} days, steps of {SIM_STEP_S:g} s")
    print(
        f"{'':12}{'MTBF':>9}{'kills':>7}{'goodput':>9}{'formula':>9}{'off':>8}{'in general':>12}{'took':>8}   measured"
    )
    for name in options.rates:
        mtbf_s = DAY_S / RATES[name]
        began = time.monotonic()
        one = simulate(workers, mtbf_s, int(options.days * DAY_S / SIM_STEP_S), options.seed)
        # before a run: a worker is back at the first step after SIM_BACK_S, and half a step is still under way
        away_s = SIM_NOTICE_S + SIM_BACK_S + SIM_STEP_S / 2
        share = mtbf_s / (mtbf_s + away_s)
        general = share * (1 - workers * share / mtbf_s * SIM_STEP_S)
        print(
            f"{name:12}{mtbf_s / DAY_S:7.0f} d{one.kills:7}{one.goodput:9.4f}{one.formula:9.4f}"
            f"{one.goodput - one.formula:+8.4f}{general:12.4f}{time.monotonic() - began:6.0f} s   R {one.back_s:.0f} s, "
            f"p {one.pause_s:.0f} s, q {one.join_s:.0f} s   goal: off by 0.02 at most",
            flush=True,
        )
        found[name] = {**one.as_dict(), "general": general}
    return found


def simulate(workers: int, mtbf_s: float, steps: int, seed: int) -> Measured:
    """A tiny model, a row a worker and step: it is time that is simulated."""
    faults = f"mtbf={mtbf_s}s,back={SIM_BACK_S}s,notice={SIM_NOTICE_S}s"
    engine = WatchedSim(compute=f"step={SIM_STEP_S}s,row=0", faults=faults, seed=seed)
    x = torch.zeros(workers * steps, 1)
    mh.train(
        mh.Task(
            model=lambda: nn.Linear(1, 1),
            loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            train_data=(x, x),
            batch_size=workers,
            epochs=1,
        ),
        engine=engine,
        workers=workers,
        survive="max_losses=any",
        timeout_s=100 * SIM_STEP_S,
    )
    watched = engine.seen[-1]
    sizes = {generation.number: generation.size for generation in watched.generations}
    one = watched.measured(max(at for _, at in watched.reported.values()), SIM_STEP_S)
    one.productive_s = SIM_STEP_S * sum(sizes[generation] for generation, _ in watched.reported.values())
    return one


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser(
        "killed", description=__doc__, formatter_class=raw, help="real processes, beside restarts from checkpoints"
    )
    one.add_argument("--seconds", type=float, default=300.0, help="of each of the two runs")
    one.add_argument("--mtbf", type=float, default=32.0, help="seconds that a process lives on average")
    one.add_argument("--every", type=int, default=5, help="steps between two checkpoints of the run that restarts")
    one.add_argument("--only", choices=["survive"], help="leave the restarts out")
    two = what.add_parser(
        "simulated", description=__doc__, formatter_class=raw, help="a thousand workers in virtual time"
    )
    two.add_argument("--workers", type=int, default=1000)
    two.add_argument("--days", type=float, default=0.5, help="of virtual time, if nothing happened")
    two.add_argument("--rates", type=lambda text: text.split(","), default=list(RATES), help=", ".join(RATES))
    two.add_argument("--seed", type=int, default=0)
    for each in (one, two):
        each.add_argument("--json", type=Path, help="also write all numbers here")
    options = parser.parse_args()
    if unknown := [name for name in getattr(options, "rates", []) if name not in RATES]:
        parser.error(f"--rates: {', '.join(unknown)} is none of {', '.join(RATES)}")
    return options


if __name__ == "__main__":
    main()
