"""Rule `adagrad`: Adagrad on the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule, check_positive


@dataclass(kw_only=True)
class AdagradRule(Rule):
    """A push carries an accumulated gradient g: sum += g²; center -= rate·g / (sqrt(sum) + eps).

    Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, Duchi, Hazan, Singer, 2011; on a
    server: Large Scale Distributed Deep Networks, Dean et al., 2012.
    """

    rate: float = 0.01
    """The length of the first step, per weight; later ones shrink by themselves."""
    eps: float = 1e-10
    """Keeps a weight whose gradients were all 0 where it is; larger where the first steps are too wild."""
    _sum: Tensor = field(init=False, repr=False)  # [n]
    _scratch: Tensor = field(init=False, repr=False)  # [n]

    def __post_init__(self) -> None:
        check_positive("rate", self.rate)
        check_positive("eps", self.eps)

    @override
    def start(self, center: Tensor) -> None:
        self._sum, self._scratch = torch.zeros_like(center), torch.empty_like(center)

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self._sum.addcmul_(push.update, push.update)
            length = torch.sqrt(self._sum, out=self._scratch).add_(self.eps)
            torch.addcdiv(old, push.update, length, value=-self.rate, out=new)
            old = new

    @override
    def vectors(self) -> dict[str, Tensor]:
        return {"sum": self._sum}
