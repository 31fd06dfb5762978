"""Steps that a quorum decides: the k-th pushes of all workers meet, the first of them count, all get the same mean.

Revisiting Distributed Synchronous SGD, Chen, Monga, Bengio, Jozefowicz, 2016: of N workers, N - backups are waited for.
Pure: no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.server.rules.base import Push


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step gave everybody. Without any weight there is no mean."""

    version: int  # that the step made: steps decided so far
    mean: Tensor | None  # [n]
    weight: float
    bits: int


class Steps:
    """Which step each worker is at, the pushes of the open one, and the answers that somebody has not had yet."""

    def __init__(self, workers: int) -> None:
        self.at = [0] * workers  # the step that a worker's next push belongs to
        self.pushes: list[Push] = []  # of the open step, in the order in which they came
        self._decided: dict[int, Decided] = {}

    def missed(self, worker: int) -> Decided | None:
        """The answer of the worker's step if that is decided already, and the worker goes on to its next step."""
        decided = self._decided.get(self.at[worker])
        if decided is not None:
            self.at[worker] += 1
        return decided

    def join(self, push: Push) -> None:
        """A push for the open step."""
        self.pushes.append(push)
        self.at[push.worker] += 1

    def is_complete(self, needed: int, step: int, active: Sequence[int]) -> bool:
        """Whether `needed` pushes of positive weight are here, or all that can come to `step`, the open one."""
        live = sum(1 for push in self.pushes if push.weight)
        return bool(self.pushes) and (live >= needed or all(self.at[worker] > step for worker in active))

    def decide(self, step: int, decided: Decided) -> list[Push]:
        """The open step is decided; its pushes, which now get the answer."""
        pushes, self.pushes = self.pushes, []
        self._decided[step] = decided
        return pushes

    def forget(self, active: Sequence[int]) -> None:
        """Drop the answers that all who take part have had."""
        first = min((self.at[worker] for worker in active), default=None)
        self._decided = {s: d for s, d in self._decided.items() if first is not None and s >= first}
