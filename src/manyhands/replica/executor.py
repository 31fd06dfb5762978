"""How a replica makes a step: the contract, and the executor of models that autograd differentiates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import units
from manyhands.comm.group import Group, Ledger
from manyhands.comm.solo import SoloGroup
from manyhands.data.batch import rows_of, slice_rows
from manyhands.errors import BadInput, Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.layout import Layout, layouts_of
from manyhands.replica.shard import ParameterShard
from manyhands.replica.sharded_update import ShardedUpdate
from manyhands.replica.sync_batch_norm import Rows, synchronize
from manyhands.task import Evaluate, Loss, Metrics, is_one_number, named
from manyhands.worker import Worker

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]  # zeros [n], in memory that a group works on
BUCKET_BYTES = 4 << 20  # of one slice given to `on_ready`: large enough to amortise a message, small enough to overlap


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What a backward found."""

    loss: float = 0.0  # the mean over this replica's rows
    weight: float = 0.0  # what that mean is a mean of
    grad_mask: int = 0  # bits: the parameters that got a gradient
    stop: bool = False  # one of the workers that hold this replica wants all to stop
    regroup: bool = False  # … to form the next generation


class StepExecutor(ABC):
    """What a replica does in a step, and what it is made of. A replica calls `build` once, then per tick `begin_tick`,
    `backward`, `clip` and `apply`.

    Where several workers hold one replica, `members` is their group: all of them make the same calls, and what
    `backward` and `evaluate` return is the same on all of them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    """Its `param_groups` hold the rate, which a schedule moves."""
    shards: tuple[ParameterShard, ...]
    members: Group = SoloGroup()
    has_loss: bool = True
    """Whether `backward` computes here; False in the user's own loop, which calls autograd's itself."""
    has_gradients: bool = False
    """Whether gradients are there to be exchanged; a kernel moves parameters without any."""
    stop: bool = False
    """Whether this worker wants all to stop: `backward` tells the others that hold its replica."""
    computes_together: bool = False
    """Whether all workers compute each batch together: then they evaluate together, too, those without rows as well."""
    times_passes: bool = False
    """Whether it reports each pass to the driver itself, see `DriverClient.begin_passes`."""
    regroup: bool = False
    """Whether it wants all to form the next generation, where members may change."""
    sharded: ShardedUpdate | None = None
    """Where each worker steps its part of the parameters: see `shard_update`."""

    @abstractmethod
    def build(self, allocate: Allocate) -> None:
        """Make `model`, `shards` and `optimizer`; memory comes from `allocate`. Same order on all ranks."""

    @abstractmethod
    def begin_tick(self) -> None:
        """Forget the gradients of the tick before."""

    @abstractmethod
    def backward(self, batch: Any | None) -> StepLoss:
        """What the step needs to know of this replica's rows, for example gradients into the shards.

        None is an empty tick: zero gradients of weight 0.
        """

    def limit_rows(self, rows: int) -> None:  # noqa: B027
        """Compute no more than so many rows at once from now on, where that is possible; the step stays the same."""

    @abstractmethod
    def clip(self, norm: float) -> None:
        """Scale the gradients so that their norm over the whole replica is at most `norm`."""

    @abstractmethod
    def apply(self) -> float | None:
        """Move the parameters: the optimizer's step. The mean loss, where it is found here and not by `backward`."""

    @abstractmethod
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        """What `function(model, batch)` measures, without gradients; the same on all members where they read the same rows."""

    def join(self, worker: Worker) -> None:  # noqa: B027
        """Where members may change: the worker is in the next generation, and `worker.mesh` is made. A collective of the
        workers that hold this replica."""

    def leave(self) -> None:  # noqa: B027
        """It has left the generation: what it was connected to is closed. Idempotent."""

    def facts(self) -> dict[str, Any]:
        """JSON: what a run's summary says of how this replica is held. A collective of the workers that hold it."""
        return {}

    def waited_s(self) -> float:
        """Seconds that this worker waited otherwise than in the groups of `Mesh`, so far."""
        return 0.0

    def communicated_s(self) -> float:
        """Seconds so far that went by in exchanges with the workers that hold this replica, waiting for them included."""
        return 0.0

    def ledgers(self) -> list[Ledger]:
        """Of what is sent otherwise than by the groups of `Mesh`."""
        return []

    def counts(self, name: str) -> bool:
        """Whether a parameter or buffer of the model is this worker's to give, of the workers that hold this replica."""
        return True

    def own_parameters(self) -> int:
        """How many trained numbers this worker holds, without copies that do not count."""
        return sum(
            size
            for shard in self.shards
            for name, size in zip(shard.layout.names, shard.layout.sizes, strict=True)
            if shard.slices[name].counted
        )

    def saved(self) -> list[str]:
        """The names in the state_dict of the model that holds the answer."""
        return [name for name, value in self.model.state_dict().items() if isinstance(value, Tensor)]

    def whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What all workers of this replica hold, by name, as the model that holds the answer has it."""
        return dict(parameters)

    def close(self) -> None:  # noqa: B027
        """The run is over: end what it started. Idempotent."""

    def copied(self) -> list[str]:
        """The parameters of which several of the workers that hold this replica have a copy; these step alike."""
        return []

    def reduce(self, sums: Tensor) -> Tensor:
        """Float64 [k]: the sums over the workers that hold this replica."""
        if self.members.size > 1:
            self.members.all_reduce_(sums)
        return sums

    def share(self, named: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Of values by parameter: workers of this replica that hold the same parameter take those of the first of them. A
        collective of these workers."""

    def dot(self, one: FlatVector, other: FlatVector) -> float:
        """The dot product over all shards and over `members`, summed in float64; copies of a parameter count once."""
        own = sum(shard.dot(a, b) for shard, a, b in zip(self.shards, one.parts, other.parts, strict=True))
        return float(self.reduce(torch.tensor([own], dtype=torch.float64)))

    def shard_update(self, group: Group) -> None:
        """From now on `apply` steps this worker's part of the parameters, and `sharded` is there."""
        raise self.without_gradients()

    # -- what gradients are to autograd; a kernel has none -----------------------------------------------------------

    def collect(self, scale: float | None = None) -> int:
        """Gather what lies at `.grad` into the shards, times `scale`; the mask of the parameters that have any."""
        raise self.without_gradients()

    def show_gradients(self, grad_mask: int) -> None:  # noqa: B027
        """Make `.grad` a view of the shards for the parameters of the mask, None for all others."""

    def on_ready(self, callback: Callable[[Tensor, float, int], None]) -> None:
        """See `Replica.on_ready`; called back with a slice, the weight, and the mask of the slices so far."""
        raise self.without_gradients()

    @property
    def hands_out_slices(self) -> bool:
        """Whether `on_ready` was called."""
        return False

    def without_gradients(self) -> Unsupported:
        """The error of whoever asks for gradients where there are none."""
        return Unsupported(
            f"{type(self).__name__} has no gradients to exchange: use a strategy that exchanges parameters or updates, "
            "such as local-sgd or diloco"
        )


