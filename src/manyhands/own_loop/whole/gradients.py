"""Gradients of leaves become the mean over workers where a backward ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import Line
from manyhands.own_loop.whole.equality import CHECK_BITS, EqualFacts
from manyhands.own_loop.whole.exchange import Workers, like, mean_of_workers, real_view
from manyhands.own_loop.whole.lazy import PartialSum

Kind = tuple[torch.dtype, torch.device]

_MORE = 1  # bit 0 of a message: a worker has gradients for which the line's messages have no room
_FIRST_LEAF = 1 + CHECK_BITS


@dataclass
class _Room:
    """A line's message of one dtype and device."""

    leaves: dict[int, int] = field(default_factory=dict)  # by number: how many elements
    buffer: Tensor | None = None  # in memory of the group

    def memory(self, kind: Kind, length: int, workers: Workers, inside: int) -> Tensor:
        """[length] for the message. inside: so many gradients of leaves lie in it, and will be of this message.

        Another one where the script holds on to earlier gradients, which lie in this one.
        """
        dtype, device = kind
        if device.type != "cpu":
            return torch.empty(length, dtype=dtype, device=device)
        if self.buffer is None or len(self.buffer) != length:
            self.buffer = workers.group.allocate(length, dtype)
        elif _holders(self.buffer) > inside:
            return torch.empty(length, dtype=dtype)
        return self.buffer


