"""Leases: every slice exactly once, whatever the interleaving, and nobody waits for rows that nobody has begun."""

import heapq
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.leases import End, Lease, Leases, Segment, foreseen, from_json, to_json


def segment(first: int = 0, until: int = 4, parts: int = 2, **more: object) -> Segment:
    return Segment(epoch=0, first=first, until=until, parts=parts, **more)  # type: ignore[arg-type]


def taken(leases: Leases, rank: int, of: Segment) -> tuple[int, int]:
    lease = leases.take(rank, of)
    assert isinstance(lease, Lease)
    return lease.index, lease.part


def test_own_queue_from_the_front_then_the_fullest_from_the_back() -> None:
    leases, of = Leases(), segment(until=3, parts=3)
    assert [taken(leases, 0, of) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert taken(leases, 1, of) == (0, 1)
    assert [taken(leases, 0, of) for _ in range(3)] == [(2, 2), (2, 1), (1, 2)]
    assert taken(leases, 2, of) == (0, 2)
    assert taken(leases, 2, of) == (1, 1)
    assert leases.take(1, of) == leases.take(2, of) == End(reason="", left=[[3, 3], [1, 1], [1, 1]])


def test_leases_are_numbered_and_a_new_segment_begins_with_who_asks_for_it() -> None:
    leases = Leases()
    assert [leases.take(rank, segment(until=1)) for rank in (1, 0)] == [
        Lease(index=0, part=1, handed=0),
        Lease(index=0, part=0, handed=1),
    ]
    assert isinstance(leases.take(0, segment(until=1)), End)
    assert leases.take(1, segment(first=1, until=2)) == Lease(index=1, part=1, handed=0)


def test_a_resumed_segment_goes_on_counting() -> None:
    lease = Leases().take(0, segment(left=[[1, 4], [2, 3]]))
    assert lease == Lease(index=1, part=0, handed=4)


def test_nothing_left_is_an_end_at_once() -> None:
    assert Leases().take(1, segment(first=4)) == End(reason="", left=[[4, 4], [4, 4]])


def test_a_stop_ends_it_for_everybody_with_the_first_reason() -> None:
    leases, of = Leases(), segment()
    taken(leases, 1, of)
    leases.stop("callback")
    leases.stop("preempted")
    assert leases.take(0, of) == leases.take(1, of) == End(reason="callback", left=[[0, 4], [1, 4]])


# -- worker 0 alone ------------------------------------------------------------------------------------------------------


def test_worker_0_trains_alone_first_and_then_lets_the_others_in() -> None:
    leases, of = Leases(), segment(until=6, parts=3, rank0_warmup_ticks=2)
    assert leases.take(2, of) is None
    assert [taken(leases, 0, of) for _ in range(2)] == [(0, 0), (1, 0)]
    assert leases.take(1, of) is None
    assert leases.released == []
    assert taken(leases, 0, of) == (2, 0)
    assert leases.released == [(2, Lease(index=0, part=2, handed=3)), (1, Lease(index=0, part=1, handed=4))]


def test_alone_longer_than_the_segment_takes_the_others_slices_too() -> None:
    leases, of = Leases(), segment(until=1, rank0_warmup_ticks=9)
    assert leases.take(1, of) is None
    assert [taken(leases, 0, of) for _ in range(2)] == [(0, 0), (0, 1)]
    assert leases.released == [(1, End(reason="", left=[[1, 1], [0, 0]]))]


def test_a_stop_reaches_those_who_wait() -> None:
    leases, of = Leases(), segment(rank0_warmup_ticks=9)
    assert leases.take(1, of) is None
    leases.stop("max_seconds")
    assert leases.released == [(1, End(reason="max_seconds", left=[[0, 4], [0, 4]]))]


# -- fixed parts ---------------------------------------------------------------------------------------------------------


def test_with_fixed_parts_nobody_takes_anothers_and_all_end_together() -> None:
    leases, of = Leases(), segment(until=2, fixed=True)
    assert [taken(leases, 0, of) for _ in range(2)] == [(0, 0), (1, 0)]
    assert leases.take(0, of) is None
    assert [taken(leases, 1, of) for _ in range(2)] == [(0, 1), (1, 1)]
    assert leases.released == [(0, End(reason="", left=[[2, 2], [2, 2]]))]
    assert leases.take(1, of) == End(reason="", left=[[2, 2], [2, 2]])


def test_a_stop_reaches_who_waits_for_the_others_parts() -> None:
    leases, of = Leases(), segment(until=2, left=[[2, 2], [0, 2]], fixed=True)
    assert leases.take(0, of) is None
    leases.stop("callback")
    assert leases.released == [(0, End(reason="callback", left=[[2, 2], [0, 2]]))]


def test_alone_longer_than_its_own_part_worker_0_lets_the_others_in() -> None:
    leases, of = Leases(), segment(until=1, rank0_warmup_ticks=9, fixed=True)
    assert leases.take(1, of) is None
    assert taken(leases, 0, of) == (0, 0)
    assert leases.released == [(1, Lease(index=0, part=1, handed=1))]


# -- exactly once --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    first=st.integers(0, 3),
    batches=st.integers(0, 9),
    parts=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    alone=st.integers(0, 6),
    data=st.data(),
)
def test_each_slice_exactly_once(first: int, batches: int, parts: int, sizes: list[int], alone: int, data) -> None:  # type: ignore[no-untyped-def]
    """CASE 18: any interleaving of any number of workers, stopped and resumed with another number at any time."""
    left, got, handed = None, [], []
    for launch, size in enumerate(sizes):
        last = launch == len(sizes) - 1
        of = segment(first, first + batches, parts, size=size, left=left, rank0_warmup_ticks=alone)
        stop_after = None if last else data.draw(st.integers(0, batches * parts))
        answers = _interleaved(of, size, stop_after, lambda n: data.draw(st.integers(0, n - 1)))
        leases = [a for a in answers if isinstance(a, Lease)]
        ends = [a for a in answers if isinstance(a, End)]
        assert len(ends) == size
        assert all(end.left == ends[0].left for end in ends)  # a stop after the last slice changes the reason alone
        got += [(lease.index, lease.part) for lease in leases]
        handed += [lease.handed for lease in leases]
        left = ends[0].left
    assert sorted(got) == [(i, p) for i in range(first, first + batches) for p in range(parts)]
    assert handed == list(range(batches * parts))


