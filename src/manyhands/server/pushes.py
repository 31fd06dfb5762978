"""A push as a shard sees it, and what its worker gets for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Push:
    """What a rule sees of a push. Where a merge has several, each `update` is the rule's to overwrite."""

    worker: int
    update: Tensor  # [n]
    weight: float
    generation: int = 0
    bits: int = 0
    staleness: int = 0  # versions that others made since this worker's pull
    pulled: Tensor | None = None  # [n] the center that it pulled, for rules that `keep_pulled`
    answer: Tensor | None = None  # [n] set by rules that answer


@dataclass(frozen=True, slots=True)
class Applied:
    """The push is in the center (or counted for nothing, with weight 0)."""

    version: int  # that it made, or that its round made
    staleness: int  # versions that others made between this worker's pull and now
    answer: Tensor | None = None  # [n] this worker's until its next push
    weight: float = 0.0
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The push waits for others: its answer will be in `Store.released`, or nothing follows (rules without answers)."""

    version: int = 0  # at bound 0: that its round will make
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """It came too late for its step; the answer is what that step gave everybody."""

    version: int  # that its step made
    answer: Tensor | None = None
    weight: float = 0.0
    bits: int = 0
    behind: int = 0  # steps decided since: so many means this worker has yet to fetch
