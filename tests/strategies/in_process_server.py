"""A parameter server in this process, without gate or shards: enough to write server strategies against the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from manyhands.server.client import Pulled, Pushed, Server

Rule = Callable[[Tensor, Tensor, int], None]  # (center, update, staleness), in place


class InProcessServer(Server):
    def __init__(self, rule: Rule, quorum: int = 0) -> None:
        self.rule, self.quorum = rule, quorum
        self.center: Tensor | None = None
        self.version, self.pulled = 0, 0
        self.condition = threading.Condition()
        self.held: list[tuple[Tensor, float, int]] = []
        self.mean = Pushed(applied=False)

    def initialize(self, center: Tensor) -> None:
        with self.condition:
            if self.center is None:
                self.center = center.clone()

    def pull(self) -> Pulled:
        assert self.center is not None
        with self.condition:
            self.pulled = self.version
            return Pulled(self.version, self.center.clone())

    def push(self, update: Tensor, weight: float = 1.0, bits: int = 0) -> Pushed:
        assert self.center is not None
        with self.condition:
            if self.quorum:
                return self._gather(update, weight, bits)
            self.rule(self.center, update, self.version - self.pulled)
            self.version += 1
            return Pushed(applied=True)

    def _gather(self, update: Tensor, weight: float, bits: int) -> Pushed:
        self.held.append((update.clone(), weight, bits))
        if len(self.held) == self.quorum:
            total = sum(w for _, w, _ in self.held)
            mean = sum((u * (w / total) for u, w, _ in self.held if w), start=torch.zeros_like(update))
            self.mean = Pushed(applied=True, mean=mean, weight=total, bits=self._bits())
            self.held, self.version = [], self.version + 1
            self.condition.notify_all()
        else:
            round_ = self.version
            assert self.condition.wait_for(lambda: self.version > round_, timeout=20)
        return self.mean

    def _bits(self) -> int:
        bits = 0
        for _, _, b in self.held:
            bits |= b
        return bits
