"""`estimate`: predict what each strategy takes on more workers than there are, by the calibrated simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhands import spec, units
from manyhands.data.open_source import open_source
from manyhands.engines.base import check_count
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.evidence.calibrate.observe import LEAST_BLOCK
from manyhands.evidence.estimate.bars import Bars, bars_of
from manyhands.evidence.estimate.message_lengths import Lengths
from manyhands.evidence.estimate.model_sizes import ReadingPlan, reading_plan, shape_of
from manyhands.evidence.estimate.scaled_task import NEVER, PATIENCE_S, simulate, stand_in, steady_state
from manyhands.evidence.estimate.steady_state import ENOUGH, SteadyObserver, SteadyStep
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task, check_differentiable
from manyhands.training.config import TrainConfig, task_from
from manyhands.training.plan import WorkerPlan

FORMAT = 1
WORKERS = (8, 64, 512)
DEFAULT = ("allreduce", "local-sgd:period=8", "diloco", "downpour", "easgd", "gossip")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Seconds, and the bounds of the error bars; None without error bars."""

    seconds: float
    low: float | None
    high: float | None

    def times(self, factor: float) -> Span:
        """The span of `factor` such times."""
        return Span(
            seconds=self.seconds * factor,
            low=None if self.low is None else self.low * factor,
            high=None if self.high is None else self.high * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One strategy on a number of workers. If it is impossible, `refused` says why, and nothing is predicted."""

    strategy: str
    """Its spec."""
    workers: int
    refused: str = ""
    batch_size: int | None = None
    """Global rows a step; the last of an epoch may have fewer."""
    step: Span | None = None
    """The mean time of the simulated global batches."""
    rows_per_s: float | None = None
    """Of all workers together. Rows that are dropped (quorum) do not count."""
    steps: int | None = None
    """Of the whole training: its epochs, or max_steps; None: a stream without max_steps."""
    training: Span | None = None
    """The time of `steps`, without start, reading rows, validation and checkpoints."""
    speed_up: float | None = None
    """rows_per_s over those of one worker of the same profile."""
    efficiency: float | None = None
    """speed_up over workers."""
    bytes_per_step: float | None = None
    """Sent by a worker, the mean over workers; control words do not count."""
    bytes_in_training: float | None = None
    compute: float | None = None
    """Share of a worker's time, as `exchange` and `wait`."""
    exchange: float | None = None
    wait: float | None = None
    """For other workers, or for rows."""
    staleness: float | None = None
    """Median over pushes: versions that others made since the pull. None without a server."""
    bars: Bars | None = None
    """How step.low and step.high were derived."""
    simulated_steps: int | None = None
    """The steps in the mean."""
    spread: float | None = None
    """The relative standard error of the mean: from jitter, not from the model."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The estimates, ordered by workers, then by strategies."""

    task: str
    parameters: int
    """Trainable numbers of the model."""
    rows: int | None
    """Of an epoch; None: a stream."""
    profile: Profile
    network: SimNetworkSpec
    compute: Compute
    servers: int
    solo_rows_per_s: float
    """Of one worker of the profile, which computes while the others of the calibration do, without exchange."""
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON object; unknown numbers are null."""
        known = ("task", "workers", "measured", "machine", "errors")
        values = {"format": FORMAT, **asdict(self)} | {
            "profile": {name: getattr(self.profile, name) for name in known},
            "network": str(self.network),
            "compute": str(self.compute),
        }
        return json.dumps(values, indent=2, allow_nan=False)


def estimate(
    task: Task | str | None = None,
    *,
    profile: Profile | Path | str,
    workers: Iterable[int] = WORKERS,
    strategies: Iterable[Strategy | str] = DEFAULT,
    steps: int | None = None,
    network: SimNetworkSpec | str | None = None,
    compute: Compute | str | None = None,
    servers: int = 1,
    say: Callable[[str], None] = lambda line: None,
    **task_fields: Any,
) -> Estimates:
    """Predict time, efficiency and bytes of each strategy on each number of workers.

    Each is simulated as engine `sim` would with this profile, until the mean time of a step is steady. A stand-in of
    few numbers replaces the model, and costs what the model would (see docs/estimate.md). Nothing is trained.

    task, task_fields: as in `train`. profile: of `calibrate`, or the path of one. workers: numbers of workers. steps:
    to simulate of each, instead of until it is steady. network, compute: override the profile's, as in `Sim`. servers:
    shards of the parameter server, if there is one. say: called with a line about each stage.

    Raises BadInput for arguments that no strategy accepts, among them more workers than rows in a batch, before
    anything is simulated. If one strategy is impossible on a number of workers, its row says why.
    """
    own = task_from(task, task_fields)
    check_differentiable(own, "estimate")
    counts = list(dict.fromkeys(workers))
    for count in counts:
        check_count("workers", count)
    check_count("servers", servers)
    if steps is not None and not is_whole(steps, LEAST_BLOCK):
        raise BadInput(f"steps must be a whole number of at least {LEAST_BLOCK}, not {steps!r}")
    measured = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    strategies = spec.split_list(strategies) if isinstance(strategies, str) else strategies
    chosen = {spec_of(strategy): strategy for strategy in map(strategy_of, strategies)}
    say("the model's shape")
    if not isinstance(network, SimNetworkSpec):
        network = measured.network.with_text(network or "")
    if not isinstance(compute, Compute):
        compute = measured.compute.with_text(compute or "")
    estimator = _Estimator(own, measured, network, compute, steps, servers, say)
    estimator.check_sizes(counts)
    return estimator.run(list(chosen.values()), counts)


@dataclass
class _Estimator:
    """Estimates one task on one described cluster."""

    task: Task
    profile: Profile
    network: SimNetworkSpec
    compute: Compute
    steps: int | None
    servers: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        task = self.task
        self.shape = shape_of(task)
        self.source = open_source(task.train_data, collate=task.collate, loader_processes=task.loader_processes)
        reading, compute = reading_plan(task, self.source, 1), self.compute
        sizes = [reading.rows_of(tick) for tick in (range(reading.ticks) if reading.ticks else range(1))]
        self.rows = reading.rows
        self.solo_rows_per_s = sum(sizes) / sum(compute.step + compute.row * rows for rows in sizes)

    def check_sizes(self, counts: list[int]) -> None:
        """Raise BadInput where a batch has not a row for each worker."""
        task = self.task
        own = task.batch_size or (None if task.batch_size_per_worker else self.source.batch_size or 64)
        impossible = [count for count in counts if own is not None and own < count]
        if impossible:
            possible = ",".join(str(count) for count in counts if count not in impossible)
            raise BadInput(
                f"batch_size={own} has no row for each of {' or '.join(map(str, impossible))} workers: give the rows of each worker with "
                f"--batch-size-per-worker, or --batch-size {max(impossible)} or more, or "
                f"{f'--workers {possible}' if possible else 'fewer workers'}"
            )

    def run(self, strategies: list[Strategy], counts: list[int]) -> Estimates:
        pairs = [(strategy, workers) for workers in counts for strategy in strategies]
        found = []
        for number, (strategy, workers) in enumerate(pairs, 1):
            self.say(f"{number} of {len(pairs)}: {spec_of(strategy)} on {units.count(workers, 'worker')}")
            found.append(self._estimate(strategy, workers))
        return Estimates(
            task=self.task.name,
            parameters=self.shape.numbers,
            rows=self.rows,
            profile=self.profile,
            network=self.network,
            compute=self.compute,
            servers=self.servers,
            solo_rows_per_s=self.solo_rows_per_s,
            estimates=tuple(found),
            notes=tuple(self._notes(max(counts, default=1))),
        )

    def _estimate(self, strategy: Strategy, workers: int) -> Estimate:
        try:
            reading = reading_plan(self.task, self.source, workers)
            measured = self._simulate(strategy, workers, reading)
        except (BadInput, Unsupported) as refusal:
            return Estimate(strategy=spec_of(strategy), workers=workers, refused=str(refusal))
        return self._row(strategy, workers, reading, measured)

    def _simulate(self, strategy: Strategy, workers: int, reading: ReadingPlan) -> SteadyStep:
        rows = reading.rows_of(0) / workers
        lengths = Lengths(self.shape, strategy, workers=workers, servers=self.servers, rows=rows)
        task, usual = stand_in(self.task, self.shape, reading, lengths.stand_in_length), steady_state(strategy)
        engine = Sim(network=self.network, compute=self.compute)
        config = TrainConfig(task=task, strategy=usual, engine=engine, workers=workers, directory=None)
        config.check(servers=self.servers, nonfinite="raise", max_seconds=None, timeout_s=PATIENCE_S, resume=False)
        observer = SteadyObserver(workers, reading.ticks, self.steps)
        plan = WorkerPlan(task=task, strategy=usual, validate_every=NEVER, checkpoint_every=NEVER)
        simulate(plan, workers, self.servers, self.network, self.compute, lengths, observer)
        measured = observer.measured()
        if measured is None:
            raise BadInput(
                f"too few exchanges to measure a step (steps: {observer.steps}, exchanges: fewer than two): give more "
                "--steps, at least two periods of the strategy, which takes longer"
            )
        return measured

    def _row(self, strategy: Strategy, workers: int, reading: ReadingPlan, measured: SteadyStep) -> Estimate:
        spec, steps = spec_of(strategy), reading.steps(self.task)
        bars = bars_of(self.profile, spec, workers, reading.rows_of(0) / workers, 1 - measured.compute)
        step = Span(
            seconds=measured.step_s,
            low=None if bars is None else measured.step_s / bars.factor,
            high=None if bars is None else measured.step_s * bars.factor,
        )
        rate = measured.rows / measured.step_s
        return Estimate(
            strategy=spec,
            workers=workers,
            batch_size=reading.batch_size,
            step=step,
            rows_per_s=rate,
            steps=steps,
            training=None if steps is None else step.times(steps),
            speed_up=rate / self.solo_rows_per_s,
            efficiency=rate / self.solo_rows_per_s / workers,
            bytes_per_step=measured.bytes,
            bytes_in_training=None if steps is None else measured.bytes * steps,
            compute=measured.compute,
            exchange=measured.exchange,
            wait=measured.wait,
            staleness=measured.staleness,
            bars=bars,
            simulated_steps=measured.steps,
            spread=measured.spread,
            notes=tuple(_notes(strategy, workers, reading, measured)),
        )

    def _notes(self, most: int) -> list[str]:
        """Notes on all rows."""
        notes, profile = [], self.profile
        if profile.task != self.task.name:
            notes.append(f"The profile is of task {profile.task}, not of {self.task.name}: calibrate with this one.")
        described = ("latency", "bandwidth")
        if most > self.network.workers_per_host and all(
            getattr(self.network, name) == getattr(profile.network, name) for name in described
        ):
            notes.append(
                f"Between its hosts of {units.count(self.network.workers_per_host, 'worker')} the network has the "
                "latency and bandwidth of sockets on the one machine that was measured, which no network beats: "
                "describe yours with --network latency=…,bandwidth=…"
            )
        if not profile.errors:
            notes.append(
                "No error bars: calibrate with strategies (manyhands calibrate TASK --strategies allreduce,…)."
            )
        return notes


def _notes(strategy: Strategy, workers: int, reading: ReadingPlan, measured: SteadyStep) -> list[str]:
    """Notes on one row."""
    notes = []
    if reading.rows is not None and reading.rows < reading.batch_size:
        notes.append(
            f"an epoch is one step: it has {units.count(reading.rows, 'row')}, and a batch {reading.batch_size:,}"
        )
    if getattr(strategy, "warmup", 0):
        notes.append("its warmup is left out")
    if measured.spread > ENOUGH:
        notes.append(
            f"after {units.count(measured.steps, 'step')} the mean of a step is known to {measured.spread:.0%} only: "
            "give --steps"
        )
    if workers > 1 and not measured.rounds and strategy.needs.one_model:
        notes.append(f"no exchange was due in {units.count(measured.simulated, 'step')}, so none is in the prediction")
    return notes
