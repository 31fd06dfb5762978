"""Gossip in pairs at a server: every worker's parameters lie here, and an exchange averages two of them at once."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput, is_whole
from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule


@dataclass(kw_only=True)
class PairsRule(Rule):
    """A push of worker i carries what its steps moved: i and a partner j become their mean, then i moves; i is the
    answer.

    Asynchronous Decentralized Parallel Stochastic Gradient Descent, Lian, Zhang, Zhang, Liu, 2018 (AD-PSGD).

    1. j is drawn from all other workers, by `seed`, i, and how many pushes i made: the same on all shards.
    2. x_j ← (x_i + x_j) / 2, and x_i ← the same + update. Nothing comes between: a store takes one call at a time.
    3. The answer is x_i. What others do to x_i from then on, worker i finds at its next push.

    The center is the mean of all N vectors, kept up by update / N at each push. A worker that has not begun stands at
    the first center; one that is inactive or lost stays in the mean, and a partner: what it learned is not lost, and
    those that go on draw it along. Each counts the same, whatever its pushes weigh. The pushes of one round come one
    after the other, in rank order.

    Memory: 2·N·n, each worker's vector and its last answer.
    """

    seed: int = 0
    """Of the draw; another one to see how much a result depends on who met whom."""
    answers: ClassVar[bool] = True
    _workers: int = field(init=False, repr=False, default=1)
    _vectors: list[Tensor] = field(init=False, repr=False, default_factory=list)  # by worker, [n]
    _answers: list[Tensor] = field(init=False, repr=False, default_factory=list)  # by worker, [n]
    _pushes: list[int] = field(init=False, repr=False, default_factory=list)  # by worker: how many it made

    def __post_init__(self) -> None:
        if not is_whole(self.seed, 0):
            raise BadInput(f"seed must be a whole number of at least 0; got {self.seed!r}")

    @override
    def expect(self, workers: Collection[int]) -> None:
        self._workers = max(self._workers, len(workers))  # at first all; those that are lost later stay

    @override
    def start(self, center: Tensor) -> None:
        self._vectors, self._answers = ([center.clone() for _ in range(self._workers)] for _ in range(2))
        self._pushes = [0] * self._workers

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            mine = self._vectors[push.worker]
            partner = partner_of(push.worker, self._workers, self.seed, self._pushes[push.worker])
            self._pushes[push.worker] += 1
            if partner != push.worker:
                theirs = self._vectors[partner]
                theirs.copy_(mine.add_(theirs).div_(2))
            mine.add_(push.update)
            push.answer = self._answers[push.worker].copy_(mine)
            torch.add(old, push.update, alpha=1 / self._workers, out=new)
            old = new

    @override
    def vectors(self) -> dict[str, Tensor]:
        return {f"worker {worker}": vector for worker, vector in enumerate(self._vectors)}

    @override
    def numbers(self) -> dict[str, Any]:
        return {"pushes": list(self._pushes)}

    @override
    def load(self, center: Tensor, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """With another number of workers than wrote it, all begin at the center."""
        self.start(center)
        if len(numbers["pushes"]) == self._workers:
            self._pushes = list(numbers["pushes"])
            for name, vector in self.vectors().items():
                vector.copy_(vectors[name])


def partner_of(worker: int, workers: int, seed: int, pushes: int) -> int:
    """Another of `workers` ranks, each as likely, for the push after so many; itself where it is alone."""
    if workers == 1:
        return worker
    other = random.Random(f"{seed} {worker} {pushes}").randrange(workers - 1)
    return other + (other >= worker)
