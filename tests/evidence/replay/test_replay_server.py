"""What the events of a run say of its order."""

from __future__ import annotations

from typing import Any

from manyhands.data.leases import End, Lease, Segment
from manyhands.events import Event
from manyhands.evidence.replay.server import ReplayJournal


def step(rank: int, **values: Any) -> Event:
    return Event(type="step", rank=rank, values={"epoch": 0, **values})


def test_leases_are_given_again_to_whom_they_went_segment_by_segment() -> None:
    steps = [step(0, lease=[0, 0, 0]), step(1, lease=[0, 1, 1]), step(1, lease=[1, 0, 2])]
    journal = ReplayJournal(2, [*steps, step(0, epoch=1, lease=[0, 0, 0])])
    first = Segment(epoch=0, first=0, until=2, parts=2)
    assert journal.lease(1, first) == Lease(index=0, part=1, handed=1)
    assert journal.lease(1, first) == Lease(index=1, part=0, handed=2)
    assert journal.lease(1, first) == End(reason="", left=[[2, 2], [2, 2]])
    assert journal.lease(0, first) == Lease(index=0, part=0, handed=0)
    assert journal.lease(0, first) == End(reason="", left=[[2, 2], [2, 2]])
    assert journal.lease(0, Segment(epoch=1, first=0, until=2, parts=2)) == Lease(index=0, part=0, handed=0)
    stopped = ReplayJournal(2, steps[:2], stopped="max_seconds")  # ends with its reason where nobody has more
    segment = Segment(epoch=0, first=0, until=5, parts=2)
    stopped.lease(0, segment)
    assert stopped.lease(0, segment).reason == ""
    stopped.lease(1, segment)
    assert stopped.lease(1, segment).reason == "max_seconds"


def test_pulls_and_pushes_are_in_each_workers_order() -> None:
    steps = [step(0, pulls=[[0, 0]], pushes=[[1, 1]]), step(1, pulls=[[0, 1]])]
    journal = ReplayJournal(2, [*steps, step(0, pulls=[[1, 1]], pushes=[None]), step(1, pushes=[[2, 2]])])
    assert list(journal.records[0].pulls) == [[0, 0], [1, 1]]
    assert list(journal.records[0].pushes) == [[1, 1], None]
    assert list(journal.records[1].pushes) == [[2, 2]]
    assert journal.pulls == {(0, 0): 2, (1, 0): 1, (1, 1): 2, (0, 1): 1}
    assert journal.ticks == 4
