"""Rule `elastic`: elastic averaging (EASGD)."""

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
class ElasticRule(Rule):
    """A push of weight w carries the worker's parameters x: difference = alpha·w·(x - center); center += difference,
    which is the answer.

    Deep Learning with Elastic Averaging SGD, Zhang, Choromanska, LeCun, 2015. Pushes of one round are all compared with
    the same old center, then added in rank order (the paper's synchronous form).
    """

    alpha: float = 1.0
    """Times a push's weight: how strongly worker and center attract each other. With N workers in a round, who subtract
    their answers, their mean and the center come closer below alpha = 2/(N + 1), and drift ever further apart above."""
    answers: ClassVar[bool] = True
    _answers: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)  # by worker, [n]

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            if push.worker not in self._answers:
                self._answers[push.worker] = torch.empty_like(old)
            push.answer = torch.sub(push.update, old, out=self._answers[push.worker]).mul_(self.alpha * push.weight)
        for push in pushes:
            assert push.answer is not None
            torch.add(old, push.answer, out=new)
            old = new
