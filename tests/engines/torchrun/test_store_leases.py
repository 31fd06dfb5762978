"""Leases at the launcher's store: each slice once, whoever else writes meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.engines.torchrun.store_leases import StoreLeases
from manyhands.errors import ManyhandsError


def segment(**fields: Any) -> Segment:
    return Segment(**({"epoch": 0, "first": 0, "until": 7, "parts": 3, "size": 3} | fields))


def all_of(leases: StoreLeases, replica: int, stretch: Segment) -> tuple[list[tuple[int, int]], End]:
    taken = []
    while isinstance(answer := leases.take(replica, stretch), Lease):
        taken.append((answer.index, answer.part))
    return taken, answer


class Interrupted:
    """A store of which another worker takes a slice between a read and the write that follows."""

    def __init__(self, store: HashStore, other: Callable[[], object]) -> None:
        self._store, self._other, self.interrupted = store, other, 0

    def compare_set(self, key: str, before: str, after: str) -> bytes:
        if after != "{}" and self.interrupted < 5:
            self.interrupted += 1
            self._other()
        return self._store.compare_set(key, before, after)


def test_two_who_reach_for_the_same_slice_get_different_ones() -> None:
    """Both take from the back of the third one's queue, and would write the same state."""
    store, stretch = HashStore(), segment(until=9)
    leases = [StoreLeases(store, 5.0) for _ in range(2)]
    for replica in (0, 1):
        for _ in range(9):
            leases[replica].take(replica, stretch)
    others: list[Lease | End] = []
    between = Interrupted(store, lambda: others.append(leases[1].take(1, stretch)))
    own, _ = all_of(StoreLeases(between, 5.0), 0, stretch)  # type: ignore[arg-type]
    assert between.interrupted == 5
    stolen = own + [(one.index, one.part) for one in others if isinstance(one, Lease)]
    assert sorted(stolen) == [(index, 2) for index in range(9)]


def test_the_answers_are_a_drivers() -> None:
    """One after the other, in the same order, also into the next segment."""
    driver, store = Leases(), HashStore()
    for stretch in (segment(), segment(epoch=1, parts=2, left=[[2, 5], [0, 7]])):
        for turn in range(40):
            replica = turn * 7 % 3
            assert StoreLeases(store, 5.0).take(replica, stretch) == driver.take(replica, stretch)


def test_a_stop_reaches_all() -> None:
    store = HashStore()
    assert isinstance(StoreLeases(store, 5.0).take(0, segment()), Lease)
    for rank, reason in ((1, "preempted"), (2, "")):
        answer = StoreLeases(store, 5.0).take(rank, segment(), lambda reason=reason: reason)  # type: ignore[misc]
        assert isinstance(answer, End)
        assert answer.reason == "preempted"


def test_nobody_waits_for_ever() -> None:
    with pytest.raises(ManyhandsError, match="worker 1 waited for worker 0, which trains alone"):
        StoreLeases(HashStore(), 0.05).take(1, segment(rank0_warmup_ticks=2))
