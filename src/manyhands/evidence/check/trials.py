"""The same steps with one worker and with N, recorded, and how far apart they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import rows_of
from manyhands.engines.base import Engine, LaunchSpec
from manyhands.engines.cores import usable_cores
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.engines.torch_settings import WithSettings
from manyhands.evidence.check.copies import (
    BUFFERS,
    SLICES,
    WORKERS,
    Copies,
    TrialConfig,
    batch_in_float64,
    configured,
    identity,
    interventions_of,
)
from manyhands.evidence.check.interventions import RANDOMNESS, eager
from manyhands.evidence.check.report import Step
from manyhands.evidence.check.rows import handed_out
from manyhands.replica.replica import Replica
from manyhands.rng import mixed
from manyhands.strategies.allreduce import AllReduce, AllReduceState
from manyhands.strategies.base import Change, Needs
from manyhands.task import Task
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import work
from manyhands.worker import Worker

SMALL = 1e-4
"""Gradients below this share of the largest are measured relative to that share: they may be rounding alone."""


def run_trial(fresh_task: Callable[[], Task], config: TrialConfig, worker: Worker) -> Trace:
    """What every worker of a trial runs."""
    task, trace = configured(fresh_task(), config), Trace()
    if config.record_rows:
        trace.handed_out = handed_out(task, worker.rank, worker.size)
    strategy = RecordedAllReduce(config=config, seed=task.seed, trace=trace)
    with eager():
        work(WorkerPlan(task=task, strategy=strategy, nonfinite="skip"), worker)
    return trace


@dataclass(frozen=True, kw_only=True)
class TrialRunner:
    """Runs trials: one worker in this process, N simulated workers in turns in this process, or N of the engine."""

    copies: Copies
    sent: Copies  # copies for worker processes: the task as it was given, with its data functions
    workers: int
    engine: Engine
    timeout_s: float
    together: bool = False  # workers compute a batch together, which needs a process for each
    whole: bool = False  # … and see all of it

    def run_solo(self, config: TrialConfig) -> Trace:
        """One worker. Raises what training raises."""
        return self._launch(Local(), 1, config)[0]

    def run_workers(self, config: TrialConfig) -> list[Trace]:
        """N workers of `engine`, by rank."""
        return self._launch(self.engine, self.workers, config)

    def difference(self, config: TrialConfig) -> tuple[Step, ...]:
        """The differences between one worker and N, which are simulated where they can be."""
        solo = self.run_solo(replace(config, slices=self.workers) if SLICES in config.without else config)
        engine = self.engine if self.together else Sim()
        several = self._launch(engine, self.workers, with_solo_rates(config, solo))
        return step_differences(solo, several)

    def _launch(self, engine: Engine, workers: int, config: TrialConfig) -> list[Trace]:
        in_process = engine.capabilities.simulated or workers == 1
        fresh_task = self.copies.fresh if in_process else partial(identity, self.sent.fresh())
        threads = max(1, usable_cores() // 2) if in_process else None  # workers compute in turns
        launch = LaunchSpec(workers=workers, device="cpu", timeout_s=self.timeout_s, threads_per_worker=threads)
        return engine.launch(WithSettings.of_here(partial(run_trial, fresh_task, config)), launch)


def with_solo_rates(config: TrialConfig, solo: Trace) -> TrialConfig:
    """The config for N workers: with the rates of the single worker, if it removes `depends-on-workers`."""
    return replace(config, rates=tuple(solo.rates)) if WORKERS in config.without else config


# -- what is recorded --------------------------------------------------------------------------------------------------

Rates = tuple[dict[str, Any], ...]  # the options of each parameter group


@dataclass(kw_only=True)
class Trace:
    """What one worker computed, by step; vectors are [D']."""

    names: list[str] = field(default_factory=list)  # of the trainable parameters
    bounds: list[tuple[int, int]] = field(default_factory=list)  # (start, stop) of each parameter in a vector
    dtype: str = ""
    built: dict[str, str] = field(default_factory=dict)
    """{parameter or buffer: digest} of the model as this worker built it."""
    handed_out: list[Any] | None = None
    """The row numbers of the first epoch, if the config records them and rows have numbers."""
    rows: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the losses; 0: an empty tick
    gradients: list[Tensor] = field(default_factory=list)
    """The mean gradients before clipping. Only rank 0 records them; the others have the same bits."""
    parameters: list[Tensor] = field(default_factory=list)  # after the step
    rates: list[Rates] = field(default_factory=list)  # the optimizer's options in the step
    grad_mask: int = 0  # bits: the parameters that got a gradient on any worker


@dataclass
class StepRecorder:
    """Wraps `backward` and `apply` of a replica: applies a trial's interventions and fills its trace."""

    replica: Replica
    worker: Worker
    config: TrialConfig
    seed: int
    trace: Trace

    def __post_init__(self) -> None:
        replica, layout = self.replica, self.replica.layout
        self._backward, self._apply = replica.backward, replica.apply
        self._buffers: dict[str, Tensor] = {}
        self.trace.names, self.trace.dtype = layout.names, str(layout.dtype).removeprefix("torch.")
        self.trace.bounds = [(start, start + size) for start, size in zip(layout.offsets, layout.sizes, strict=True)]
        self.trace.built = tensor_digests(replica.model)
        replica.backward, replica.apply = self.backward, self.apply  # type: ignore[method-assign]

    def on_start(self) -> None:
        """Called once all replicas are equal."""
        self._buffers = {name: buffer.clone() for name, buffer in self.replica.model.named_buffers()}

    def before_backward(self) -> None:
        self._seed("forward")
        if BUFFERS in self.config.without:
            for name, buffer in self.replica.model.named_buffers():
                buffer.copy_(self._buffers[name])

    def backward(self, batch: Any | None) -> float:
        with interventions_of(self.config, self.replica.model):
            loss = self._backward(batch_in_float64(batch) if self.config.double and batch is not None else batch)
        self.trace.rows.append(0 if batch is None else rows_of(batch))
        self.trace.losses.append(loss)
        self.trace.weights.append(self.replica.weight)
        return loss

    def apply(self, *, extra: bool = False) -> bool:
        replica, trace = self.replica, self.trace
        self._seed("step")
        self._nudge()
        if WORKERS in self.config.without and self.config.rates:
            for group, rates in zip(replica.optimizer.param_groups, self.config.rates[len(trace.rates)], strict=True):
                group.update(rates)
        trace.rates.append(_rates(replica.optimizer))
        trace.grad_mask |= replica.grad_mask
        if self.worker.rank == 0:
            trace.gradients.append(replica.gradients.joined().cpu().clone())
        applied = self._apply(extra=extra)
        trace.parameters.append(replica.parameters.joined().detach().cpu().clone())
        return applied

    def _seed(self, what: str) -> None:
        """If randomness is removed, all workers draw the same numbers."""
        if RANDOMNESS in self.config.without:
            rng.seed_all(mixed((self.seed, self.replica.tick, what == "step")))

    def _nudge(self) -> None:
        """Add noise of the size of rounding errors to all gradients that are not zero."""
        if self.config.nudge:
            generator = torch.Generator().manual_seed(self.replica.tick)
            for gradients in self.replica.gradients.parts:
                noise = torch.randn(gradients.shape, generator=generator, dtype=gradients.dtype)
                gradients.add_(noise * (gradients != 0), alpha=self.config.nudge * float(gradients.abs().max()))


@dataclass(frozen=True, kw_only=True)
class RecordedAllReduce(AllReduce):
    """The strategy of a trial: allreduce with a StepRecorder."""

    config: TrialConfig
    seed: int
    trace: Trace
    recorders: list[StepRecorder] = field(default_factory=list)
    needs: ClassVar[Needs] = replace(AllReduce.needs, before_gradient=True)

    @override
    def start(self, replica: Replica, worker: Worker) -> AllReduceState:
        self.recorders.append(StepRecorder(replica, worker, self.config, self.seed, self.trace))
        return super().start(replica, worker)

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: AllReduceState, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        self.recorders[-1].on_start()

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: AllReduceState) -> None:
        super().before_backward(replica, worker, state)
        self.recorders[-1].before_backward()


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """{parameter or buffer: digest}"""
    tensors: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = {name: tensor.detach().cpu().contiguous().flatten() for name, tensor in tensors.items()}
    return {
        name: hashlib.blake2b(tensor.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        for name, tensor in flat.items()
    }


def _rates(optimizer: torch.optim.Optimizer) -> Rates:
    def plain(value: Any) -> Any:
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    return tuple(
        {name: plain(value) for name, value in group.items() if isinstance(value, int | float | str | tuple | Tensor)}
        for group in optimizer.param_groups
    )


# -- differences -------------------------------------------------------------------------------------------------------


def step_differences(solo: Trace, ranks: Sequence[Trace]) -> tuple[Step, ...]:
    """The differences of each step that all workers made."""
    made = min(len(solo.parameters), *(len(rank.parameters) for rank in ranks))
    return tuple(_step(solo, ranks, t) for t in range(made))


def _step(solo: Trace, ranks: Sequence[Trace], t: int) -> Step:
    loss = _mean([(rank.losses[t], rank.weights[t]) for rank in ranks])
    gradient, worst = largest_difference(solo.gradients[t], ranks[0].gradients[t], solo.bounds, SMALL)
    of_ranks = [largest_difference(solo.parameters[t], rank.parameters[t], solo.bounds, 1.0) for rank in ranks]
    parameters, farthest = max(of_ranks, key=lambda one: one[0])
    whose = worst if gradient >= parameters else farthest
    return Step(
        step=t + 1,
        rows=sum(rank.rows[t] for rank in ranks),
        loss=_loss_difference(_mean([(solo.losses[t], solo.weights[t])]), loss),
        gradient=gradient,
        parameters=parameters,
        worst="" if whose is None else solo.names[whose],
    )


def largest_difference(
    a: Tensor, b: Tensor, bounds: Sequence[tuple[int, int]], floor: float
) -> tuple[float, int | None]:
    """(the largest relative difference of any parameter in two vectors [D'], the parameter's index or None).

    A parameter's difference is relative to its largest number in `a`, and at least to the share `floor` of the largest
    number of all parameters. Where a number is not finite, the difference is infinite unless both are the same.
    """
    least = floor * float(a.abs().nan_to_num(posinf=0.0).max())
    worst, whose = 0.0, None
    for i, (start, stop) in enumerate(bounds):
        difference = _relative_difference(a[start:stop], b[start:stop], least)
        if difference > worst:
            worst, whose = difference, i
    return worst, whose


def _relative_difference(a: Tensor, b: Tensor, least: float) -> float:
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
    scale = max(float(a.abs().max()), least)
    largest = float((a - b).abs().max())
    return largest / scale if scale else float("inf")


def _loss_difference(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale < float("inf") else float("inf")


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in parts)
    return sum(loss * weight for loss, weight in parts if weight) / total if total else 0.0
