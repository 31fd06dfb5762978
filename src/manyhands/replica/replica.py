"""A replica: one worker's copy of the model, seen as flat vectors, and what a strategy may do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import units
from manyhands.comm.group import Group, MeanResult
from manyhands.data.batch import rows_of, slice_rows
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.replica.layout import Layout
from manyhands.replica.optimizer_state import OptimizerState
from manyhands.task import Measure
from manyhands.worker import Worker

MORE, STOP = 1, 2  # the control bits; bit CONTROL_BITS + i says that parameter i got a gradient
CONTROL_BITS = 2
_CONTROL = (1 << CONTROL_BITS) - 1
SYNC_EVERY_S, SYNC_AT_MOST_TICKS = 1.0, 256  # a stop is received within about so many seconds, and within so many ticks
BUCKET_BYTES = 4 << 20  # of one slice given to `on_ready`: large enough to amortise a message, small enough to overlap


class Replica:
    """A worker's model, optimizer and schedule behind two flat vectors, `parameters` and `gradients`, both [D'].

    Autograd allocates gradients as it likes; `backward` gathers them. A parameter's `.grad` is then a view of
    `gradients` where any worker produced a gradient, and None elsewhere, as in a plain loop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
        *,
        group: Group,
        loss: Callable[[nn.Module, Any], Measure] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float | None = None,
        precision: str = "float32",
        micro_batch_size: int | None = None,
        nonfinite: str = "raise",
        clock: Callable[[], float] = time.perf_counter,
        take_step: Callable[[], Any] | None = None,
    ) -> None:
        """Flatten `model` into memory of `group`, then build the optimizer and its schedule. Same order on all ranks.

        nonfinite: "raise", "skip", or "apply" as a plain loop does.
        clock: the worker's, for `apply_seconds`.
        take_step: what steps the optimizer, where the optimizer's own `step` was rebound; without it, `optimizer.step`.
        """
        self.model, self.layout = model, Layout(model)
        self._group, self._loss, self._clip_norm = group, loss, clip_norm
        self._bf16, self._micro, self._nonfinite = precision == "bf16-mixed", micro_batch_size, nonfinite
        self.parameters, self.gradients = self.zeros(), self.zeros()
        self.layout.attach(self.parameters)
        self._grads = self.layout.views(self.gradients)  # what `.grad` is after a gather
        self._filled = 0  # bits: slices of `gradients` that are not zero
        self._mean: MeanResult | None = None  # of the mean that `gradients` holds; None: they are this worker's own
        self._clock, self._take_step = clock, take_step
        self._buckets: _Buckets | None = None
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _build(optimizer, model)
        self.schedule = schedule(self.optimizer) if schedule is not None else None
        self.optimizer_state = OptimizerState(self.optimizer, self.layout, self.zeros)
        self.weight = 0.0  # behind `gradients`: own, then the total after a mean
        self.grad_mask = 0  # bits: the parameters that got a gradient, first here, after a mean anywhere
        self.tick = self.step = 0  # loop turns, optimizer steps
        self.more = True  # rows are left here this epoch
        self.stop = False  # this worker wants all to stop
        self.last = True  # the epoch under way is the last, as far as anybody knows
        self._follows = False  # the schedule is moved by `follow_schedule` alone
        self.idle = False  # no rows here in this tick, while others have some: the schedule moves on all the same
        self.skip = False  # this tick's gradient would come too late: `backward` leaves it out, as without rows
        self.dropped = False  # this worker's own gradient did not enter in this tick, whatever was applied
        self.applied = False  # `apply` did something in this tick
        self.control_bits = 0  # control bits of the last exchange in this tick, OR of all ranks
        self.rounds = 0  # exchanges so far
        self.apply_seconds = 0.0
        self._unsynced_ticks, self._sync_after_ticks = 0, 1  # ticks since the last vote, and when the next is due
        self._synced_s = 0.0  # when the last one was, on the worker's clock

    # -- memory ------------------------------------------------------------------------------------------------------

    def zeros(self) -> Tensor:
        """[D'] zeros in memory the group works on without copies. Same order on all ranks."""
        vector = self._group.allocate(self.layout.padded, self.layout.dtype)
        return (
            vector
            if vector.device == self.layout.device
            else torch.zeros(self.layout.padded, dtype=self.layout.dtype, device=self.layout.device)
        )

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """{parameter name: its view of `vector` [D']}"""
        return self.layout.named(vector)

    def alias_parameters(self, vector: Tensor) -> None:
        """Make `vector` [D'], which holds their values, the parameters' memory: another worker's, shared by both."""
        for p, view in zip(self.layout.parameters, self.layout.views(vector), strict=True):
            p.data = view
        self.parameters = vector

    def check(self) -> None:
        """Raise Unsupported if something replaced or moved a parameter since."""
        self.layout.check_attached(self.model, self.parameters)

    # -- gradient ----------------------------------------------------------------------------------------------------

    def begin_tick(self) -> None:
        """Forget what belongs to the tick before."""
        self.reset_flags()
        for p in self.layout.parameters:
            p.grad = None

    def reset_flags(self) -> None:
        """`begin_tick` for a loop that keeps or zeroes gradients itself."""
        self.applied, self.control_bits, self.idle = False, 0, False
        self.skip = self.dropped = False
        self.weight, self.grad_mask = 0.0, 0

    def backward(self, batch: Any | None) -> float:
        """Gradient of the mean loss over this worker's rows into `gradients`; returns that loss.

        None is an empty tick: the model is not called, the gradient is zero with weight 0, 0.0 comes back. With
        micro-batches the gradient is that of the whole batch. A batch on which the loss counts nothing has weight 0.
        """
        assert self._loss is not None
        if batch is None or self.skip:
            self.collect()
            return 0.0
        rows = rows_of(batch)
        if self._micro is None or rows <= self._micro:
            mean, self.weight = self._forward(batch, rows)
            self._backward_last(mean, None)
            return float(mean.detach())
        return self._backward_pieces(batch, rows, self._micro)

    def _backward_pieces(self, batch: Any, rows: int, size: int) -> float:
        total = summed = 0.0
        starts = range(0, rows, size)
        for start in starts:
            stop = min(start + size, rows)
            mean, weight = self._forward(slice_rows(batch, start, stop), stop - start)
            total += weight
            if weight:
                summed += float(mean.detach()) * weight
            if stop == rows:
                self.weight = total
                self._backward_last(mean * weight if weight else None, 1 / total if total else None)
            elif weight:
                (mean * weight).backward()
        return summed / total if total else 0.0

    def _forward(self, batch: Any, rows: int) -> tuple[Tensor, float]:
        assert self._loss is not None
        with torch.autocast(self.layout.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            measure = self._loss(self.model, batch)
        mean, weight = measure if isinstance(measure, tuple) else (measure, rows)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            came = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise BadInput(
                f"the loss must be one number, the mean over the batch, or (mean, weight); got {came}: average it over rows"
            )
        if not mean.requires_grad:
            raise BadInput(
                "the loss does not depend on any trainable parameter: compute it from model(...) outside torch.no_grad() and without detach()"
            )
        return mean.reshape(()), float(weight)

    def _backward_last(self, mean: Tensor | None, scale: float | None) -> None:
        if self._buckets is not None:
            self._buckets.begin(scale)
        if mean is not None:
            mean.backward()
        self.collect(scale)

    def collect(self, scale: float | None = None) -> None:
        """Gather every `.grad` into `gradients` (times `scale`), zero missing slices, make `.grad` views of it."""
        self._mean = None
        if self._buckets is not None:
            self._buckets.flush(scale)
            return
        self.collect_some(range(len(self._grads)), scale)

    def collect_some(self, which: range, scale: float | None) -> None:
        """`collect` for the parameters numbered `which`."""
        targets, sources, stale = [], [], []
        for i in which:
            p, bit = self.layout.parameters[i], 1 << i
            grad, view = p.grad, self._grads[i]
            if grad is None:
                if self._filled & bit:
                    stale.append(view)
                    self._filled &= ~bit
                continue
            self.grad_mask |= bit
            self._filled |= bit
            if grad is not view:
                if grad.is_sparse:
                    raise Unsupported(
                        f"{self.layout.names[i]} has a sparse gradient: build its embedding with sparse=False"
                    )
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

    def on_ready(self, callback: Callable[[Tensor], None]) -> None:
        """From now on, call back with each slice of `gradients` as soon as it is final during the last micro-batch.

        Slices come in the same order on every rank and cover the vector; those that backward did not complete come
        at its end, an empty tick's too. `weight` is known when the first comes. Raises Unsupported in the user's own
        loop, which does not say which backward is the step's last.
        """
        if self._loss is None:
            raise Unsupported(
                "overlapping the exchange with backward needs manyhands' own loop: leave overlap out, or use mh.train"
            )
        self._buckets = _Buckets(self, callback)

    # -- agreement ---------------------------------------------------------------------------------------------------

    def bits(self) -> int:
        """What this worker says beside its vector: control bits, then one per parameter with a gradient."""
        return (MORE if self.more else 0) | (STOP if self.stop else 0) | self.grad_mask << CONTROL_BITS

    def record_control_bits(self, total: MeanResult) -> MeanResult:
        """Take note of the control bits that came back from an exchange."""
        self.control_bits |= total.bits & _CONTROL
        return total

    def mean_gradients(self, group: Group) -> MeanResult:
        """Weighted mean of `gradients` over the group, in place; sets `weight` to the total, `grad_mask` to the OR.

        Gradients that are the mean already, as `prepare` has them right after backward, are left as they are.
        """
        if self._mean is None:
            self.rounds += group.size > 1
            return self.record_mean(group.mean_(self.gradients, self.weight, self.bits()))
        return self._mean

    def record_mean(self, total: MeanResult) -> MeanResult:
        """Take note that `gradients` holds the group's mean now."""
        self.record_control_bits(total)
        self._mean = total
        self.weight, self.idle = total.weight, False
        self.grad_mask = total.bits >> CONTROL_BITS
        self._filled |= self.grad_mask
        for i, p in enumerate(self.layout.parameters):
            if not self.grad_mask >> i & 1:
                p.grad = None  # an own gradient that is not in this mean
            elif p.grad is None:
                p.grad = self._grads[i]
        return total

    def mean_(self, group: Group, vector: Tensor, weight: float, bits: int = 0) -> MeanResult:
        """Weighted mean of any [D'] vector, with this worker's control bits; `bits` go above them."""
        self.rounds += group.size > 1
        total = self.record_control_bits(group.mean_(vector, weight, self.bits() & _CONTROL | bits << CONTROL_BITS))
        return MeanResult(total.weight, total.bits >> CONTROL_BITS)

    def sync_control_bits_if_due(self, worker: Worker) -> bool:
        """For ticks without an exchange: swap the control bits alone, about once a second. Whether it did in this tick.

        How many ticks a second holds is measured at each vote and agreed on, so that all ranks vote at the same ticks.
        """
        self._unsynced_ticks += 1
        if self._unsynced_ticks < self._sync_after_ticks:
            return False
        now = worker.clock()
        pace = torch.tensor([(now - self._synced_s) / self._unsynced_ticks], dtype=torch.float64)  # seconds a tick
        self.record_control_bits(worker.group.mean_(pace, 1.0, self.bits() & _CONTROL))
        self._sync_after_ticks = max(1, min(SYNC_AT_MOST_TICKS, int(SYNC_EVERY_S / max(float(pace), 1e-9))))
        self._unsynced_ticks, self._synced_s = 0, worker.clock()
        return True

    @property
    def has_loss(self) -> bool:
        """Whether `backward` computes the gradient here; False in the user's own loop."""
        return self._loss is not None

    @property
    def used(self) -> bool:
        """Whether this worker's rows moved anything in this tick; if not, they count as unused."""
        return self.applied and not self.dropped

    @property
    def any_rank_has_rows(self) -> bool:
        """As received in this tick's exchange."""
        return bool(self.control_bits & MORE)

    def broadcast_from_rank0(self, group: Group) -> None:
        """Take rank 0's parameters and buffers."""
        if group.size > 1:
            group.broadcast_(self.parameters, 0)
            for buffer in self.model.buffers():
                group.broadcast_(buffer, 0)

    # -- step --------------------------------------------------------------------------------------------------------

    def apply(self) -> bool:
        """Clip, optimizer step, schedule step. False: nothing was done (weight 0, or not finite and "skip").

        Raises ManyhandsError for a gradient that is not finite, unless nonfinite="skip".
        """
        if self.weight == 0:
            if self.idle:
                self._follow_step()
            return False
        start = self._clock()
        if self._nonfinite != "apply" and not self._finite():
            if self._nonfinite == "raise":
                raise self._not_finite()
            return False
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.layout.parameters, self._clip_norm)
        (self._take_step or self.optimizer.step)()
        self._follow_step()
        self.step += 1
        self.applied = True
        self.apply_seconds += self._clock() - start
        return True

    def _follow_step(self) -> None:
        if self.schedule is not None and not self._follows:
            self._step_schedule()

    def _step_schedule(self) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else it warns of a wrong order on an idle tick
        self.schedule.step()  # type: ignore[union-attr]

    def follow_schedule(self, steps: int) -> None:
        """Bring the schedule to where it stands after so many steps; from now on `apply` leaves it alone.

        For workers that go at their own pace: the rate depends on how far the epoch is, not on who made more steps.
        """
        self._follows = True
        self.wind_schedule(steps)

    def wind_schedule(self, steps: int) -> None:
        """Step the schedule until it stands where it does after so many steps."""
        while self.schedule is not None and _steps_of(self.schedule) < steps:
            self._step_schedule()

    def _finite(self) -> bool:
        # The sum costs a twentieth of isfinite().all(), and is finite only if every element is; it may overflow by
        # itself.
        return bool(self.gradients.sum().isfinite()) or bool(self.gradients.isfinite().all())

    def _not_finite(self) -> ManyhandsError:
        names = [name for name, view in self.named(self.gradients).items() if not view.isfinite().all()]
        own = 'set clip_norm, look at the rows of this step, or pass nonfinite="skip" to leave such steps out'
        users = "look at the rows of this step, or leave out step() on all workers where clip_grad_norm_ returns no finite norm"
        return ManyhandsError(
            f"the gradient of step {self.step} is not finite in {units.listed(names, 5)}: lower the learning rate, "
            + (users if self._loss is None else own)
        )

    def set_parameters(self, vector: Tensor) -> None:
        """Copy `vector` [D'] into the parameters."""
        if vector is not self.parameters:
            self.parameters.copy_(vector)


