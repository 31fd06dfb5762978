"""DiLoCo over the group: fragments of the parameters, each synced in its turn, and on its way while workers go on.

Source: Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch, Douillard et al., 2025. Plain
DiLoCo is one fragment, waited for at once, taken over whole; its means can be compressed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import Done, Work
from manyhands.errors import BadInput
from manyhands.replica.layout import ALIGNMENT_BYTES, Layout
from manyhands.replica.replica import MORE, STOP, Replica
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

    center: Tensor  # [D'] the start points of the windows
    momentum: Tensor  # [D'] the outer one
    on_way: Tensor  # [D'] this rank's own part of the means under way; [0] where none can be
    counted: Tensor  # [fragments] float64, what the loss counted in the open windows
    on_way_counted: Tensor  # [fragments] and in those whose mean is under way
    ticks: int = 0  # since all fragments were synced together
    fragments: list[Fragment] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)  # one [D'] that the group works on
    handles: dict[int, Work] = field(default_factory=dict)  # by fragment; of a resumed run, which has none, `on_way` is

    @override
    def merge(self, others: list[GroupState], rank: int, size: int) -> GroupState:
        """With another number of ranks the windows stay open, and parts under way keep their mean."""
        if len(others) == size:
            return others[rank]
        first = others[0]
        for which, (start, stop) in enumerate(self.fragments if len(first.on_way) else []):
            parts = [other.on_way[start:stop] for other in others]
            first.on_way[start:stop] = mean_of(parts, [float(other.on_way_counted[which]) for other in others])
        return replace(
            first,
            counted=torch.stack([other.counted for other in others]).sum(0) / size,
            on_way_counted=torch.stack([other.on_way_counted for other in others]).sum(0) / size,
            residual=self.shared(others, size, adds=False),
        )

    @override
    def weight_of_window(self) -> float:
        """Of the open windows. One number for all fragments, though each has a window of its own, and none for what a
        fragment under way has moved: with `streaming`, replicas are averaged nearly by rows."""
        return float(self.counted.sum())


def begin(schedule: Schedule, replica: Replica, worker: Worker) -> GroupState:
    """All start from rank 0's parameters. A collective; the same on all ranks."""
    replica.broadcast_from_rank0(worker.group)
    fragments = cut(replica.layout, schedule.fragments)
    return GroupState(
        center=replica.parameters.clone(),
        momentum=torch.zeros_like(replica.parameters),
        on_way=torch.zeros_like(replica.parameters)[: None if schedule.overlap else 0],
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


def turn(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, weight: float) -> bool:
    """After a step that counted `weight`: use the mean that is due, start the one that is. Returns what `exchange` returns."""
    state.counted += weight
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
    if not in_sync and not schedule.under_way(state.ticks):
        in_sync = replica.sync_control_bits_if_due(worker)
    return replica.any_rank_has_rows if in_sync else True


def close(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState) -> None:
    """Use what is under way, then sync all fragments that were stepped since, one by one.

    Of the fragment that is due at the last tick nothing is left: with overlap its mean is under way, and is used as
    ever (so that with mixing a worker keeps a share of its own there); without, it has just been synced.
    """
    if not state.ticks:
        return
    for fragment in schedule.under_way(state.ticks):
        _use_mean(schedule, replica, worker, state, fragment, schedule.mixing)
    left = [fragment for fragment in range(schedule.fragments) if fragment != schedule.due(state.ticks)]
    for fragment in left:
        _start_mean(schedule, replica, worker, state, fragment)
        _use_mean(schedule, replica, worker, state, fragment, mixing=0.0)
    state.ticks = 0


def mean_of(parts: list[Tensor], weights: list[float]) -> Tensor:
    """The weighted mean; where nothing counts, each counts the same."""
    total = sum(weights)
    shares = [weight / total if total else 1 / len(weights) for weight in weights]
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)


# -- one fragment ------------------------------------------------------------------------------------------------------


def _start_mean(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int) -> None:
    """The window ends here: its pseudo-gradient goes on its way."""
    here = slice(*state.fragments[fragment])
    gradient = torch.sub(state.center[here], replica.parameters[here], out=state.memory[0][here])
    if len(state.on_way):
        state.on_way[here].copy_(gradient)
    state.on_way_counted[fragment] = state.counted[fragment]
    state.counted[fragment] = 0.0
    state.handles[fragment] = _mean(schedule, replica, worker, state, fragment)


def _mean(schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int) -> Work:
    """Start the weighted mean over the group of what `memory` holds of a fragment, with this worker's control bits."""
    gradient = state.memory[0][slice(*state.fragments[fragment])]
    weight, bits = float(state.on_way_counted[fragment]), replica.bits() & (MORE | STOP)
    if schedule.compress == "none":
        return worker.group.start_mean_(gradient, weight, bits)
    return Done(compression.mean_(schedule, replica, worker, state, gradient, weight, bits))


def _use_mean(
    schedule: Schedule, replica: Replica, worker: Worker, state: GroupState, fragment: int, mixing: float
) -> None:
    """Wait for the mean pseudo-gradient, make the outer step, and go on from the new center, or from between."""
    here = slice(*state.fragments[fragment])
    gradient, center, momentum = state.memory[0][here], state.center[here], state.momentum[here]
    if fragment not in state.handles:  # it was under way at the checkpoint
        gradient.copy_(state.on_way[here])
        state.handles[fragment] = _mean(schedule, replica, worker, state, fragment)
    total = replica.record_control_bits(state.handles.pop(fragment).wait())
    replica.rounds += worker.size > 1
    state.on_way_counted[fragment] = 0.0
    if not total.weight:
        return
    outer_step(center, momentum, gradient, schedule.rate, schedule.momentum)
    x = replica.parameters[here]
    x.lerp_(center, 1 - mixing) if mixing else x.copy_(center)


def outer_step(center: Tensor, momentum: Tensor, gradient: Tensor, rate: float, factor: float) -> None:
    """SGD with Nesterov momentum as torch.optim.SGD(nesterov=True), in place; `gradient` is scratch afterwards."""
    if factor:
        momentum.mul_(factor).add_(gradient)
        gradient.add_(momentum, alpha=factor)
    center.add_(gradient, alpha=-rate)
