"""A replica: one worker's copy of the model, seen as flat vectors, and what a strategy may do with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import units
from manyhands.comm.group import Group, MeanResult
from manyhands.data.batch import naming_columns
from manyhands.errors import BadInput, NotFinite, Unsupported
from manyhands.replica.control_bits import ControlBits
from manyhands.replica.executor import AutogradExecutor, StepExecutor
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.layout import Layout
from manyhands.replica.optimizer_state import OptimizerState
from manyhands.task import Loss

T = TypeVar("T")


class Replica:
    """A worker's model, optimizer and schedule behind two flat vectors, `parameters` and `gradients`.

    Each has one part [D'] a shard, and there is one shard for each dtype of the trainable parameters: most models have
    one. What a step does is the executor's; this class counts, agrees with the other replicas, and decides whether a
    step is made.
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        group: Group,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float | None = None,
        nonfinite: str = "raise",
        clock: Callable[[], float] = time.perf_counter,
        elastic: bool = False,
        compares_places: bool = False,
        progress: Callable[[str, int], None] = lambda phase, step: None,
    ) -> None:
        """Build the executor's model in memory of `group`, then the schedule. Same order on all ranks.

        group: the workers that hold the same shards, `worker.mesh.data`.
        nonfinite: "raise", "skip", or "apply" as a plain loop does.
        clock: the worker's, for `apply_seconds`.
        elastic: other workers may take the place of these: see `join`.
        compares_places: see `ControlBits`.
        progress: reports a phase and the step, as `DriverClient.progress` does.
        """
        self.executor, self._group, self.elastic = executor, group, elastic
        self._commits: Group | None = None
        self._clip_norm, self._nonfinite, self._clock = clip_norm, nonfinite, clock
        self._progress = progress
        executor.build(self._allocate)
        self.model, self.optimizer, self.shards = executor.model, executor.optimizer, executor.shards
        self.layout = Layout.joined([shard.layout for shard in self.shards])  # of `FlatVector.joined()`
        self.parameters = FlatVector([shard.parameters for shard in self.shards])
        self._gradients = FlatVector([shard.gradients for shard in self.shards])
        self._mean: MeanResult | None = None  # of the mean that `gradients` holds; None: they are this worker's own
        self._computes_alone = False  # nothing of this gradient is to be exchanged
        self.schedule: Any = None
        self.watched: str | None = None  # the validation metric on which the schedule is stepped, if it is on one
        if schedule is not None:
            self.use_schedule(schedule)
        self.optimizer_state = OptimizerState(self.optimizer, self.layout, self.zeros, self.named)
        self.control = ControlBits(elastic, compares_places=compares_places)
        self.weight = 0.0  # behind `gradients`: own, then the total after a mean
        self.grad_mask = 0  # bits: the parameters that got a gradient, first here, after a mean anywhere
        self.loss = 0.0  # the mean over this tick's own rows; of a kernel, once it is applied
        self.tick = self.step = 0  # loop turns, optimizer steps
        self.last = True  # the epoch under way is the last, as far as anybody knows
        self._follows = False  # the schedule is moved by `follow_schedule` alone
        self.idle = False  # no rows here in this tick, while others have some: the schedule moves on all the same
        self.skip = False  # this tick's gradient would come too late: `backward` leaves it out, as without rows
        self.rounds = 0  # exchanges so far
        self.stepped = False  # this tick's gradient was applied, or left out by `apply`
        self.completed = 0  # rounds that `complete` was called for, where members may change
        self._rounds_with_it = 0
        self.round_has_step = False  # the newest of them has what this tick's gradient moved
        self._to_complete: Callable[[], Any] | None = None  # all that is missing of a round that others may have
        self.apply_seconds = 0.0

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
        *,
        group: Group,
        loss: Loss | None = None,
        precision: str = "float32",
        micro_batch_size: int | None = None,
        take_step: Callable[[], Any] | None = None,
        weigh: Callable[[], float | None] | None = None,
        **options: Any,
    ) -> Self:
        """The replica of a plain model in one worker; see `AutogradExecutor`, and `__init__` for the other options."""
        executor = AutogradExecutor(
            model,
            optimizer,
            loss=loss,
            precision=precision,
            micro_batch_size=micro_batch_size,
            take_step=take_step,
            weigh=weigh,
        )
        return cls(executor, group=group, **options)

    @property
    def gradients(self) -> FlatVector:
        """The gradients; Unsupported where the executor has none."""
        if not self.executor.has_gradients:
            raise self.executor.without_gradients()
        return self._gradients

    def join(self, group: Group, commits: Group | None = None) -> None:
        """The workers that hold the same shards are this group's from now on. Nothing is moved or copied.

        commits: the workers that make each step together or not at all, where several hold a replica and may be lost.
        """
        self._group, self._commits = group, commits

    # -- memory ------------------------------------------------------------------------------------------------------

    def zeros(self) -> FlatVector:
        """Zeros in memory the group works on without copies. Same order on all ranks."""
        layouts = [shard.layout for shard in self.shards]
        return FlatVector([self._allocate(layout.padded, layout.dtype, layout.device) for layout in layouts])

    def _allocate(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        vector = self._group.allocate(n, dtype)
        return vector if vector.device == device else torch.zeros(n, dtype=dtype, device=device)

    def named(self, vector: FlatVector | Tensor) -> dict[str, Tensor]:
        """{parameter name: its view of `vector`}, also of a joined one."""
        if isinstance(vector, Tensor):
            return self.layout.named(vector)
        pairs = zip(self.shards, vector.parts, strict=True)
        return {name: view for shard, part in pairs for name, view in shard.layout.named(part).items()}

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters, shard by shard; those of `layout.names`."""
        return self.layout.parameters

    def alias_parameters(self, vector: FlatVector) -> None:
        """Make `vector`, which holds their values, the parameters' memory: another worker's, shared by both."""
        for shard, part in zip(self.shards, vector.parts, strict=True):
            shard.layout.alias(part)
            shard.parameters = part
        self.parameters = vector

    def check(self) -> None:
        """Raise Unsupported if something replaced or moved a parameter since."""
        for shard in self.shards:
            shard.layout.check_attached(self.model, shard.parameters)

    def detach(self) -> None:
        """Give every parameter memory of its own again: the run is over, the model stays."""
        for shard in self.shards:
            shard.layout.detach()

    # -- numbers over the whole replica -------------------------------------------------------------------------------

    def norm(self, vector: FlatVector) -> float:
        """The Euclidean norm over all shards, and over all workers that hold this replica."""
        if len(vector.parts) == 1 and self.executor.members.size == 1:
            return float(vector.parts[0].norm())
        return math.sqrt(self.dot(vector, vector))

    def parameter_count(self) -> int:
        """How many numbers are trained, over all workers that hold this replica, each once. A collective of these."""
        own = float(self.executor.own_parameters())
        return round(float(self.executor.reduce(torch.tensor([own], dtype=torch.float64))))

    def dot(self, one: FlatVector, other: FlatVector) -> float:
        """The dot product over all shards, and over all workers that hold this replica."""
        if len(one.parts) == 1 and self.executor.members.size == 1:
            return float(torch.dot(one.parts[0], other.parts[0]))
        return self.executor.dot(one, other)

    def generator(self, *numbers: int) -> torch.Generator:
        """A generator for random choices: of these numbers and the data rank, so that all workers of a replica choose
        alike. What the process draws is not changed, and a resumed run draws the same.
        """
        first, *others = numbers
        entropy = (first % 2**64, self._group.rank, *others)
        mixed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed >> 1))

    # -- gradient ----------------------------------------------------------------------------------------------------

    def begin_tick(self) -> None:
        """Forget what belongs to the tick before."""
        self.reset_flags()
        self.executor.begin_tick()

    def reset_flags(self) -> None:
        """`begin_tick` for a loop that keeps or zeroes gradients itself."""
        self.control.received, self.idle, self.skip, self.stepped = 0, False, False, False
        self.weight, self.grad_mask = 0.0, 0

    def backward(self, batch: Any | None) -> float:
        """The executor's, over this worker's rows; returns the mean loss.

        None is an empty tick: the model is not called, the gradient is zero with weight 0, 0.0 comes back. So is a
        tick that `skip` says to leave out. Raises BadInput where the loss takes other columns than the batch has.
        """
        self._mean = None
        self.executor.stop, self.executor.regroup = self.control.stop, self.control.regroup
        with naming_columns(batch):
            found = self.executor.backward(None if self.skip else batch)
        self.control.stop = self.control.stop or found.stop
        self.control.regroup = self.control.regroup or found.regroup
        self.weight, self.grad_mask, self.loss = found.weight, found.grad_mask, found.loss
        return found.loss

    @property
    def has_mean(self) -> bool:
        """Whether `gradients` holds the mean of all workers."""
        return self._mean is not None

    def computes_finite(self, batch: Any | None) -> bool:
        """Whether this worker's own gradient over these rows is finite: computed again, in the place of what `gradients`
        holds, and exchanged with nobody."""
        self._computes_alone = True
        try:
            self.executor.begin_tick()
            for part in self._gradients.parts:
                part.zero_()  # the padding, too, which no backward fills
            self.backward(batch)
            return self._finite()
        finally:
            self._computes_alone = False

    def collect(self) -> None:
        """In the user's own loop: gather every `.grad` into `gradients`, zero the rest, and note which there were."""
        self._mean = None
        self.grad_mask = self.executor.collect()

    def on_ready(self, callback: Callable[[Tensor], None]) -> None:
        """From now on, call back with each slice of `gradients` as soon as it is final during the last micro-batch.

        Slices come in the same order on every rank and cover the vector; those that backward did not complete come
        at its end, an empty tick's too. `weight` is known when the first comes. In the user's own loop that is every
        backward for which the executor's `weigh` gives a weight.
        """

        def ready(gradients: Tensor, weight: float, grad_mask: int) -> None:
            if self._computes_alone:
                return
            self.weight, self.grad_mask = weight, grad_mask
            callback(gradients)

        self.executor.on_ready(ready)

    # -- agreement ---------------------------------------------------------------------------------------------------

    def bits(self) -> int:
        """What this worker says beside its vector: control bits, then one per parameter with a gradient."""
        return self.control.own | self.grad_mask << self.control.width

    def mean_gradients(self, group: Group) -> MeanResult:
        """Weighted mean of `gradients` over the group, in place; sets `weight` to the total, `grad_mask` to the OR.

        Gradients that are the mean already, as `prepare` has them right after backward, are left as they are.
        """
        if self._mean is None:
            self.rounds += group.size > 1
            if not self.executor.has_gradients:
                raise self.executor.without_gradients()
            return self.record_mean(self._gradients.mean_(group, self.weight, self.bits()))
        return self._mean

    def record_mean(self, total: MeanResult) -> MeanResult:
        """Take note that `gradients` holds the group's mean now."""
        self.control.record(total)
        self._mean = total
        self.weight, self.idle = total.weight, False
        self.grad_mask = total.bits >> self.control.width
        self.executor.show_gradients(self.grad_mask)
        return total

    def shard_update(self, group: Group) -> None:
        """From now on each of the group's workers steps its part of the parameters, see `ShardedUpdate`. BadInput for an
        optimizer that is not elementwise; Unsupported in the user's own loop, whose optimizer is the user's."""
        if not self.has_loss:
            raise Unsupported(
                "sharded=true takes parameters out of the optimizer, which in a loop of your own is yours (zero_grad, clipping, state_dict): use "
                "mh.train, or leave sharded out"
            )
        self.executor.shard_update(group)

    def reduce_scatter_gradients(self, group: Group) -> MeanResult:
        """As `mean_gradients`, but each worker gets its part of the mean alone, and zeros elsewhere."""
        sharded = self.executor.sharded
        assert sharded is not None, "shard_update comes first"
        self.rounds += 1
        total = group.mean_(torch.empty(0), self.weight, self.bits())
        if total.weight:
            sharded.reduce_scatter_gradients(self.weight / total.weight)
        return self.record_mean(total)

    def mean_(self, group: Group, vector: FlatVector, weight: float, bits: int = 0) -> MeanResult:
        """Weighted mean of any vector, with this worker's control bits; `bits` go above them."""
        self.rounds += group.size > 1
        total = self.control.record(vector.mean_(group, weight, self.control.own | bits << self.control.width))
        return MeanResult(total.weight, total.bits >> self.control.width)

    def sum_weights(self, group: Group, weight: float) -> float:
        """The sum of all ranks' weights, with the control bits and no vector."""
        self.rounds += group.size > 1
        return self.control.record(group.mean_(torch.empty(0), weight, self.control.own)).weight

    def complete(self, group: Group, action: Callable[[], T], *, steps: bool = False) -> T:
        """A round's result is here: do `action`, all that is left of the exchange, once every rank has the result.

        Where members may change, nothing but `action` may write what a replica keeps, and it may not call the group.
        A rank that loses a peer before it is here repeats the round with the members who are left. Whoever loses one
        while it waits here does the action as soon as it learns that another has done it: see `catch_up`.
        steps: the action is this tick's step, of what all have computed.
        """
        if self.elastic:
            self._to_complete, self._rounds_with_it = action, self.rounds
            self.round_has_step = self.stepped or steps
            self._progress("complete", self.step)
            group.barrier()
            self._progress("commit", self.step)
            self._to_complete = None
            self.completed += 1
        return action()

    def catch_up(self, completed: int) -> None:
        """Other members, of whom one has completed so many rounds: do what this rank has not of the last one."""
        action, self._to_complete = self._to_complete, None
        if self.completed < completed:
            assert action is not None, "a round cannot be complete elsewhere before its result is here"
            action()
            self.completed += 1
            self.rounds = self._rounds_with_it

    def broadcast_from_rank0(self, group: Group) -> None:
        """Take rank 0's parameters and buffers."""
        if group.size > 1:
            self.parameters.broadcast_(group, 0)
            for buffer in self.model.buffers():
                group.broadcast_(buffer, 0)

    # -- step --------------------------------------------------------------------------------------------------------

    def apply(self, *, extra: bool = False) -> bool:
        """Clip, optimizer step, schedule step. False: nothing was done (weight 0, or not finite and "skip").

        extra: of rows that were another's: neither the step nor the schedule counts it.
        Raises NotFinite for a gradient that is not finite, unless nonfinite="skip".
        """
        start, communicated_s = self._clock(), self.executor.communicated_s()
        moves = self.weight != 0
        judged = moves and self._nonfinite != "apply" and self.executor.has_gradients
        if judged and not self._finite():
            if self._nonfinite == "raise":
                raise self._not_finite()
            moves = False
        if moves and self._clip_norm is not None:
            self.executor.clip(self._clip_norm)

        def step() -> bool:
            self.stepped = True
            found = self.executor.apply() if moves else None
            if found is not None:
                self.loss = found
            if (moves and not extra) or (self.weight == 0 and self.idle):
                self._follow_step()
            self.step += moves and not extra
            return moves

        applied = step() if self._commits is None else self.complete(self._commits, step)
        if moves and self.executor.sharded is not None:
            self.executor.sharded.gather_parameters()
        if moves:
            self.apply_seconds += self._clock() - start - (self.executor.communicated_s() - communicated_s)
        return applied

    def _follow_step(self) -> None:
        if self.schedule is not None and self.watched is None and not self._follows:
            self._step_schedule()

    def _step_schedule(self) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else it warns of a wrong order on an idle tick
        self.schedule.step()

    def use_schedule(self, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        """Let what `make(optimizer)` returns decide the rate from now on.

        That is a scheduler, which `apply` steps; or a ReduceLROnPlateau, alone or as (scheduler, metric), which
        `step_on` steps. BadInput for anything else.
        """
        made = make(self.optimizer)
        schedule, metric = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        on_plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if on_plateau:
            metric = metric or "validation_loss"
        if not (hasattr(schedule, "step") and hasattr(schedule, "state_dict")) or on_plateau != isinstance(metric, str):
            raise BadInput(
                f"schedule(optimizer, total_steps) must return a scheduler of torch.optim.lr_scheduler, or (ReduceLROnPlateau(optimizer, ...), metric), not {made!r}"
            )
        self.schedule, self.watched = schedule, metric

    def step_on(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that is on a validation metric; `metrics` are the same on all workers."""
        if self.watched is None:
            return
        if self.watched not in metrics:
            raise BadInput(
                f"the schedule is stepped on {self.watched!r}, and validation reported {', '.join(metrics) or 'nothing'}: "
                'return (ReduceLROnPlateau(optimizer, ...), "METRIC") with one of these'
            )
        self.schedule.step(metrics[self.watched])

    def follow_schedule(self, steps: int) -> None:
        """Bring the schedule to where it stands after so many steps; from now on `apply` leaves it alone.

        For workers that go at their own pace: the rate depends on how far the epoch is, not on who made more steps.
        """
        self._follows = True
        self.wind_schedule(steps)

    def wind_schedule(self, steps: int) -> None:
        """Step the schedule until it stands where it does after so many steps."""
        while self.schedule is not None and self.watched is None and _steps_of(self.schedule) < steps:
            self._step_schedule()

    def _finite(self) -> bool:
        """Whether the gradients of the whole replica are finite, the same on all workers that hold it."""
        finite = self._gradients.is_finite()
        if self.executor.sharded is not None and self.has_mean:
            return not self.executor.sharded.total(float(not finite))
        if self.executor.members.size == 1:
            return finite
        return not self.executor.reduce(torch.tensor([float(not finite)], dtype=torch.float64)).any()

    def _not_finite(self) -> NotFinite:
        names = [name for name, view in self.named(self.gradients).items() if not view.isfinite().all()]
        own = 'set clip_norm, look at the rows of this step, or pass nonfinite="skip" to leave such steps out'
        users = (
            "look at the rows of this step, or skip step() on all workers when the norm that clip_grad_norm_ returns "
            "is not finite"
        )
        return NotFinite(
            f"the gradient of step {self.step} is not finite in {units.listed(names, 5)}: lower the learning rate, "
            + (own if self.has_loss else users)
        )

    @property
    def has_loss(self) -> bool:
        """Whether `backward` computes the gradient here; False in the user's own loop."""
        return self.executor.has_loss

    def set_parameters(self, vector: FlatVector) -> None:
        """Copy `vector` into the parameters."""
        if vector is not self.parameters:
            self.parameters.copy_(vector)


def _steps_of(schedule: Any) -> int:
    """How often a schedule was stepped; a ChainedScheduler does not count, its members do."""
    while not hasattr(schedule, "last_epoch"):
        schedule = schedule._schedulers[0]
    return int(schedule.last_epoch)