def _interleaved(of: Segment, size: int, stop_after: int | None, draw: Callable[[int], int]) -> list[Lease | End]:
    """All answers, in the order in which they were given; whoever has no End and does not wait may ask next."""
    leases, ready, answers = Leases(), list(range(size)), []
    if stop_after == 0:
        leases.stop("test")
    while ready:
        rank = ready.pop(draw(len(ready)))
        answer = leases.take(rank, of)
        output = [(rank, answer)] if answer is not None else []
        output += leases.released
        leases.released = []
        if stop_after is not None and len(answers) < stop_after <= len(answers) + len(output):
            leases.stop("test")
            output += leases.released
            leases.released = []
        for who, what in output:
            answers.append(what)
            if isinstance(what, Lease):
                ready.append(who)
    # a worker that still waits would be missing from the ends, which the test counts
    return [answer for answer in answers if answer is not None]


def test_with_fewer_workers_the_queue_furthest_behind_comes_first() -> None:
    of = segment(until=4, parts=4, size=2, left=[[3, 4], [0, 4], [1, 4], [4, 4]])
    leases = Leases()
    assert [taken(leases, 0, of) for _ in range(4)] == [(1, 2), (2, 2), (3, 0), (3, 2)]


def test_what_is_foreseen_is_what_a_worker_gets_of_its_own() -> None:
    of = segment(until=4, parts=3, size=2, left=[[1, 4], [0, 4], [2, 4]], rank0_warmup_ticks=5)
    assert [(lease.index, lease.part) for lease in foreseen(of, 0)] == [(1, 0), (2, 0), (2, 2), (3, 0), (3, 2)]
    assert [(lease.index, lease.part) for lease in foreseen(of, 1)] == [(i, 1) for i in range(4)]
    assert list(foreseen(of, 5)) == []


# -- nobody waits for rows that nobody has begun ---------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [[1.0, 10.0], [10.0, 1.0], [1.0, 1.3, 7.0, 2.0]])
def test_at_the_end_nobody_waits_for_more_than_the_slice_under_way(seconds: list[float]) -> None:
    """The makespan is that of perfect sharing and at most the slowest worker's one slice more."""
    of = segment(until=100, parts=len(seconds))
    ends = _ends(of, seconds)
    work = of.slices / sum(1 / s for s in seconds)  # perfect sharing, slices cut as fine as you like
    assert max(ends) <= work + max(seconds)
    assert max(ends) - min(ends) <= max(seconds)  # nobody idles longer than the longest slice under way


def _ends(of: Segment, seconds: list[float]) -> list[float]:
    """When each worker gets its End, in virtual time; worker r needs seconds[r] for a slice."""
    leases, ends = Leases(), [0.0] * len(seconds)
    due = [(0.0, rank) for rank in range(len(seconds))]
    while due:
        now, rank = heapq.heappop(due)
        if isinstance(leases.take(rank, of), Lease):
            heapq.heappush(due, (now + seconds[rank], rank))
        else:
            ends[rank] = now
    return ends


# -- on the line -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Lease(index=3, part=1, handed=7), End(reason="callback", left=[[0, 2], [1, 1]])])
def test_answers_travel_as_json(answer: Lease | End) -> None:
    assert from_json(json.loads(json.dumps(to_json(answer)))) == answer


def test_a_segment_travels_as_json_by_its_fields() -> None:
    of = segment(left=[[0, 1], [2, 3]], size=3, rank0_warmup_ticks=4)
    assert Segment(**json.loads(json.dumps(vars(of)))) == of


@pytest.mark.parametrize(
    "wrong", [{"first": 5}, {"parts": 0}, {"left": [[0, 4]]}, {"left": [[0, 5], [0, 4]]}, {"left": [[2, 1], [0, 4]]}]
)
def test_a_segment_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="expected|must hold"):
        segment(**wrong)  # type: ignore[arg-type]
