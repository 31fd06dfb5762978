"""Rule `distance`: updates damped by how far the center has moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule, check_positive


@dataclass(kw_only=True)
class DistanceRule(Rule):
    """Per weight, center += update / ((center - pulled)² / rate + 1): what moved far since the worker's pull moves
    less.

    On Scalable Deep Learning and Parallelizing Gradient Descent, Hermans, 2017, chapter "Asynchronous Distributed
    Adaptive Gradients", in the form that spares the network: the server keeps a copy of the center that each worker
    pulled, N·D of memory. The distance is taken weight by weight, as the author's dist-keras does. Who never pulled has
    no distance.
    """

    rate: float
    """The workers' learning rate: a center that moved by sqrt(rate) halves an update. Larger damps less."""
    keeps_pulled: ClassVar[bool] = True
    adds_steps: ClassVar[bool] = True
    _scratch: Tensor = field(init=False, repr=False)  # [n]

    def __post_init__(self) -> None:
        check_positive("rate", self.rate)

    @override
    def start(self, center: Tensor) -> None:
        self._scratch = torch.empty_like(center)

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            pulled = old if push.pulled is None else push.pulled
            scale = torch.sub(old, pulled, out=self._scratch).square_().div_(self.rate).add_(1)
            torch.addcdiv(old, push.update, scale, out=new)
            old = new
