"""Rounds with a quorum: one outer step a round, over pushes that arrive at any time. Pure: no clock, no thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput, is_whole
from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule
from manyhands.server.rules.outer import OuterRule

LAST = 1  # bit of a push: its worker's last before all meet; what the others' last ones bring is of the same round


@dataclass(kw_only=True)
class RoundsRule(Rule):
    """-update is a pseudo-gradient; the center takes one Nesterov step a round, along the weighted mean of its pushes.

    Decoupled DiLoCo for Resilient Distributed Pre-training, Douillard et al., 2026; the outer step is that of DiLoCo:
    Distributed Low-Communication Training of Language Models, Douillard et al., 2023.

    1. A push joins the open round. Several pushes of one worker in a round add up: each goes on from the one before.
    2. A round completes when every worker that is not lost is in it, or when the store closes it to be read. It also
       completes when `quorum` workers are in it and `grace` more pushes came from workers that were in it already. A
       push with bit LAST keeps the round open until the center is read.
    3. Worker m enters with weight w(m), the sum over its pushes of weight / (1 + age). Age = rounds completed since
       this worker last saw the center, excluding rounds it contributed to.

    Every push makes a version, also one that only joins: the order of versions determines which pushes a round has. A
    lost worker's earlier pushes count, also for the quorum, which never exceeds the number of workers that are not
    lost. Memory: a sum for each worker, N·n. A snapshot has the sums of the open round.
    """

    rate: float = 0.7
    """Of the outer step."""
    momentum: float = 0.9
    """Nesterov's, applied once a round; below 1."""
    quorum: int | None = None
    """So many workers make a round; none: more than half of those that are not lost."""
    grace: int = 1
    """How long a round with its quorum waits for the others, in pushes of workers that are in it already."""
    _outer: OuterRule = field(init=False, repr=False)
    _expected: frozenset[int] = field(init=False, repr=False, default=frozenset({0}))  # workers that are not lost
    _missed: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By worker: rounds since its last look that are over without it."""
    _sums: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)  # by worker, [n]: memory that stays
    _weights: dict[int, float] = field(init=False, repr=False, default_factory=dict)  # by worker: who is in the round
    _again: int = field(init=False, repr=False, default=0)  # pushes since the quorum, of workers that were in
    _meeting: bool = field(init=False, repr=False, default=False)  # the newest push was a last one

    def __post_init__(self) -> None:
        number = isinstance(self.momentum, int | float) and not isinstance(self.momentum, bool)
        if not number or not 0 <= self.momentum < 1:
            raise BadInput(f"momentum must be a number from 0 to below 1; got {self.momentum!r}")
        self._outer = OuterRule(rate=self.rate, momentum=self.momentum, nesterov=self.momentum > 0)
        if self.quorum is not None and not is_whole(self.quorum, 1):
            raise BadInput(f"quorum must be a whole number of at least 1, or none; got {self.quorum!r}")
        if not is_whole(self.grace, 0):
            raise BadInput(f"grace must be a whole number of at least 0; got {self.grace!r}")

    @override
    def start(self, center: Tensor) -> None:
        self._outer.start(center)

    @override
    def expect(self, workers: Collection[int]) -> None:
        self._expected = frozenset(workers)

    @override
    def look(self, worker: int) -> None:
        self._missed[worker] = 0

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self._join(push)
        if self.complete:
            self.close(old, new)
        elif new is not old:
            new.copy_(old)

    @property
    @override
    def open(self) -> bool:
        return bool(self._weights)

    @property
    @override
    def complete(self) -> bool:
        everybody = self._expected.issubset(self._weights)
        return self.open and not self._meeting and (everybody or (self._has_quorum() and self._again >= self.grace))

    @property
    @override
    def ended(self) -> bool:
        return self._meeting

    @override
    def close(self, old: Tensor, new: Tensor) -> None:
        workers = sorted(self._weights)
        pushes = [Push(worker=w, update=self._sums[w], weight=self._weights[w]) for w in workers]
        self._outer.merge(old, new, pushes)
        for worker in self._missed.keys() - self._weights.keys():
            self._missed[worker] += 1
        self._weights, self._again, self._meeting = {}, 0, False

    @override
    def vectors(self) -> dict[str, Tensor]:
        return {**self._outer.vectors(), **{f"sum {worker}": self._sums[worker] for worker in sorted(self._weights)}}

    @override
    def numbers(self) -> dict[str, Any]:
        in_it = [[worker, weight] for worker, weight in sorted(self._weights.items())]
        return {**self._outer.numbers(), "in": in_it, "again": self._again, "meeting": self._meeting}

    @override
    def load(self, center: Tensor, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Everybody has looked at the center that a snapshot holds."""
        sums = {f"sum {worker}" for worker, _ in numbers["in"]}
        outer = {name: vector for name, vector in vectors.items() if name not in sums}
        self._outer.load(center, outer, numbers)
        self._weights = {int(worker): float(weight) for worker, weight in numbers["in"]}
        self._sums = {worker: vectors[f"sum {worker}"].clone() for worker in self._weights}
        self._again, self._meeting = numbers["again"], numbers["meeting"]
        self._missed = dict.fromkeys(self._missed, 0)

    @override
    def memory(self) -> dict[str, Any]:
        return {"missed": sorted(self._missed.items())}

    @override
    def recall(self, memory: dict[str, Any]) -> None:
        self._missed = dict(memory["missed"])

    def _join(self, push: Push) -> None:
        self._meeting = bool(push.bits & LAST)
        weight = push.weight / (1 + self._missed.get(push.worker, 0))
        if push.worker in self._weights:
            self._again += self._has_quorum()
            self._sums[push.worker].add_(push.update)
            self._weights[push.worker] += weight
            return
        if push.worker not in self._sums:
            self._sums[push.worker] = torch.empty_like(push.update)
        self._sums[push.worker].copy_(push.update)
        self._weights[push.worker] = weight

    def _has_quorum(self) -> bool:
        wanted = len(self._expected) // 2 + 1 if self.quorum is None else self.quorum
        return len(self._weights) >= min(wanted, len(self._expected))
