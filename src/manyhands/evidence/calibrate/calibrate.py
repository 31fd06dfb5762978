"""`calibrate`: measure what a task costs on this machine, and how well the simulator predicts it."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from manyhands import engines
from manyhands.engines.base import Engine
from manyhands.engines.cores import usable_cores
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.evidence.calibrate import measure
from manyhands.evidence.calibrate.coding import Coded, coded, codings
from manyhands.evidence.calibrate.fit import Computed, Terms, computed
from manyhands.evidence.calibrate.observe import (
    ObservedOn,
    TickTime,
    block_of,
    blocks,
    merged,
    observe,
    own_ticks,
    steps_for,
    tick_time,
)
from manyhands.recording.run import environment
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.strategies.dynsgd import DynSGD
from manyhands.strategies.ensemble import Ensemble
from manyhands.task import Task
from manyhands.training.config import TrainConfig, check_place, task_from

STRATEGIES = ("allreduce", "local-sgd:period=8", "dynsgd")
SERVED = DynSGD()
"""Of which leases and requests are measured: each tick is a lease, a pull and a push, and updates are scaled by their staleness."""
REQUESTS = 2  # of a tick of SERVED
STEPS = 16
REPEATS, QUICK_REPEATS = 3, 1
_COMPUTE_STEPS = 8
_CODEC_TICKS, _QUICK_CODEC_TICKS = 4, 2  # of each worker, for each setting of a codec
_LEAST_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy's step, for real and simulated; seconds."""

    strategy: str
    real_s: float  # of the quickest run: the median over its blocks
    slowest_s: float  # of the slowest run
    simulated_s: float

    @property
    def error(self) -> float:
        """simulated/real - 1, of the quickest run"""
        return self.simulated_s / self.real_s - 1

    @property
    def worst(self) -> float:
        """The same of the quickest or the slowest run, whichever is further off."""
        slowest = self.simulated_s / self.slowest_s - 1
        return max(self.error, slowest, key=lambda error: abs(math.log1p(error)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was measured; `profile` is what engine `sim` takes."""

    profile: Profile
    compute: Computed
    memory: Terms  # (latency in seconds, seconds a bit) of the group in shared memory
    sockets: Terms  # of the group over sockets
    server: measure.Served
    codecs: tuple[Coded, ...] = ()
    predictions: tuple[Prediction, ...]
    seconds: float  # that it took


def calibrate(task: Task | str | None = None, **options: Any) -> Profile:
    """Measure what a task costs on this machine, for engine `sim`: `Sim(profile=path)` of what `profile.save(path)` wrote.

    task, and further options: as `calibrated` takes them. Raises what it raises.
    """
    return calibrated(task, **options).profile


def calibrated(
    task: Task | str | None = None,
    *,
    workers: int = 2,
    strategies: Iterable[Strategy | str] = STRATEGIES,
    steps: int = STEPS,
    quick: bool = False,
    engine: Engine | str = "auto",
    device: str = "auto",
    threads_per_worker: int | None = None,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
    **task_fields: Any,
) -> Calibration:
    """Measure what a task costs on this machine with so many workers at the same time.

    Seconds a row and a tick, with their jitter, come from ticks of the task's own loop on all workers, which do not
    exchange anything, at three batch sizes; latency and bandwidth from collectives of 4 KB to the model's own vector;
    server and leases from calls of one worker; what codecs compute from means of the task's own gradients, of which nothing is
    sent. Runs of all kinds alternate three times, and of each kind the quickest
    counts: a machine's other work only ever slows one down. Each strategy runs for real and simulated, and the profile
    holds how far the predicted time of a step is off.

    In the profile this machine is a host of so many workers; more of them are on more such hosts, joined as closely as
    sockets on this machine are, and shards of a server are on the hosts of the workers.

    task, task_fields: as `train` takes them. workers: at least 2. strategies: which to compare; none is fine.
    steps: of each real run; at least three times a strategy's period. quick: each run once instead of three times.
    engine: local. say: called with a line about what is done now.

    Raises BadInput for what cannot be, before any process starts where that can be known; Unsupported for another
    engine; what a worker raises, as `train` does.
    """
    chosen = [strategy_of(strategy) for strategy in strategies]
    own = task_from(task, task_fields)
    local = _local_of(engine)
    _check(own, chosen, local, workers, steps, timeout_s)
    check_place(device, threads_per_worker)
    place = ObservedOn(engine=local, workers=workers, threads=threads_per_worker, device=device, timeout_s=timeout_s)
    with local if isinstance(engine, str) else nullcontext():  # one that is given may be warm, and stays so
        return _Calibrating(own, place, chosen, steps, quick, say).run()


def _local_of(engine: Engine | str) -> Local:
    found = engines.engine_of(engine)
    if not isinstance(found, Local):
        raise Unsupported(
            f"calibrate measures this machine by workers that it starts here, which engine {found.name} does not do: take engine "
            "local, outside of manyhands run and torchrun"
        )
    return found


def _check(task: Task, strategies: list[Strategy], engine: Local, workers: int, steps: int, timeout_s: float) -> None:
    if not is_whole(workers, 2):
        raise BadInput(
            f"calibrate needs at least 2 workers, not {workers!r}: with one there is nothing between workers to measure"
        )
    if not is_whole(steps, _LEAST_STEPS):
        raise BadInput(f"steps must be a whole number of at least {_LEAST_STEPS}, not {steps!r}")
    for strategy in [Ensemble(), *strategies]:
        asked = TrainConfig(task=task, strategy=strategy, engine=engine, workers=workers, directory=None)
        asked.check(servers=1, nonfinite="raise", max_seconds=None, timeout_s=timeout_s, resume=False)


class _Calibrating:
    """One calibration. Real runs of all kinds alternate, so that all of them find the machine at its quietest."""

    def __init__(
        self,
        task: Task,
        place: ObservedOn,
        strategies: list[Strategy],
        steps: int,
        quick: bool,
        say: Callable[[str], None],
    ) -> None:
        self.task, self.place, self.strategies, self.say = task, place, strategies, say
        self.steps, self.repeats = steps_for(steps), QUICK_REPEATS if quick else REPEATS
        self.codec_ticks = _QUICK_CODEC_TICKS if quick else _CODEC_TICKS
        self.ticks: list[dict[int, list[float]]] = []  # of each run that does not exchange: {rows: seconds}
        self.alone: list[TickTime] = []  # of those with the task's own batch
        self.serving: list[TickTime] = []  # of runs of SERVED
        self.real: dict[str, list[float]] = {
            spec_of(strategy): [] for strategy in strategies
        }  # of each run, seconds a step
        self.every: dict[str, int] = {}  # steps a block

    def run(self) -> Calibration:
        start = time.monotonic()
        self.say("the group in shared memory, the group over sockets")
        memory, sockets = measure.groups(self.place, self.task)
        self.say("the parameter server and its leases")
        server = measure.served(self.place, self.task)
        self.say("what codecs compute")
        codecs = coded(self.place, self.task, self.codec_ticks)
        sizes = self._own_batch()
        for repeat in range(self.repeats):
            self.say(
                f"real steps, {repeat + 1} of {self.repeats}: without exchange, then {', '.join(self.real) or 'no more'}"
            )
            self._repeat(sizes)
        workers = self.place.workers
        compute = computed(merged(self.ticks), sizes[0] // workers)
        own, _ = measure.vector_of(self.task)
        fits = (
            measure.fit_group(memory, workers, own, one_host=True),
            measure.fit_group(sockets, workers, own, one_host=False),
        )
        profile = self._with_requests(self._profile(compute, *fits, server, codecs, sizes))
        predictions = tuple(self._predict(profile, strategy) for strategy in self.strategies)
        errors = {prediction.strategy: round(prediction.worst, 4) for prediction in predictions}
        return Calibration(
            profile=replace(profile, errors=errors),
            compute=compute,
            memory=fits[0],
            sockets=fits[1],
            server=server,
            codecs=codecs,
            predictions=predictions,
            seconds=time.monotonic() - start,
        )

    # -- real runs ---------------------------------------------------------------------------------------------------

    def _own_batch(self) -> list[int]:
        """Global batch sizes to measure, the task's own first."""
        events = observe(self.place, self.task, Ensemble(), 1)
        own = sum(event.values["rows"] for event in events)
        return [own, *(size for size in (own // 2, own + own // 2) if size >= self.place.workers and size != own)]

    def _repeat(self, sizes: list[int]) -> None:
        for size in sizes:
            task = self.task.with_fields(batch_size=size) if size != sizes[0] else self.task
            steps = _COMPUTE_STEPS * (2 if size == sizes[0] else 1)
            events = observe(self.place, task, Ensemble(), steps_for(steps))
            self.ticks.append(own_ticks(events))
            if size == sizes[0]:
                self.alone.append(tick_time(events))
        for strategy in self.strategies if SERVED in self.strategies else [SERVED, *self.strategies]:
            events = observe(self.place, self.task, strategy, self.steps)
            if strategy == SERVED:
                self.serving.append(tick_time(events))
            if strategy not in self.strategies:
                continue
            every = self.every[spec_of(strategy)] = block_of(events, strategy)
            self.real[spec_of(strategy)].append(statistics.median(blocks(events, self.place.workers, every)))

    # -- the model ---------------------------------------------------------------------------------------------------

    def _profile(
        self,
        compute: Computed,
        memory: Terms,
        sockets: Terms,
        server: measure.Served,
        codecs: tuple[Coded, ...],
        sizes: list[int],
    ) -> Profile:
        own_s = 2 * memory.first + 8 * server.bytes * memory.second  # that the network takes of a pull, or of a push
        network = SimNetworkSpec(
            workers_per_host=self.place.workers,
            servers="spread",
            local_latency=memory.first,
            local_bandwidth=measure.bandwidth_of(memory),
            latency=sockets.first,
            bandwidth=measure.bandwidth_of(sockets),
        )
        return Profile(
            networks={"local": network},
            compute=Compute(
                row=compute.row,
                step=compute.step,
                jitter=f"lognormal:{compute.jitter:.4g}" if compute.jitter else "none",
                lease=server.lease,
                merge=max(0.0, (server.pull + server.push) / 2 - own_s) / server.bytes,
                codecs=codings(codecs),
            ),
            task=self.task.name,
            workers=self.place.workers,
            batch_sizes=tuple(sorted({rows for run in self.ticks for rows in run})),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=_machine(self.place),
        )

    def _with_requests(self, profile: Profile) -> Profile:
        """With what leases and requests take beside workers that compute: driver and shards then share the workers' cores."""
        served, alone = (min(turns, key=lambda turn: turn.seconds) for turns in (self.serving, self.alone))
        free = replace(profile, compute=replace(profile.compute, lease=0.0))
        simulated = tick_time(observe(self._simulated(free), self.task, SERVED, self.steps))
        lease, request = lease_and_request(served, alone, simulated.seconds)
        found = replace(
            profile.compute, lease=max(lease, profile.compute.lease), request=request
        )  # idle, it takes least
        return replace(profile, compute=found)

    def _simulated(self, profile: Profile) -> ObservedOn:
        engine = Sim(network=profile.network, compute=profile.compute)
        return replace(self.place, engine=engine, threads=1, device="cpu")

    def _predict(self, profile: Profile, strategy: Strategy) -> Prediction:
        name = spec_of(strategy)
        self.say(f"simulated steps: {name}")
        events = observe(self._simulated(profile), self.task, strategy, self.steps)
        return Prediction(
            strategy=name,
            real_s=min(self.real[name]),
            slowest_s=max(self.real[name]),
            simulated_s=statistics.fmean(blocks(events, self.place.workers, self.every[name])),
        )


def lease_and_request(served: TickTime, alone: TickTime, simulated_s: float) -> tuple[float, float]:
    """Seconds of a lease, and of a request beside messages and merging.

    served: a real tick of SERVED. alone: one that exchanges nothing. simulated_s: of SERVED's, where both are free. What its
    rows take longer to come than those of `alone` is the lease's, the rest the requests'.
    """
    more = max(0.0, served.seconds - simulated_s)
    lease = min(more, max(0.0, served.input_s - alone.input_s)) if served.leased else 0.0
    return lease, (more - lease) / REQUESTS


def _machine(place: ObservedOn) -> dict[str, str]:
    known = environment()
    return {
        "host": known["host"],
        "processor": platform.processor() or platform.machine(),
        "cores": str(known["cores"]),
        "threads_per_worker": str(place.threads or max(1, usable_cores() // place.workers)),
        "device": place.device if torch.cuda.is_available() else "cpu",
        **{name: str(version) for name, version in known["versions"].items()},
    }
