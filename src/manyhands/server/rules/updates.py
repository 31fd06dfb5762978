"""The rules by which a server merges: one class each, its options as fields, its source cited beside it.

Accumulated gradient normalisation (`agn`) has no rule of its own: the worker divides by its window before it pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput, UnknownName, is_whole
from manyhands.server.base import ServerSpec
from manyhands.server.rules.base import Push, Rule, check_positive, weighted_mean
from manyhands.server.rules.outer import OuterRule
from manyhands.server.rules.pairs import PairsRule
from manyhands.server.rules.rounds import RoundsRule


@dataclass(kw_only=True)
class AddRule(Rule):
    """center += update. Large Scale Distributed Deep Networks, Dean et al., 2012 (Downpour)."""

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            torch.add(old, push.update, out=new)
            old = new


@dataclass(kw_only=True)
class StalenessRule(Rule):
    """center += update / (staleness + 1). Heterogeneity-aware Distributed Parameter Servers, Jiang et al., 2017."""

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            torch.add(old, push.update, alpha=1 / (push.staleness + 1), out=new)
            old = new


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


@dataclass(kw_only=True)
class QuorumRule(Rule):
    """A push carries a gradient; the first `workers - backups` of a step make the weighted mean, which is everybody's
    answer.

    Revisiting Distributed Synchronous SGD, Chen, Monga, Bengio, Jozefowicz, 2016. The center stays: every worker
    applies the mean with an optimizer of its own. Which pushes are of one step, and which come late, is decided in
    steps.py.
    """

    backups: int = 0
    """So many of the workers a step does not wait for; a worker that is lost is one of them."""
    answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_whole(self.backups, 0):
            raise BadInput(f"backups is a whole number of at least 0; got {self.backups!r}")

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        mean = weighted_mean(pushes)
        for push in pushes:
            push.answer = mean


RULES: dict[str, type[Rule]] = {
    "add": AddRule,
    "staleness": StalenessRule,
    "distance": DistanceRule,
    "elastic": ElasticRule,
    "adagrad": AdagradRule,
    "outer": OuterRule,
    "pairs": PairsRule,
    "rounds": RoundsRule,
    "quorum": QuorumRule,
}
"""All rules by name."""


def make_rule(spec: ServerSpec) -> Rule:
    """The rule that a spec names, with its options; UnknownName where there is no such rule or option."""
    kind = RULES.get(spec.rule)
    if kind is None:
        raise UnknownName(f"no rule {spec.rule!r}: the rules of a server are {', '.join(RULES)}")
    names = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]  # every rule is a dataclass
    for name in spec.options:
        if name not in names:
            raise UnknownName(f"rule {spec.rule!r} has no option {name!r}: it has {', '.join(names) or 'none'}")
    return kind(**spec.options)