def _build(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"optimizer(model) must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            "LBFGS evaluates the model several times a step, which no exchange can follow: take another optimizer"
        )
    return optimizer


def _steps_of(schedule: Any) -> int:
    """How often a schedule was stepped; a ChainedScheduler does not count, its members do."""
    while not hasattr(schedule, "last_epoch"):
        schedule = schedule._schedulers[0]
    return int(schedule.last_epoch)


class _Buckets:
    """Cuts the gradients into slices and hands out each once its parameters have gradients, last layers first."""

    def __init__(self, replica: Replica, callback: Callable[[Tensor], None]) -> None:
        self._replica, self._callback = replica, callback
        self._ranges = _cut(replica.layout)
        self._bucket_of = [k for i in range(len(replica.layout.names)) for k, r in enumerate(self._ranges) if i in r]
        self._active = False
        self._flushed(None)
        for i, p in enumerate(replica.layout.parameters):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    def begin(self, scale: float | None) -> None:
        self._flushed(scale)
        self._active = True

    def _flushed(self, scale: float | None) -> None:
        self._active, self._next, self._scale = False, 0, scale
        self._missing = [len(r) for r in self._ranges]

    def _ready(self, i: int) -> None:
        if not self._active:
            return
        self._missing[self._bucket_of[i]] -= 1
        while self._next < len(self._ranges) and self._missing[self._next] == 0:
            self._hand_out()

    def _hand_out(self) -> None:
        layout, which = self._replica.layout, self._ranges[self._next]
        self._next += 1
        self._replica.collect_some(which, self._scale)
        end = layout.offsets[which.stop] if which.stop < len(layout.offsets) else layout.padded
        self._callback(self._replica.gradients[layout.offsets[which.start] : end])

    def flush(self, scale: float | None) -> None:
        self._active = False
        self._scale = scale
        while self._next < len(self._ranges):
            self._hand_out()
        self._flushed(None)


def _cut(layout: Layout) -> list[range]:
    """Ranges of parameter numbers of about BUCKET_BYTES each, in the order in which backward completes them."""
    ranges: list[range] = []
    stop, bytes_ = len(layout.sizes), 0
    for i in reversed(range(len(layout.sizes))):
        bytes_ += layout.sizes[i] * layout.dtype.itemsize
        if bytes_ >= BUCKET_BYTES or i == 0:
            ranges.append(range(i, stop))
            stop, bytes_ = i, 0
    return ranges