class GradientMeans:
    """What a backward adds to `.grad` of each leaf is averaged, in one message for each dtype and device.

    All workers come by the same lines of the script with the same leaves, but a worker whose rows do not reach one (an
    expert, say) has no gradient for it. So a line's message has room for all that any worker ever had there, and says
    which are filled. Afterwards gradients lie in the message's memory, so that accumulation copies nothing.
    """

    def __init__(self, workers: Workers, facts: EqualFacts) -> None:
        """facts: what is compared along with the gradients."""
        self._workers, self._facts = workers, facts
        self._rooms: dict[Line, dict[Kind, _Room]] = defaultdict(dict)  # by line of a backward
        self._before: dict[int, tuple[Tensor, int]] = {}
        self._had: set[int] = set()  # numbers of leaves that had a gradient before the newest backward
        self._hooked: set[int] = set()
        self.elsewhere: set[int] = set()
        """Numbers of leaves whose gradients are averaged by somebody else."""

    def begin(self) -> None:
        """A backward begins."""
        self._before = {
            number: (leaf.grad, leaf.grad._version)
            for number, leaf in self._workers.leaves.numbered()
            if leaf.grad is not None
        }
        for number, leaf in self._workers.leaves.numbered():
            hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
            if hooks and number not in self._hooked and number not in self.elsewhere:
                self._hooked.add(number)
                self._before_hooks(leaf)

    def _before_hooks(self, leaf: Tensor) -> None:
        """Hooks of the script see the mean."""
        theirs = dict(leaf._backward_hooks or {})
        if leaf._backward_hooks:
            leaf._backward_hooks.clear()
        leaf.register_hook(lambda gradient: self.mean_of(gradient))
        hooks: Any = leaf._backward_hooks
        hooks.update(theirs)

    def mean_of(self, gradient: Tensor) -> Tensor:
        """A copy. A collective."""
        return self._workers.sum_(gradient.detach().clone()) / self._workers.size

    @torch.no_grad()
    def end(self, line: Line, losses: Sequence[Tensor]) -> None:
        """It is over. A collective.

        losses: where it began; of a sum over rows the value goes along.

        Raises ManyhandsError where workers came by different lines, or what all should have alike differs.
        """
        self._workers.group.line = line.number
        changed = dict(self._changed())
        self._had, self._before = set(self._before), {}
        self._average_graphs(changed)
        rooms = self._rooms[line]
        more = [number for number, leaf in changed.items() if not self._has_room(rooms, number, leaf)]
        sums = [one for one in losses if isinstance(one, PartialSum) and not one.known and one.part.is_floating_point()]
        bits = (_MORE if more else 0) | self._facts.check_of(line) << 1
        kinds = list(dict.fromkeys([*rooms, *map(_kind, sums)])) or [(torch.float32, torch.device("cpu"))]
        found = 0
        for kind in kinds:
            carried = [one for one in sums if _kind(one) == kind]
            found |= self._exchange(rooms.setdefault(kind, _Room()), kind, changed, carried, bits)
            self._facts.compare(found >> 1, line)
        if found & _MORE:
            self._make_room(rooms, more, changed)

    def _average_graphs(self, changed: dict[int, Tensor]) -> None:
        """Of backward(create_graph=True): gradients that can be differentiated again."""
        for number, leaf in list(changed.items()):
            if leaf.grad is not None and leaf.grad.requires_grad:
                del changed[number]
                with torch.enable_grad():
                    leaf.grad = mean_of_workers(leaf.grad, self._workers)

    def _has_room(self, rooms: dict[Kind, _Room], number: int, leaf: Tensor) -> bool:
        room = rooms.get(_kind(leaf))
        return room is not None and number in room.leaves and leaf.grad is not None and not leaf.grad.is_sparse

    def _changed(self) -> Iterator[tuple[int, Tensor]]:
        """(number, leaf) of those whose `.grad` is another one than before."""
        for number, leaf in self._workers.leaves.numbered():
            before, now = self._before.get(number), leaf.grad
            if now is None or number in self._hooked or number in self.elsewhere:
                continue
            if before is None or now is not before[0] or now._version != before[1]:
                yield number, leaf

    def _make_room(self, rooms: dict[Kind, _Room], more: Sequence[int], changed: dict[int, Tensor]) -> None:
        """For gradients that came for the first time, which are averaged; leaves that are gone leave theirs."""
        leaves = dict(self._workers.leaves.numbered())
        gone = [number for room in rooms.values() for number in room.leaves if number not in leaves]
        sparse = [number for number in more if changed[number].grad.is_sparse]  # type: ignore[union-attr]
        everyone = self._workers.group.all_gather_json([list(more), gone, sparse])
        over = set(gone).intersection(*(numbers for _, numbers, _ in everyone))
        sparse = sorted({number for _, _, numbers in everyone for number in numbers})
        fresh = sorted({number for numbers, _, _ in everyone for number in numbers} - set(sparse))
        for number in sparse:
            self._average_rows(leaves[number], number in changed)
        apart: dict[Kind, _Room] = defaultdict(_Room)
        for number in fresh:
            apart[_kind(leaves[number])].leaves[number] = leaves[number].numel() * (1 + leaves[number].is_complex())
        for kind, room in apart.items():
            self._exchange(room, kind, changed, [], 0)
        for kind in {**rooms, **apart}:
            room = rooms.setdefault(kind, _Room())
            kept = {number: count for number, count in room.leaves.items() if number not in over}
            room.leaves, room.buffer = kept | apart.get(kind, _Room()).leaves, None

    def _average_rows(self, leaf: Tensor, has: bool) -> None:
        """Of a sparse gradient: its rows go to all."""
        group = self._workers.group
        own = leaf.grad.coalesce() if has and leaf.grad is not None else torch.zeros_like(leaf).to_sparse(1).coalesce()
        counts = group.all_gather_json(own.indices().shape[1])
        longest, width = max(counts), leaf[0].numel()
        indices = torch.zeros(longest * own.sparse_dim(), dtype=torch.int64, device=leaf.device)
        values = torch.zeros(longest * width, dtype=leaf.dtype, device=leaf.device)
        indices[: own.indices().numel()] = own.indices().reshape(-1)
        values[: own.values().numel()] = own.values().reshape(-1)
        all_indices, all_values = group.all_gather(indices), group.all_gather(values)
        parts = [
            torch.sparse_coo_tensor(
                all_indices[rank, : count * own.sparse_dim()].view(own.sparse_dim(), count),
                all_values[rank, : count * width].view(count, *leaf.shape[1:]) / group.size,
                leaf.shape,
            )
            for rank, count in enumerate(counts)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        leaf.grad = total.coalesce()

    def _exchange(
        self, room: _Room, kind: Kind, changed: dict[int, Tensor], sums: Sequence[PartialSum], bits: int
    ) -> int:
        """Average the gradients of these leaves; the bits of all workers."""
        leaves = dict(self._workers.leaves.numbered(list(room.leaves)))
        lengths = [*room.leaves.values(), *(one.part.numel() for one in sums)]
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        buffer = room.memory(kind, sum(lengths), self._workers, _inside(gradients, room.buffer))
        views = buffer.split(lengths)
        targets, sources, absent = [], [], []
        for i, (number, view) in enumerate(zip(room.leaves, views, strict=False)):
            gradient = changed[number].grad if number in changed else None
            if gradient is None:
                absent.append(view)
                continue
            bits |= 1 << _FIRST_LEAF + i
            if gradient.data_ptr() != view.data_ptr():
                sources.append(real_view(gradient))
                targets.append(view.view(sources[-1].shape))
        if targets:
            torch._foreach_copy_(targets, sources)
        if absent:
            torch._foreach_zero_(absent)
        carried = views[len(room.leaves) :]
        for one, view in zip(sums, carried, strict=True):
            view.copy_(one.part.detach().reshape(-1))
        found = self._workers.group.mean_(buffer, 1.0, bits).bits
        for i, (number, view) in enumerate(zip(room.leaves, views, strict=False)):
            leaf = leaves.get(number)
            if leaf is None or not found >> (_FIRST_LEAF + i) & 1:
                continue
            if leaf.grad is not None and leaf.grad.data_ptr() == view.data_ptr():
                continue
            if leaf.grad is not None and number in self._had:  # somebody may hold it
                leaf.grad.copy_(like(leaf, view))
            else:
                leaf.grad = like(leaf, view).data  # it counts its changes by itself
        for one, view in zip(sums, carried, strict=True):
            one.know(view.clone().view(one.shape) * self._workers.size)
        return found


def _kind(tensor: Tensor) -> Kind:
    return tensor.dtype.to_real(), tensor.device


def _inside(gradients: Sequence[Tensor], buffer: Tensor | None) -> int:
    """How many of these lie in the buffer."""
    if buffer is None:
        return 0
    start = buffer.data_ptr()
    return sum(start <= one.data_ptr() < start + buffer.nbytes for one in gradients if not one.is_sparse)


def _holders(buffer: Tensor) -> int:
    """How many other tensors have the buffer's memory."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2
