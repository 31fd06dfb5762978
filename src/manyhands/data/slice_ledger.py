"""Which slices each worker was to train since the last round, and who trains those of a worker that is lost. Pure.

Where replicas differ between rounds, what a lost worker has trained since the last one is in nobody's update. Its
slices are dealt to those who are left, who train them before they close the round. All members keep the same ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A slice of an epoch: part `part` of `parts` of global batch `tick`."""

    tick: int
    part: int
    parts: int


class Carried(NamedTuple):
    """What the server has of a lost worker: all of its slices before global batch `until`, and so many of those that were
    dealt to it."""

    until: int
    dealt: int


@dataclass(frozen=True, kw_only=True)
class SliceLedger:
    """From global batch `first` of an epoch on, each member trains the slice of its rank, and what was dealt to it."""

    round: int  # rounds that were completed before
    epoch: int
    first: int
    members: tuple[int, ...]  # worker ids, by rank; -1: lost
    until: int | None = None  # the global batch before which a loss has ended it
    dealt: dict[int, tuple[Place, ...]] = field(default_factory=dict)  # by worker id
    losses: int = 0  # how often slices were dealt
    pushed: dict[int, int] = field(default_factory=dict)
    """With a server, by worker id: pushes that each had made when slices were last dealt."""

    @property
    def age(self) -> tuple[int, int, int]:
        """Of the ledgers that members have, the one with the greatest is the newest."""
        return self.epoch, self.round, self.losses

    def slices(self, worker_id: int, until: int) -> list[Place]:
        """What a worker is to train of global batches before `until`, besides all that was dealt to it."""
        own: list[Place] = []
        if worker_id in self.members:
            rank, size = self.members.index(worker_id), len(self.members)
            own = [Place(tick, rank, size) for tick in range(self.first, until)]
        return [*own, *self.dealt.get(worker_id, ())]

    def lost(self, survivors: Sequence[int]) -> list[int]:
        """Who was to train something, and is none of these."""
        return sorted({*self.members, *self.dealt} - {-1, *survivors})

    def reassign(
        self, until: int, survivors: Sequence[int], at_server: Mapping[int, Carried] | None = None
    ) -> tuple[SliceLedger, list[Place]]:
        """All others are lost: (the ledger in which their slices are dealt to the survivors, these slices).

        The first loss ends the window before global batch `until`; later ones leave that as it is.
        at_server: what a server has of each of them; their windows may then have begun before this one.
        """
        until = until if self.until is None else self.until
        lost = self.lost(survivors)
        orphaned = []
        for worker_id in lost:
            carried = Carried(self.first, 0) if at_server is None else at_server[worker_id]
            window = replace(
                self, first=carried.until, dealt={worker_id: self.dealt.get(worker_id, ())[carried.dealt :]}
            )
            orphaned += window.slices(worker_id, until)
        orphaned.sort()
        dealt = {worker_id: list(self.dealt.get(worker_id, ())) for worker_id in survivors}
        for place in orphaned:  # to whoever has fewest, so that all are done at about the same time
            dealt[min(survivors, key=lambda worker_id: len(dealt[worker_id]))].append(place)
        ledger = replace(
            self,
            until=until,
            members=tuple(-1 if worker_id in lost else worker_id for worker_id in self.members),
            dealt={worker_id: tuple(places) for worker_id, places in dealt.items()},
            losses=self.losses + 1,
        )
        return ledger, orphaned

    def as_json(self) -> dict[str, Any]:
        dealt = [[worker_id, *places] for worker_id, places in self.dealt.items()]
        return {**vars(self), "dealt": dealt, "pushed": [*self.pushed.items()]}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> SliceLedger:
        dealt = {worker_id: tuple(Place(*place) for place in places) for worker_id, *places in values["dealt"]}
        made = {"members": tuple(values["members"]), "dealt": dealt, "pushed": dict(values["pushed"])}
        return cls(**{**values, **made})
