"""DiLoCo over the group: fragments of the parameters, each synced in its turn, and on its way while workers go on.

Source: Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch, Douillard et al., 2025. Plain
DiLoCo is one fragment, waited for at once, taken over whole; its means can be compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import Done, Work
from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector, weighted_mean
from manyhands.replica.layout import ALIGNMENT_BYTES, Layout
from manyhands.replica.replica import Replica
from manyhands.strategies import compression
from manyhands.strategies.compression import CompressedState, CompressOptions
from manyhands.worker import Worker

Fragment = tuple[int, int]  # [start, stop) of a flat vector


@dataclass(frozen=True, kw_only=True)
class Schedule(CompressOptions):
    """When the fragments are synced, in ticks; the outer step; and a codec, only for one fragment without overlap."""

    period: int
    fragments: int
    overlap: int  # ticks from the start of a mean to its use
    mixing: float  # share of the worker's own parameters that stays then
    rate: float
    momentum: float

    def due(self, tick: int) -> int | None:
        """The fragment whose mean is started after tick 1, 2, …: one after the other, each every `period` ticks."""
        into = (tick - 1) % self.period + 1  # 1 to period
        fragment = -(-into * self.fragments // self.period) - 1
        here = tick > 0 and (fragment + 1) * self.period // self.fragments == into
        return fragment if here else None

    def under_way(self, tick: int) -> list[int]:
        """The fragments whose mean was started by then and is not to be used yet, in the order of their starts."""
        due = [self.due(t) for t in range(tick - self.overlap + 1, tick + 1)]
        return [fragment for fragment in due if fragment is not None]


@dataclass(kw_only=True)
class GroupState(CompressedState):
    """The outer optimizer, the same on all ranks; and this rank's open windows."""

    center: FlatVector  # the start points of the windows
    momentum: FlatVector  # the outer one
    on_way: FlatVector  # this rank's own part of the means under way; [0] where none can be
    counted: Tensor  # [fragments] float64, what the loss counted in the open windows
    on_way_counted: Tensor  # [fragments] and in those whose mean is under way
    ticks: int = 0  # since all fragments were synced together
    fragments: list[Fragment] = field(default_factory=list)
    memory: list[FlatVector] = field(default_factory=list)  # one that the group works on
    handles: dict[int, list[Work]] = field(default_factory=dict)  # by fragment, one a shard; of a resumed run, which
    # has none, `on_way` is
    opened: list[int] = field(default_factory=list)  # by fragment: the tick until which all is in its center
    started: dict[int, int] = field(
        default_factory=dict
    )  # by fragment under way: the tick at which its mean was started
    remember: list[Callable[[], None]] = field(default_factory=list)  # what the newest mean, compressed, left out

    @override
    def merge(self, others: list[GroupState], rank: int, size: int) -> GroupState:
        """With another number of ranks the windows stay open, and parts under way keep their mean."""
        if len(others) == size:
            return others[rank]
        first = others[0]
        for which, fragment in enumerate(self.fragments if first.on_way.numel else []):
            parts = [other.on_way.between(*fragment) for other in others]
            weights = [float(other.on_way_counted[which]) for other in others]
            parts[0].copy_(weighted_mean(parts, weights))
        return replace(
            first,
            counted=torch.stack([other.counted for other in others]).sum(0) / size,
            on_way_counted=torch.stack([other.on_way_counted for other in others]).sum(0) / size,
            residual=self.shared(others, size, adds=False),
        )

    @override
    def taken_over(self) -> GroupState:
        """This worker has no steps of its own in the open windows."""
        super().taken_over()
        return replace(self, counted=self.counted.zero_(), on_way_counted=self.on_way_counted.zero_())

    @override
    def weight_of_window(self) -> float:
        """Of the open windows. One number for all fragments, though each has a window of its own, and none for what a
        fragment under way has moved: with `streaming`, replicas are averaged nearly by rows."""
        return float(self.counted.sum())


