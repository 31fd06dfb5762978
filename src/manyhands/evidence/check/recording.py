"""Allreduce as it is, with what goes through it written down; and what a trial takes away is taken away around it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import rows_of
from manyhands.data.rng_scope import mixed
from manyhands.evidence.check.interventions import RANDOMNESS
from manyhands.evidence.check.trial_config import BUFFERS, FOREIGN, WORKERS, TrialConfig, in_double, seen_through
from manyhands.replica.replica import Replica
from manyhands.strategies.allreduce import AllReduce, AllReduceState
from manyhands.worker import Worker

Rates = tuple[dict[str, Any], ...]  # of each group of the optimizer: its numbers by name


@dataclass(kw_only=True)
class Trace:
    """What one worker computed, by step; vectors are [D']."""

    names: list[str] = field(default_factory=list)
    """Of the trainable parameters."""
    bounds: list[tuple[int, int]] = field(default_factory=list)
    """Where each lies in a vector."""
    dtype: str = ""
    built: dict[str, str] = field(default_factory=dict)
    """{parameter or buffer: digest}, as this worker built them."""
    handed_out: list[Any] | None = None
    """The row numbers that it takes in the first epoch, where the setting asks for them and rows have numbers."""
    rows: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Behind the losses; 0: an empty tick."""
    gradients: list[Tensor] = field(default_factory=list)
    """The mean, before clipping; on the first worker alone: the others have the same bits."""
    parameters: list[Tensor] = field(default_factory=list)
    """After the step."""
    rates: list[Rates] = field(default_factory=list)
    """With which the step was made."""
    touched: int = 0
    """Bits: the parameters that got a gradient anywhere."""


@dataclass
class StepRecorder:
    """Sits around a replica's `backward` and `apply`."""

    replica: Replica
    worker: Worker
    setting: TrialConfig
    seed: int
    trace: Trace

    def __post_init__(self) -> None:
        replica, layout = self.replica, self.replica.layout
        self._backward, self._apply = replica.backward, replica.apply
        self._buffers: dict[str, Tensor] = {}
        self.trace.names, self.trace.dtype = layout.names, str(layout.dtype).removeprefix("torch.")
        self.trace.bounds = [(start, start + size) for start, size in zip(layout.offsets, layout.sizes, strict=True)]
        self.trace.built = digests_of(replica.model)
        if FOREIGN in self.setting.without:
            _leave_foreign(replica.optimizer, replica.model)
        replica.backward, replica.apply = self.backward, self.apply  # type: ignore[method-assign]

    def begun(self) -> None:
        """All replicas are equal now."""
        self._buffers = {name: buffer.clone() for name, buffer in self.replica.model.named_buffers()}

    def before_backward(self) -> None:
        self._seed("forward")
        if BUFFERS in self.setting.without:
            for name, buffer in self.replica.model.named_buffers():
                buffer.copy_(self._buffers[name])

    def backward(self, batch: Any | None) -> float:
        with seen_through(self.setting, self.replica.model):
            loss = self._backward(in_double(batch) if self.setting.double and batch is not None else batch)
        self.trace.rows.append(0 if batch is None else rows_of(batch))
        self.trace.losses.append(loss)
        self.trace.weights.append(self.replica.weight)
        return loss

    def apply(self) -> bool:
        replica, trace = self.replica, self.trace
        self._seed("step")
        self._nudge()
        if WORKERS in self.setting.without and self.setting.rates:
            for group, said in zip(replica.optimizer.param_groups, self.setting.rates[len(trace.rates)], strict=True):
                group.update(said)
        trace.rates.append(_rates(replica.optimizer))
        trace.touched |= replica.grad_mask
        if self.worker.rank == 0:
            trace.gradients.append(replica.gradients.cpu().clone())
        applied = self._apply()
        trace.parameters.append(replica.parameters.detach().cpu().clone())
        return applied

    def _seed(self, what: str) -> None:
        """All workers draw alike."""
        if RANDOMNESS in self.setting.without:
            rng.seed_all(mixed((self.seed, self.replica.tick, what == "step")))

    def _nudge(self) -> None:
        """As rounding does: off by a share of the largest number; what is zero stays so."""
        if self.setting.nudge:
            gradients = self.replica.gradients
            generator = torch.Generator().manual_seed(self.replica.tick)
            noise = torch.randn(gradients.shape, generator=generator, dtype=gradients.dtype)
            gradients.add_(noise * (gradients != 0), alpha=self.setting.nudge * float(gradients.abs().max()))


@dataclass(frozen=True, kw_only=True)
class Watched(AllReduce):
    """The strategy of a trial."""

    setting: TrialConfig
    seed: int
    trace: Trace
    recorders: list[StepRecorder] = field(default_factory=list)

    @override
    def start(self, replica: Replica, worker: Worker) -> AllReduceState:
        self.recorders.append(StepRecorder(replica, worker, self.setting, self.seed, self.trace))
        state = super().start(replica, worker)
        self.recorders[-1].begun()
        return state

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: AllReduceState) -> None:
        super().before_backward(replica, worker, state)
        self.recorders[-1].before_backward()


def digests_of(model: nn.Module) -> dict[str, str]:
    """{parameter or buffer: digest}"""
    tensors: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: digest(tensor.detach().cpu()) for name, tensor in tensors.items()}


def digest(tensor: Tensor) -> str:
    """Of its bits."""
    return hashlib.blake2b(
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), digest_size=16
    ).hexdigest()


def foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    """What the optimizer moves and the model has not: nobody exchanges it."""
    own = {id(p) for p in model.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]


def _leave_foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in own]


def _rates(optimizer: torch.optim.Optimizer) -> Rates:
    return tuple(
        {name: _plain(value) for name, value in group.items() if isinstance(value, int | float | str | tuple | Tensor)}
        for group in optimizer.param_groups
    )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