def shards_of(model: nn.Module, allocate: Allocate, *, gradients: bool = True) -> tuple[ParameterShard, ...]:
    """The model's trainable parameters, which become views of one flat vector for each dtype.

    gradients: else there is no memory for any.
    """
    shards = []
    for layout in layouts_of(model):
        parameters = allocate(layout.padded, layout.dtype, layout.device)
        none = torch.empty(0, dtype=layout.dtype)
        own = allocate(layout.padded, layout.dtype, layout.device) if gradients else none
        layout.attach(parameters)
        shards.append(ParameterShard(layout=layout, parameters=parameters, gradients=own))
    return tuple(shards)


class AutogradExecutor(StepExecutor):
    """A model in one worker, its loss, and a torch optimizer: backward fills gradients, the optimizer moves along them.

    Autograd allocates gradients as it likes; `collect` gathers them. A parameter's `.grad` is then a view of its
    shard's gradients where any worker produced a gradient, and None elsewhere, as in a plain loop.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
        *,
        loss: Loss | None = None,
        precision: str = "float32",
        micro_batch_size: int | None = None,
        take_step: Callable[[], Any] | None = None,
        weigh: Callable[[], float | None] | None = None,
        members: Group | None = None,
        statistics: Group | None = None,
    ) -> None:
        """loss: None in the user's own loop, which calls backward itself.
        statistics: the workers over whose rows batch normalization takes its statistics; None: over this one's.
        weigh: in the user's own loop, the weight of the backward that begins; None: no slices of it are handed out.
        take_step: what steps the optimizer, where the optimizer's own `step` was rebound; without it, `optimizer.step`.
        """
        self._make_model, self._make_optimizer = model, optimizer
        self._loss, self.has_loss = loss, loss is not None
        self._bf16, self._micro = precision == "bf16-mixed", micro_batch_size
        self._take_step, self.weigh, self.has_gradients = take_step, weigh, True
        self.members = SoloGroup() if members is None else members
        self._statistics, self._weight = statistics, 1.0  # of the loss under way
        self._grad_mask = 0  # bits: the parameters with a gradient
        self._filled = 0  # bits: the slices of the gradients that are not zero
        self._buckets: _Buckets | None = None

    @override
    def build(self, allocate: Allocate) -> None:
        make = self._make_model
        self.model = make if isinstance(make, nn.Module) else make()
        if self._statistics is not None:
            synchronize(self.model, Rows(self._statistics, lambda: self._weight))
        self.shards = shards_of(self.model, allocate)
        count = sum(len(shard.layout.names) for shard in self.shards)
        self.names, self._parameters, self._grads = [""] * count, [torch.empty(0)] * count, [torch.empty(0)] * count
        for shard in self.shards:
            layout = shard.layout
            for i, number in enumerate(layout.numbers):
                self.names[number], self._parameters[number] = layout.names[i], layout.parameters[i]
            for number, view in zip(layout.numbers, layout.views(shard.gradients), strict=True):
                self._grads[number] = view  # what `.grad` is after a gather
        given = self._make_optimizer
        self.optimizer = given if isinstance(given, torch.optim.Optimizer) else _optimizer(given, self.model)
        self.optimizer.manyhands_trains = True  # type: ignore[attr-defined]  # prepared, or a task's

    @override
    def limit_rows(self, rows: int) -> None:
        self._micro = rows if self._micro is None else min(rows, self._micro)

    @override
    def begin_tick(self) -> None:
        for p in self._parameters:
            p.grad = None
        if self._buckets is not None:
            self._buckets.reset()

    # -- gradient ----------------------------------------------------------------------------------------------------

    @override
    def backward(self, batch: Any | None) -> StepLoss:
        """Gradient of the mean loss over the batch's rows into the shards.

        With micro-batches the gradient is that of the whole batch. A batch on which the loss counts nothing has weight
        0. Raises BadInput for a loss that is no number, or depends on no trainable parameter.
        """
        if batch is None:
            if self._statistics is not None:
                raise Unsupported(
                    'a batch has fewer rows than there are workers, and sync_batch_norm needs some of each: use fewer workers, or the task\'s batches="whole"'
                )
            return StepLoss(grad_mask=self._end_backward(None, None, 0.0))
        found = self._backward_rows(batch, rows_of(batch))
        if not found.grad_mask and found.weight:
            raise BadInput(
                "the loss depends on no parameter of the model that it is given: compute it from loss(model, batch)'s own argument `model`, not from "
                "another model that the program holds"
            )
        return found

    def _backward_rows(self, batch: Any, rows: int) -> StepLoss:
        if self._micro is None or rows <= self._micro:
            self._weight = 1.0
            mean, weight = self._forward(batch, rows)
            self._weight = weight
            return StepLoss(grad_mask=self._end_backward(mean, None, weight), loss=float(mean.detach()), weight=weight)
        return self._backward_pieces(batch, rows, self._micro)

    def _backward_pieces(self, batch: Any, rows: int, size: int) -> StepLoss:
        total, summed, grad_mask = 0.0, 0.0, 0
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            mean, weight = self._forward(slice_rows(batch, start, stop), stop - start)
            total += weight
            if weight:
                summed += float(mean.detach()) * weight
            if stop == rows:
                grad_mask = self._end_backward(mean * weight if weight else None, 1 / total if total else None, total)
            elif weight:
                (mean * weight).backward()
        return StepLoss(loss=summed / total if total else 0.0, weight=total, grad_mask=grad_mask)

    def _forward(self, batch: Any, rows: int) -> tuple[Tensor, float]:
        assert self._loss is not None
        with torch.autocast(self.shards[0].layout.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            measure = self._loss(self.model, batch)
        return self._measured(measure, rows)

    def _measured(self, measure: Any, rows: int) -> tuple[Tensor, float]:
        """(the mean, its weight) of what the loss gave; BadInput for anything else."""
        mean, weight = measure if isinstance(measure, tuple) else (measure, rows)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            if is_one_number(mean):
                todo = "return the tensor itself, without .item() or float(), so that it has a gradient"
            else:
                todo = "return what was computed" if mean is None else "average it over rows"
            raise BadInput(
                f"loss(model, batch) must return a tensor of one number, the mean over the batch, or (mean, weight), not {named(mean)}: {todo}"
            )
        if not mean.requires_grad:
            raise BadInput(
                "the loss does not depend on any trainable parameter: compute it from model(...) outside torch.no_grad() and without detach()"
            )
        return mean if mean.dim() == 0 else mean.reshape(()), float(weight)

    def _end_backward(self, mean: Tensor | None, scale: float | None, weight: float) -> int:
        """The last backward of a step: gradients are final; the mask of the parameters that have any."""
        if self._buckets is None:
            if mean is not None:
                mean.backward()
            return self.collect(scale)
        self._buckets.begin(scale, weight)
        if mean is not None:
            mean.backward()
        self._buckets.flush()
        return self._grad_mask

    @override
    def collect(self, scale: float | None = None) -> int:
        """Gather every `.grad` into the shards (times `scale`), zero missing slices, make `.grad` views of them. Of a
        backward whose slices are handed out, the rest."""
        if self._buckets is not None and self._buckets.active:
            self._buckets.flush()
            return self._grad_mask
        self._grad_mask = 0
        self.collect_some(range(len(self._grads)), scale)
        return self._grad_mask

    def begin_collecting(self) -> None:
        """Nothing is collected yet."""
        self._grad_mask = 0

    def collect_some(self, which: Iterable[int], scale: float | None) -> int:
        """`collect` for the parameters of these numbers; the mask of all that were collected since it began."""
        targets, sources, stale = [], [], []
        for i in which:
            p, bit = self._parameters[i], 1 << i
            grad, view = p.grad, self._grads[i]
            if grad is None:
                if self._filled & bit:
                    stale.append(view)
                    self._filled &= ~bit
                continue
            self._grad_mask |= bit
            self._filled |= bit
            if grad is not view:
                if grad.is_sparse:
                    raise Unsupported(f"{self.names[i]} has a sparse gradient: build its embedding with sparse=False")
                targets.append(view)
                sources.append(grad)
                p.grad = view
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources)
            if stale:
                torch._foreach_zero_(stale)
            if scale is not None and targets:
                torch._foreach_mul_(targets, scale)
        return self._grad_mask

    @override
    def show_gradients(self, grad_mask: int) -> None:
        self._filled |= grad_mask
        if self.sharded is not None:
            self.sharded.show_gradients(grad_mask)
        for i, p in enumerate(self._parameters):
            if not grad_mask >> i & 1:
                p.grad = None  # an own gradient that is not in this mean
            elif p.grad is None:
                p.grad = self._grads[i]

    @override
    def shard_update(self, group: Group) -> None:
        self.sharded = ShardedUpdate(self.shards, self.optimizer, group)

    @override
    def on_ready(self, callback: Callable[[Tensor, float, int], None]) -> None:
        self._buckets = _Buckets(self, callback)

    @property
    @override
    def hands_out_slices(self) -> bool:
        return self._buckets is not None

    # -- step --------------------------------------------------------------------------------------------------------

    @override
    def clip(self, norm: float) -> None:
        if self.sharded is not None:
            self.sharded.clip(norm)
            return
        if self.members.size == 1:
            nn.utils.clip_grad_norm_(self._parameters, norm)
            return
        gradients = FlatVector([shard.gradients for shard in self.shards])
        whole = math.sqrt(self.dot(gradients, gradients))
        gradients.mul_(min(1.0, norm / (whole + 1e-6)))  # as torch's function

    @override
    def apply(self) -> None:
        (self._take_step or self.optimizer.step)()

    @override
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        with (
            torch.no_grad(),
            torch.autocast(self.shards[0].layout.device.type, dtype=torch.bfloat16, enabled=self._bf16),
        ):
            return function(self.model, batch)


def _optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"optimizer(model) must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            "LBFGS evaluates the model several times a step, and manyhands exchanges once a step: use another optimizer"
        )
    if found := strangers(optimizer, model):
        raise BadInput(
            f"optimizer(model) must be over the parameters of the model that it is given, and it holds {found}: build it from its argument, "
            "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=...); make a loss's own parameters a part of the model"
        )
    return optimizer


def strangers(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    """`2 trainable parameters that are not the model's …`, which its steps would move; "" if there are none."""
    own = {id(p) for p in model.parameters()}
    found = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) not in own]
    if not found:
        return ""
    return (
        f"{units.count(len(found), 'trainable parameter')} not of the model (the first of shape {list(found[0].shape)})"
    )


class _Buckets:
    """Cuts the gradients into slices and hands out each once its parameters have gradients, last layers first."""

    def __init__(self, executor: AutogradExecutor, callback: Callable[[Tensor, float, int], None]) -> None:
        self._executor, self._callback = executor, callback
        cuts = [(shard, which) for shard in executor.shards for which in _cut(shard.layout)]
        self._cuts = sorted(cuts, key=lambda cut: -cut[0].layout.numbers[cut[1].stop - 1])  # as backward completes them
        self._bucket_of = {shard.layout.numbers[i]: k for k, (shard, which) in enumerate(self._cuts) for i in which}
        self.active, self._weight, self._task = False, 0.0, -1
        self.reset()
        own = ref(self)  # whoever keeps the model does not keep this

        def ready(number: int) -> None:
            if (buckets := own()) is not None:
                buckets._ready(number)

        for shard in executor.shards:
            for number, p in zip(shard.layout.numbers, shard.layout.parameters, strict=True):
                p.register_post_accumulate_grad_hook(lambda _, number=number: ready(number))

    def reset(self) -> None:
        """Nothing is handed out: also where a lost peer ended the step before in the middle of its backward."""
        self._flushed(None)

    def begin(self, scale: float | None, weight: float) -> None:
        self._flushed(scale)
        self._executor.begin_collecting()
        self.active, self._weight = True, weight

    def _flushed(self, scale: float | None) -> None:
        self.active, self._next, self._scale = False, 0, scale
        self._missing = [len(which) for _, which in self._cuts]

    def _ready(self, number: int) -> None:
        if self._executor.weigh is not None:
            self._look_for_next_backward(self._executor.weigh)
        if not self.active:
            return
        self._missing[self._bucket_of[number]] -= 1
        while self._next < len(self._cuts) and self._missing[self._next] == 0:
            self._hand_out()

    def _look_for_next_backward(self, weigh: Callable[[], float | None]) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self.active and self._next:
            raise Unsupported(
                "a backward began before all of another one's gradient was exchanged, of which overlap=true had sent a part: leave overlap out where "
                "errors in backward() are caught, and give checkpoint(..., use_reentrant=False)"
            )
        self._task = task
        self.reset()
        if (weight := weigh()) is not None:
            self.begin(None, weight)

    def _hand_out(self) -> None:
        shard, which = self._cuts[self._next]
        layout = shard.layout
        self._next += 1
        grad_mask = self._executor.collect_some([layout.numbers[i] for i in which], self._scale)
        end = layout.offsets[which.stop] if which.stop < len(layout.offsets) else layout.padded
        self._callback(shard.gradients[layout.offsets[which.start] : end], self._weight, grad_mask)

    def flush(self) -> None:
        self.active = False
        while self._next < len(self._cuts):
            self._hand_out()
        self._flushed(None)


def _cut(layout: Layout) -> list[range]:
    """Ranges of a layout's parameters of about BUCKET_BYTES each, in the order in which backward completes them."""
    ranges: list[range] = []
    stop, bytes_ = len(layout.sizes), 0
    for i in reversed(range(len(layout.sizes))):
        bytes_ += layout.sizes[i] * layout.dtype.itemsize
        if bytes_ >= BUCKET_BYTES or i == 0:
            ranges.append(range(i, stop))
            stop, bytes_ = i, 0
    return ranges
