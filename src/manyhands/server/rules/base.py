"""The contract of a rule: how a server merges pushes into the center.

A rule works on one shard [n] and out of place: `merge` reads the old center and writes the next into `new`, which may
be the old one itself where nobody reads it meanwhile. All pushes of a merge become one version; they come in rank
order, and none has weight 0. What a rule must remember (momentum, sums) are its `vectors` [n] and `numbers`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.errors import BadInput
from manyhands.server.merging import ImmediateMerge, MergePolicy, TickMerge
from manyhands.server.pushes import Push


class Rule(ABC):
    """See the module's docstring."""

    answers: ClassVar[bool] = False  # every push gets a vector back
    keeps_pulled: ClassVar[bool] = False  # the store keeps a copy of the center each worker pulled: N·D of memory
    moves_center: ClassVar[bool] = True  # False: what a merge gives back is all
    adds_steps: ClassVar[bool] = False  # a push moves the center by what its worker's own steps moved
    divides_by_staleness: ClassVar[bool] = False  # and the less, the later it is

    def policy(self, workers: int, bound: int | None) -> MergePolicy:
        """Which pushes become one version, and when: those of a tick at bound 0, else each by itself."""
        return TickMerge(self.answers) if bound == 0 else ImmediateMerge()

    def start(self, center: Tensor) -> None:  # noqa: B027
        """The first center is here; take what memory the rule needs."""

    def expect(self, workers: Collection[int]) -> None:  # noqa: B027
        """These ranks are not lost; called before the first push, and whenever it changes."""

    def look(self, worker: int) -> None:  # noqa: B027
        """This worker has the center as it is now: it pulled it."""

    @abstractmethod
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        """Write the next version into `new`, from `old` and at least one push; set answers where the rule answers."""

    @property
    def open(self) -> bool:
        """Whether pushes that were merged wait for more before they move the center."""
        return False

    @property
    def complete(self) -> bool:
        """Whether they wait for nobody any longer, since workers were lost: `close` follows."""
        return False

    @property
    def ended(self) -> bool:
        """Whether all had their last push before a meeting: `close` follows when the center is next read."""
        return False

    def close(self, old: Tensor, new: Tensor) -> None:  # noqa: B027
        """Write what they come to into `new`: they are `complete`, or somebody reads the center after they `ended`, or
        while nobody takes part."""

    def vectors(self) -> dict[str, Tensor]:
        """What the rule remembers, by name, each [n]."""
        return {}

    def numbers(self) -> dict[str, Any]:
        """What else it remembers, as JSON; the same on all shards."""
        return {}

    def memory(self) -> dict[str, Any]:
        """What else it remembers that belongs to a launch, and no checkpoint has, as JSON; for a copy of the shard."""
        return {}

    def recall(self, memory: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what `memory` gave, after `load`."""

    def load(self, center: Tensor, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from what `vectors` and `numbers` gave; `center` [n] is the one that goes with them."""
        self.start(center)
        for name, vector in self.vectors().items():
            vector.copy_(vectors[name])


def weighted_mean(pushes: Sequence[Push]) -> Tensor:
    """[n] sum of update·(weight/total) in rank order, as `naive_mean`; in the first push's memory where that can be.

    One push is not multiplied; 16-bit numbers are added up in float32.
    """
    mean = pushes[0].update
    if len(pushes) == 1:
        return mean
    total = sum(push.weight for push in pushes)
    wide = mean.float() if mean.dtype in (torch.bfloat16, torch.float16) else mean
    wide.mul_(pushes[0].weight / total)
    for push in pushes[1:]:
        share = push.update.to(wide.dtype)
        wide.add_(share.mul_(push.weight / total))
    return mean if wide is mean else mean.copy_(wide)


def check_positive(name: str, value: object) -> None:
    """BadInput unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(f"{name} must be a finite number above 0; got {value!r}")
