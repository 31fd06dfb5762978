"""Workers that are threads of one process: the naive group, whose every operation swaps whole tensors."""

from __future__ import annotations

import json
import queue
import threading
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import Done, Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox

DEADLINE_S = 20.0


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }

    def swap(self, rank: int, value: Any, operation: str = "") -> list[Any]:
        """Everybody's value, in rank order; BrokenBarrierError where another rank came for another operation."""
        self.slots[rank] = (operation, value)
        self.barrier.wait(DEADLINE_S)
        values = list(self.slots)
        self.barrier.wait(DEADLINE_S)
        operations = [name for name, _ in values]
        if len(set(operations)) > 1:
            raise threading.BrokenBarrierError(f"ranks called different operations: {', '.join(operations)}")
        return [value for _, value in values]


class ThreadGroup(Group):
    """The naive group: every operation exchanges whole tensors. The reference for the fast groups."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.ledger = meeting, rank, meeting.size, Ledger()

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        parts = self.meeting.swap(self.rank, (tensor.clone(), weight, bits), "start_mean_")
        total = MeanResult(float(sum(w for _, w, _ in parts)), reduce(or_, (b for _, _, b in parts)))
        if lost is not None:
            lost.zero_()
        if total.weight and self.size > 1:
            start = torch.zeros_like(tensor if lost is None else lost)
            mean = sum((t.to(start.dtype) * (w / total.weight) for t, w, _ in parts if w), start=start)
            tensor.copy_(mean)
            if lost is not None and self.rank == 0:
                lost.copy_(mean - tensor)
        return Done(total)

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        tensor.copy_(sum(self.meeting.swap(self.rank, tensor.clone(), "all_reduce_"), start=torch.zeros_like(tensor)))

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        rows: list[Tensor] = self.meeting.swap(self.rank, tensor.clone(), "all_gather")
        return torch.stack(rows)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        n = tensor.numel()
        rows: list[Tensor] = self.meeting.swap(self.rank, tensor.clone(), "reduce_scatter")
        return torch.stack(rows).sum(0)[self.rank * n // self.size : (self.rank + 1) * n // self.size]

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.meeting.swap(self.rank, tensor.detach().clone(), "broadcast_")[source])

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        self.meeting.mail[self.rank, target].put(tensor.clone())

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.meeting.mail[source, self.rank].get(timeout=DEADLINE_S))

    @override
    def barrier(self) -> None:
        self.meeting.swap(self.rank, None, "barrier")

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        return self.meeting.swap(self.rank, json.loads(json.dumps(value)), "all_gather_json")

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        shared: Tensor = self.meeting.swap(self.rank, tensor, "share")[owner]
        return shared

    @override
    def open_mailbox(self, longest: int) -> ThreadMailbox:
        boxes = {(a, b): queue.SimpleQueue[Tensor]() for a in range(self.size) for b in range(self.size)}
        return ThreadMailbox(self, self.meeting.swap(self.rank, boxes, "open_mailbox")[0])

    @override
    def close(self) -> None:
        pass


class ThreadMailbox(Mailbox):
    """boxes: by (source, target), the same for all."""

    def __init__(self, group: ThreadGroup, boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        super().__init__(group)
        self._boxes = boxes

    @override
    def _send(self, payload: Tensor) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._boxes[self.rank, peer].put(payload.clone())

    @override
    def _collect(self) -> None:
        for peer in range(self.size):
            while not (box := self._boxes[peer, self.rank]).empty():
                self._inbox[peer].append(box.get())

    @override
    def _wait_for(self, peer: int, count: int) -> float:
        while len(self._inbox[peer]) < count:
            self._inbox[peer].append(self._boxes[peer, self.rank].get(timeout=DEADLINE_S))
        return 0.0
