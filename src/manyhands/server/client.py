"""How a strategy reaches the server: `worker.server`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The server that a strategy wants, as plain data. Its first center is the first worker's parameters."""

    rule: str  # how a push is merged: add | elastic | adagrad | quorum | …
    bound: int | None = None  # stale-synchronous parallel's bound; None: fully asynchronous
    options: dict[str, Any] = field(default_factory=dict)  # the rule's own


@dataclass(frozen=True, slots=True)
class Pulled:
    """A consistent copy of the center, and the version it had."""

    version: int
    center: Tensor  # [D'], read only


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the server says to a push; the last three fields are set by rules that give every worker the mean (quorum)."""

    applied: bool
    mean: Tensor | None = None  # [D']
    weight: float = 0.0
    bits: int = 0


class Server(ABC):
    """A worker's view of the shared parameters; sequence numbers and versions live behind it."""

    @abstractmethod
    def initialize(self, center: Tensor) -> None:
        """Offer the first center [D']; the first offer wins."""

    @abstractmethod
    def pull(self) -> Pulled:
        """The current center, once the gate of `bound` lets this worker have it."""

    @abstractmethod
    def push(self, update: Tensor, weight: float = 1.0, bits: int = 0) -> Pushed:
        """Give an update [D'] to the server's rule; applied exactly once. Finishes one tick of this worker's clock."""
