"""Which pushes become one version, and when: the contract of a merge policy, and the three that there are.

A policy holds the pushes that wait; how a version is made of them is the rule's. Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from manyhands.server.pushes import Applied, Dropped, Held, Push

Ticks = Mapping[int, int]  # finished ticks, by worker that takes part


class MergePolicy(ABC):
    """The store calls `receive` with each push, and `take_complete` after each call of any worker."""

    stale: ClassVar[bool] = True
    """Whether versions may come between a worker's pull and the merge of its push."""

    def __init__(self) -> None:
        self.held: list[Push] = []
        """The pushes that wait, in memory of the store's own. A snapshot is refused while there are any."""

    def reset(self, version: int) -> None:  # noqa: B027
        """The store stands at this version, and nobody has pushed: it is new, or was restored."""

    def begin(self, worker: int, version: int) -> None:  # noqa: B027
        """This worker begins anew, at this version."""

    def image(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What it remembers besides `held`: vectors [n] by name, and numbers (JSON)."""
        return {}, {}

    def take_image(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what `image` gave."""

    @abstractmethod
    def receive(self, push: Push, version: int, tick: int) -> Held | Dropped | None:
        """A push, while the store is at `version` and its worker has finished `tick` ticks.

        None: it becomes a version by itself, now. Held: it joined `held`.
        """

    @abstractmethod
    def take_complete(self, ticks: Ticks, version: int) -> list[Push]:
        """Take out of `held` what becomes one version now, in the order in which it is answered; [] if nothing does."""

    def makes_version(self, pushes: Sequence[Push]) -> bool:
        """Whether these become a version: if any of them counts."""
        return any(push.weight for push in pushes)

    def may_come(self, push: int, weight: float, version: int, into: int | None) -> bool:
        """In a replay: whether a push may come while the store is at `version`, to be merged as it was.

        push: its number among its worker's, from 0. into: the version that it was merged into; None: it was dropped.
        """
        return into is None or not weight or version < into

    def replies(self, pushes: Sequence[Push], version: int) -> list[Applied]:
        """What each of the pushes gets, which the rule has merged into `version`: its own answer."""
        return [
            Applied(version, push.staleness)
            if push.answer is None
            else Applied(version, push.staleness, push.answer, push.weight, push.bits)
            for push in pushes
        ]


class ImmediateMerge(MergePolicy):
    """Each push is a version of its own, in the order in which they come."""

    @override
    def receive(self, push: Push, version: int, tick: int) -> None:
        return None

    @override
    def take_complete(self, ticks: Ticks, version: int) -> list[Push]:
        return []

    @override
    def may_come(self, push: int, weight: float, version: int, into: int | None) -> bool:
        return into is None or not weight or version == into - 1


class TickMerge(MergePolicy):
    """The pushes of a tick are one version, in rank order: the workers' speeds cannot be seen.

    A tick is complete when all who take part have finished it, or, with a rule that answers, have pushed in it. For
    that, all who are to be in step must have begun before the first of them pushes: they meet in between.
    """

    stale: ClassVar[bool] = False

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self._answers = answers
        self._tick = 0  # that `held` belongs to

    @override
    def image(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"tick": self._tick}

    @override
    def take_image(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self._tick = numbers["tick"]

    @override
    def receive(self, push: Push, version: int, tick: int) -> Held:
        self._tick = tick
        self.held.append(push)
        return Held(version + 1 if push.weight else version, push.staleness)

    @override
    def take_complete(self, ticks: Ticks, version: int) -> list[Push]:
        pushed = {push.worker for push in self.held} if self._answers else set()
        if not self.held or not all(done > self._tick or worker in pushed for worker, done in ticks.items()):
            return []
        pushes, self.held = sorted(self.held, key=lambda push: push.worker), []
        return pushes


class QuorumMerge(MergePolicy):
    """The k-th pushes of all workers are a step; the first `needed` of them that count make it, and all get its answer.

    Revisiting Distributed Synchronous SGD, Chen, Monga, Bengio, Jozefowicz, 2016: of N workers, N - backups are waited
    for. A push that comes later is dropped, and gets the step's answer too. Every step is a version.
    """

    stale: ClassVar[bool] = False

    def __init__(self, workers: int, needed: int) -> None:
        super().__init__()
        self._needed = needed
        self._at = [0] * workers  # the step that a worker's next push belongs to
        self._decided: dict[int, Applied] = {}  # by step, what it gave everybody, until all have had it

    @override
    def reset(self, version: int) -> None:
        self._at, self._decided = [version] * len(self._at), {}

    @override
    def image(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        answers = {str(step): one.answer for step, one in self._decided.items() if one.answer is not None}
        decided = [[step, one.version, one.weight, one.bits] for step, one in self._decided.items()]
        return answers, {"at": self._at, "decided": decided}

    @override
    def take_image(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self._at = list(numbers["at"])
        self._decided = {
            step: Applied(version, 0, vectors.get(str(step)), weight, bits)
            for step, version, weight, bits in numbers["decided"]
        }

    @override
    def begin(self, worker: int, version: int) -> None:
        self._at[worker] = version

    @override
    def receive(self, push: Push, version: int, tick: int) -> Held | Dropped:
        decided = self._decided.get(self._at[push.worker])
        self._at[push.worker] += 1
        if decided is not None:
            behind = version - decided.version
            return Dropped(decided.version, decided.answer, decided.weight, decided.bits, behind)
        push.staleness = 0  # its gradient is of the parameters that this step's others have
        self.held.append(push)
        return Held()

    @override
    def take_complete(self, ticks: Ticks, version: int) -> list[Push]:
        first = min((self._at[worker] for worker in ticks), default=None)
        self._decided = {s: d for s, d in self._decided.items() if first is not None and s >= first}
        live = sum(1 for push in self.held if push.weight)
        if not self.held or not (live >= self._needed or all(self._at[worker] > version for worker in ticks)):
            return []
        pushes, self.held = self.held, []
        return pushes

    @override
    def makes_version(self, pushes: Sequence[Push]) -> bool:
        return True

    @override
    def may_come(self, push: int, weight: float, version: int, into: int | None) -> bool:
        return into is not None or version > push  # what came late comes late again

    @override
    def replies(self, pushes: Sequence[Push], version: int) -> list[Applied]:
        live = sorted((push for push in pushes if push.weight), key=lambda push: push.worker)
        bits = 0
        for push in pushes:
            bits |= push.bits
        decided = Applied(version, 0, live[0].answer if live else None, sum(push.weight for push in live), bits)
        self._decided[version - 1] = decided
        return [decided] * len(pushes)