def begin(schedule: Schedule, replica: Replica, worker: Worker) -> GroupState:
    """The state; all windows begin at the replica's parameters."""
    fragments = cut(replica.layout, schedule.fragments)
    return GroupState(
        center=replica.parameters.clone(),
        momentum=replica.parameters.zeros_like(),
        on_way=replica.parameters.between(0, replica.parameters.numel if schedule.overlap else 0).zeros_like(),
        counted=torch.zeros(len(fragments), dtype=torch.float64),
        on_way_counted=torch.zeros(len(fragments), dtype=torch.float64),
        fragments=fragments,
        memory=[replica.zeros()],
        **compression.remembered(schedule, replica, worker),
    )


def cut(layout: Layout, fragments: int) -> list[Fragment]:
    """Contiguous fragments of D' of about the same length; between two parameters where that is near enough.

    BadInput for more of them than there are pieces of 128 bytes.
    """
    unit = max(1, ALIGNMENT_BYTES // layout.dtype.itemsize)
    length = layout.padded / fragments
    if length < unit:
        raise BadInput(
            f"strategy diloco: streaming={fragments} cuts {layout.padded} numbers into fragments of less than {ALIGNMENT_BYTES} bytes: "
            f"give at most {layout.padded // unit}"
        )
    cuts = [0]
    for k in range(1, fragments):
        nearest = min(layout.offsets, key=lambda offset: abs(offset - k * length))
        near = abs(nearest - k * length) <= length / 4
        cuts.append(max(cuts[-1] + unit, nearest if near else int(k * length) // unit * unit))
    return list(zip(cuts, [*cuts[1:], layout.padded], strict=True))


def turn(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState) -> bool:
    """After a step: use the mean that is due, start the one that is. Whether rows are left."""
    _know_windows(schedule, state)
    state.ticks += 1
    in_sync = False
    landing, starting = schedule.due(state.ticks - schedule.overlap), schedule.due(state.ticks)
    if schedule.overlap == 0 and starting is not None:
        _start_mean(schedule, replica, worker, state, starting)
    if landing is not None:
        _use_mean(schedule, replica, worker, state, landing, schedule.mixing)
        in_sync = True
    if schedule.overlap and starting is not None:
        _start_mean(schedule, replica, worker, state, starting)
    if schedule.under_way(state.ticks) and not in_sync:
        return True
    return replica.control.rows_left(worker, in_sync)


def close(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState) -> None:
    """Use what is under way, then sync all fragments that were stepped since, one by one.

    Of the fragment that is due at the last tick nothing is left: with overlap its mean is under way, and is used as
    ever (so that with mixing a worker keeps a share of its own there); without, it has just been synced.
    """
    if not state.ticks:
        return
    _know_windows(schedule, state)
    for fragment in list(state.started):
        _use_mean(schedule, replica, worker, state, fragment, schedule.mixing)
    if replica.elastic:
        _sync_together(schedule, replica, worker, state)
        return
    for fragment in [fragment for fragment in range(schedule.fragments) if fragment != schedule.due(state.ticks)]:
        _start_mean(schedule, replica, worker, state, fragment)
        _use_mean(schedule, replica, worker, state, fragment, mixing=0.0)
    state.ticks, state.opened, state.started = 0, [], {}


# -- where members may change ------------------------------------------------------------------------------------------


def forget(schedule: Schedule, state: GroupState) -> None:
    """Means under way are gone with their group: their windows are open as before, and go on."""
    _know_windows(schedule, state)
    state.handles.clear()
    state.started.clear()
    state.counted += state.on_way_counted
    state.on_way_counted.zero_()


def step_extra(replica: Replica, state: GroupState, ago: int) -> bool:
    """Step on a lost worker's rows, of its step so many before the newest: only in the fragments in whose centers that
    step is not yet."""
    step = state.ticks - ago  # 1, 2, … since all fragments were synced together
    there = [which for which, opened in enumerate(state.opened) if opened >= step]
    before = state.memory[0]  # no mean is under way
    for which in there:
        here = state.fragments[which]
        before.between(*here).copy_(replica.parameters.between(*here))
    weight, applied = replica.weight, replica.apply(extra=True)
    if not applied:
        return False
    for which, here in enumerate(state.fragments):
        if which in there:
            replica.parameters.between(*here).copy_(before.between(*here))
        else:
            state.counted[which] += weight
    return True


def _sync_together(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState) -> None:
    """Sync all fragments, each in a mean of its own; all of them count, or none."""
    for fragment in range(schedule.fragments):
        _start_mean(schedule, replica, worker, state, fragment)
    totals = []
    for fragment in range(schedule.fragments):
        for handle in state.handles.pop(fragment):
            total = replica.control.record(handle.wait())
        totals.append(total)
    replica.rounds += schedule.fragments * (worker.mesh.data.size > 1)

    def close() -> None:
        for fragment, total in enumerate(totals):
            _step_center(schedule, replica, state, fragment, total.weight, mixing=0.0)
        state.ticks, state.opened, state.started = 0, [], {}

    replica.complete(worker.mesh.data, close)


def _know_windows(schedule: Schedule, state: GroupState) -> None:
    """Between two ticks they follow from the number of ticks, as after a resume."""
    if not state.opened:
        state.opened = [0] * schedule.fragments
        state.started = {}
        for tick in range(max(1, state.ticks - schedule.period - schedule.overlap), state.ticks + 1):
            if (fragment := schedule.due(tick)) is None:
                continue
            if tick > state.ticks - schedule.overlap:
                state.started[fragment] = tick
            else:
                state.opened[fragment] = tick


# -- one fragment ------------------------------------------------------------------------------------------------------


def _start_mean(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int) -> None:
    """The window ends here: its pseudo-gradient goes on its way."""
    here = state.fragments[fragment]
    gradient = state.memory[0].between(*here).subtract_(state.center.between(*here), replica.parameters.between(*here))
    if state.on_way.numel:
        state.on_way.between(*here).copy_(gradient)
    state.on_way_counted[fragment] += state.counted[fragment]  # 0, but for a mean that a lost worker ended
    state.counted[fragment] = 0.0
    state.started[fragment] = state.ticks
    state.handles[fragment] = _mean(schedule, replica, worker, state, fragment)


def _mean(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int) -> list[Work]:
    """Start the weighted mean over the group of what `memory` holds of a fragment, with this worker's control bits."""
    gradient = state.memory[0].between(*state.fragments[fragment])
    weight, bits = float(state.on_way_counted[fragment]), replica.control.own
    if schedule.compress == "none":
        parts = [part for part in gradient.parts if len(part)]
        return [worker.mesh.data.start_mean_(part, weight, bits) for part in parts]
    total, remember = compression.mean_(schedule, replica, worker, state, gradient, weight, bits)
    state.remember = [remember]
    return [Done(total)]


def _use_mean(
    schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int, mixing: float
) -> None:
    """Wait for the mean pseudo-gradient, make the outer step, and go on from the new center, or from between."""
    if fragment not in state.handles:  # it was under way at the checkpoint
        here = state.fragments[fragment]
        state.memory[0].between(*here).copy_(state.on_way.between(*here))
        state.handles[fragment] = _mean(schedule, replica, worker, state, fragment)
    for handle in state.handles.pop(fragment):
        total = replica.control.record(handle.wait())
    replica.rounds += worker.mesh.data.size > 1

    def close() -> None:
        _step_center(schedule, replica, state, fragment, total.weight, mixing)
        state.opened[fragment] = state.started.pop(fragment)
        if replica.elastic and schedule.fragments == 1 and not schedule.overlap:  # then this was a sync of all
            state.ticks, state.opened = 0, []

    replica.complete(worker.mesh.data, close)


def _step_center(
    schedule: Schedule, replica: Replica, state: GroupState, fragment: int, weight: float, mixing: float
) -> None:
    """The outer step along the mean that `memory` holds, and the way from there. weight: of all ranks."""
    vectors = state.memory[0], state.center, state.momentum, replica.parameters
    gradient, center, momentum, x = (vector.between(*state.fragments[fragment]) for vector in vectors)
    state.on_way_counted[fragment] = 0.0
    for remember in state.remember:
        remember()
    state.remember = []
    if weight:
        outer_step(center, momentum, gradient, schedule.rate, schedule.momentum)
        x.lerp_(center, 1 - mixing) if mixing else x.copy_(center)


def outer_step(center: FlatVector, momentum: FlatVector, gradient: FlatVector, rate: float, factor: float) -> None:
    """SGD with Nesterov momentum as torch.optim.SGD(nesterov=True), in place; `gradient` is scratch afterwards."""
    if factor:
        momentum.mul_(factor).add_(gradient)
        gradient.add_(momentum, alpha=factor)
    center.add_(gradient, alpha=-rate)
