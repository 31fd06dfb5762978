"""The group of one worker: every collective is the identity."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import check_mean, check_rank, check_sum, json_bytes
from manyhands.comm.group import Done, Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import SoloMailbox
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.comm.shared_memory.memory import Arena


class SoloGroup(Group):
    """One worker. Nothing is copied, multiplied or counted; values that come back are fresh, as in any group."""

    def __init__(self, arena: Arena | None = None) -> None:
        """arena: where to allocate, for a worker that will join a group which works on that memory."""
        self.rank, self.size, self.ledger = 0, 1, Ledger()
        self._arena = arena

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype) if self._arena is None else self._arena.allocate(n, dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        if lost is not None:
            lost.zero_()
        return Done(MeanResult(float(weight), bits))

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        check_sum(tensor)
        return tensor.detach().reshape(-1).clone()

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        raise BadInput("a group of one worker has nobody to send to: use more workers")

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        raise BadInput("a group of one worker has nobody to receive from: use more workers")

    @override
    def barrier(self) -> None:
        pass

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        return [json.loads(json_bytes(value))]

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        check_rank(owner, self.size, "owner")
        return tensor

    @override
    def open_mailbox(self, longest: int) -> SoloMailbox:
        return SoloMailbox(self)

    @override
    def close(self) -> None:
        pass
