"""`calibrate`: measure a task's costs on this machine, and how well the simulator predicts them."""

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
from manyhands.evidence.calibrate.coding import CodecTimes, codings, time_codecs
from manyhands.evidence.calibrate.fit import ComputeFit, Terms, fit_compute
from manyhands.evidence.calibrate.observe import (
    RunSetup,
    TickTime,
    block_of,
    blocks,
    merged,
    observe,
    steps_for,
    tick_seconds,
    tick_time,
)
from manyhands.recording.run import environment
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.strategies.dynsgd import DynSGD
from manyhands.strategies.ensemble import Ensemble
from manyhands.task import Task, check_differentiable
from manyhands.training.config import TrainConfig, check_resources, task_from

STRATEGIES = ("allreduce", "local-sgd:period=8", "dynsgd")
SERVED = DynSGD()  # the strategy that measures leases and requests: each tick is a lease, a pull and a push
REQUESTS = 2  # in a tick of SERVED
STEPS = 16
REPEATS, QUICK_REPEATS = 3, 1
_COMPUTE_STEPS = 8
_CODEC_TICKS, _QUICK_CODEC_TICKS = 4, 2  # of each worker, for each codec setting
_LEAST_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The seconds of one strategy's step, measured and simulated."""

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
        """The larger error of the quickest and the slowest run."""
        slowest = self.simulated_s / self.slowest_s - 1
        return max(self.error, slowest, key=lambda error: abs(math.log1p(error)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All measurements; `profile` is for engine `sim`."""

    profile: Profile
    compute: ComputeFit
    memory: Terms  # (latency in seconds, seconds a bit) of the group in shared memory
    sockets: Terms  # the same of the group over sockets
    server: measure.ServerTimes
    codecs: tuple[CodecTimes, ...] = ()
    predictions: tuple[Prediction, ...]
    seconds: float  # the time that the calibration took


def calibrate(task: Task | str | None = None, **options: Any) -> Profile:
    """Measure a task's costs on this machine, for engine `sim`: `profile.save(path)`, then `Sim(profile=path)`.

    task, options, errors: see `calibrated`.
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
    """Measure a task's costs on this machine with `workers` workers computing at the same time.

    Seconds a row and a tick, with their jitter, are measured in the task's own loop on all workers, without exchange,
    at three batch sizes; latency and bandwidth by collectives from 4 KB to the model's own vector; server and leases by
    calls of one worker; codecs by means of the task's own gradients, without sending. Runs of all kinds alternate three
    times. The quickest of each kind counts: other work on the machine only slows runs down. Each strategy is run and
    simulated, and the profile holds the error of the predicted step.

    In the profile this machine is a host of `workers` workers. More workers are on more such hosts, with the latency
    and bandwidth of this machine's sockets between them. Server shards are on the workers' hosts.

    task, task_fields: as in `train`. workers: at least 2. strategies: to compare; may be empty. steps: of each real
    run; at least three times a strategy's period. quick: each run once instead of three times. engine: local. say:
    called with a line about each stage.

    Raises BadInput for invalid arguments, before any process starts if possible; Unsupported for another engine; and
    what a worker raises, as `train` does.
    """
    chosen = [strategy_of(strategy) for strategy in strategies]
    own = task_from(task, task_fields)
    check_differentiable(own, "calibrate")
    local = engines.engine_of(engine)
    if not isinstance(local, Local):
        raise Unsupported(
            f"calibrate measures this machine by workers that it starts here, and engine {local.name} cannot do that: "
            "use engine local, outside of manyhands run and torchrun"
        )
    _check(own, chosen, local, workers, steps, timeout_s)
    check_resources(device, threads_per_worker, local)
    setup = RunSetup(engine=local, workers=workers, threads=threads_per_worker, device=device, timeout_s=timeout_s)
    with local if isinstance(engine, str) else nullcontext():  # a given engine may be warm, and stays so
        return _Calibrator(own, setup, chosen, steps_for(steps), quick, say).run()


def _check(task: Task, strategies: list[Strategy], engine: Local, workers: int, steps: int, timeout_s: float) -> None:
    if not is_whole(workers, 2):
        raise BadInput(
            f"calibrate needs at least 2 workers, not {workers!r}: one worker exchanges nothing that could be measured"
        )
    if not is_whole(steps, _LEAST_STEPS):
        raise BadInput(f"steps must be a whole number of at least {_LEAST_STEPS}, not {steps!r}")
    for strategy in [Ensemble(), *strategies]:
        config = TrainConfig(task=task, strategy=strategy, engine=engine, workers=workers, directory=None)
        config.check(servers=1, nonfinite="raise", max_seconds=None, timeout_s=timeout_s, resume=False)


@dataclass
class _Calibrator:
    """One calibration. Real runs of all kinds alternate, so that each kind has a run while the machine is idle."""

    task: Task
    setup: RunSetup
    strategies: list[Strategy]
    steps: int
    quick: bool
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.repeats = QUICK_REPEATS if self.quick else REPEATS
        self.ticks: list[dict[int, list[float]]] = []  # of each run without exchange: {rows: seconds}
        self.alone: list[TickTime] = []  # of runs without exchange with the task's own batch
        self.serving: list[TickTime] = []  # of runs of SERVED
        self.real: dict[str, list[float]] = {spec_of(one): [] for one in self.strategies}  # seconds a step, by run
        self.every: dict[str, int] = {}  # steps a block

    def run(self) -> Calibration:
        start = time.monotonic()
        self.say("measuring exchanges in shared memory and over sockets")
        memory, sockets = measure.time_groups(self.setup, self.task)
        self.say("measuring the parameter server")
        server = measure.time_server(self.setup, self.task)
        self.say("measuring the codecs")
        codecs = time_codecs(self.setup, self.task, _QUICK_CODEC_TICKS if self.quick else _CODEC_TICKS)
        own_batch = sum(event.values["rows"] for event in observe(self.setup, self.task, Ensemble(), 1))
        others = [size for size in (own_batch // 2, own_batch + own_batch // 2) if size >= self.setup.workers]
        sizes = [own_batch, *(size for size in others if size != own_batch)]  # global batches to measure
        for repeat in range(self.repeats):
            self.say(
                f"real steps, {repeat + 1} of {self.repeats}: without exchange, then {', '.join(self.real) or 'no more'}"
            )
            self._repeat(sizes)
        workers = self.setup.workers
        compute = fit_compute(merged(self.ticks), sizes[0] // workers)
        own, _ = measure.vector_of(self.task)
        fits = (
            measure.fit_group(memory, workers, own, one_host=True),
            measure.fit_group(sockets, workers, own, one_host=False),
        )
        profile = self._with_requests(self._profile(compute, *fits, server, codecs))
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

    def _repeat(self, sizes: list[int]) -> None:
        for size in sizes:
            task = self.task.with_fields(batch_size=size) if size != sizes[0] else self.task
            steps = _COMPUTE_STEPS * (2 if size == sizes[0] else 1)
            events = observe(self.setup, task, Ensemble(), steps_for(steps))
            self.ticks.append(tick_seconds(events))
            if size == sizes[0]:
                self.alone.append(tick_time(events))
        for strategy in self.strategies if SERVED in self.strategies else [SERVED, *self.strategies]:
            events = observe(self.setup, self.task, strategy, self.steps)
            if strategy == SERVED:
                self.serving.append(tick_time(events))
            if strategy not in self.strategies:
                continue
            every = self.every[spec_of(strategy)] = block_of(events, strategy)
            self.real[spec_of(strategy)].append(statistics.median(blocks(events, self.setup.workers, every)))

    # -- the model ---------------------------------------------------------------------------------------------------

    def _profile(
        self,
        compute: ComputeFit,
        memory: Terms,
        sockets: Terms,
        server: measure.ServerTimes,
        codecs: tuple[CodecTimes, ...],
    ) -> Profile:
        network_s = 2 * memory.first + 8 * server.bytes * memory.second  # of a pull, or of a push
        network = SimNetworkSpec(
            workers_per_host=self.setup.workers,
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
                merge=max(0.0, (server.pull + server.push) / 2 - network_s) / server.bytes,
                codecs=codings(codecs),
            ),
            task=self.task.name,
            workers=self.setup.workers,
            batch_sizes=tuple(sorted(merged(self.ticks))),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=_machine(self.setup),
        )

    def _with_requests(self, profile: Profile) -> Profile:
        """Add the time of leases and requests while workers compute: driver and shards then share the workers' cores."""
        served, alone = (min(turns, key=lambda turn: turn.seconds) for turns in (self.serving, self.alone))
        free = replace(profile, compute=replace(profile.compute, lease=0.0))
        simulated = tick_time(observe(self._simulated(free), self.task, SERVED, self.steps))
        lease, request = lease_and_request(served, alone, simulated.seconds)
        lease = max(lease, profile.compute.lease)  # at least what it takes while workers are idle
        return replace(profile, compute=replace(profile.compute, lease=lease, request=request))

    def _simulated(self, profile: Profile) -> RunSetup:
        engine = Sim(network=profile.network, compute=profile.compute)
        return replace(self.setup, engine=engine, threads=1, device="cpu")

    def _predict(self, profile: Profile, strategy: Strategy) -> Prediction:
        name = spec_of(strategy)
        self.say(f"simulated steps: {name}")
        events = observe(self._simulated(profile), self.task, strategy, self.steps)
        return Prediction(
            strategy=name,
            real_s=min(self.real[name]),
            slowest_s=max(self.real[name]),
            simulated_s=statistics.fmean(blocks(events, self.setup.workers, self.every[name])),
        )


def lease_and_request(served: TickTime, alone: TickTime, simulated_s: float) -> tuple[float, float]:
    """Seconds of a lease, and of a request besides messages and merging.

    served: a real tick of SERVED. alone: a tick without exchange. simulated_s: a tick of SERVED with free leases and
    requests. The lease is the additional time to get rows compared with `alone`; the rest is the requests'.
    """
    more = max(0.0, served.seconds - simulated_s)
    lease = min(more, max(0.0, served.input_s - alone.input_s)) if served.leased else 0.0
    return lease, (more - lease) / REQUESTS


def _machine(setup: RunSetup) -> dict[str, str]:
    known = environment()
    return {
        "host": known["host"],
        "processor": platform.processor() or platform.machine(),
        "cores": str(known["cores"]),
        "threads_per_worker": str(setup.threads or max(1, usable_cores() // setup.workers)),
        "device": setup.device if torch.cuda.is_available() else "cpu",
        **{name: str(version) for name, version in known["versions"].items()},
    }
