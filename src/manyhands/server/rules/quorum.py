"""Rule `quorum`: synchronous SGD with backup workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput, is_whole
from manyhands.server.merging import MergePolicy, QuorumMerge
from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule, weighted_mean


@dataclass(kw_only=True)
class QuorumRule(Rule):
    """A push carries a gradient; the first `workers - backups` of a step make the weighted mean, which is everybody's
    answer.

    Revisiting Distributed Synchronous SGD, Chen, Monga, Bengio, Jozefowicz, 2016. The center stays: every worker
    applies the mean with an optimizer of its own. Which pushes are of one step, and which come late, is the policy's
    (`manyhands.server.merging.QuorumMerge`).
    """

    backups: int = 0
    """So many of the workers a step does not wait for; a worker that is lost is one of them."""
    answers: ClassVar[bool] = True
    moves_center: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not is_whole(self.backups, 0):
            raise BadInput(f"backups must be a whole number of at least 0; got {self.backups!r}")

    @override
    def policy(self, workers: int, bound: int | None) -> MergePolicy:
        return QuorumMerge(workers, needed=max(1, workers - self.backups))

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        mean = weighted_mean(pushes)
        for push in pushes:
            push.answer = mean
