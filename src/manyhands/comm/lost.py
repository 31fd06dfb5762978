"""The group of members of whom one is lost: whoever calls it notices."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import Work
from manyhands.comm.solo import SoloGroup
from manyhands.errors import PeerLost


class LostGroup(SoloGroup):
    """Rank `rank` of `size`. Every collective raises PeerLost; memory and counts are this worker's own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def _lose(self, operation: str) -> NoReturn:
        raise PeerLost(-1, "", operation, self.step, 0.0)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        self._lose("mean_")

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        self._lose("all_reduce_")

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        self._lose("all_gather")

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._lose("reduce_scatter")

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        self._lose("broadcast_")

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        self._lose("send")

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        self._lose("receive_")

    @override
    def barrier(self) -> None:
        self._lose("barrier")

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        self._lose("all_gather_json")

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        self._lose("share")
