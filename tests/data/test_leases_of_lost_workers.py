"""Slices of a worker that is lost: what no shard has of it is leased again, before anybody gets an End."""

from __future__ import annotations

import random
from collections import Counter

from manyhands.data.leases import End, Lease, Leases, Segment

SEGMENT = Segment(epoch=0, first=0, until=4, parts=2)


def place(lease: object) -> tuple[int, int]:
    assert isinstance(lease, Lease)
    return lease.index, lease.part


def test_what_no_shard_has_is_leased_again_first() -> None:
    leases = Leases()
    held = [leases.take(0, SEGMENT, holder=5, push=number) for number in (1, 2, 3)]
    leases.lose(5)
    leases.recover(5, applied=[1])
    again = [leases.take(1, SEGMENT, holder=6, push=number) for number in (1, 2)]
    assert [place(one) for one in again] == [place(one) for one in held[1:]]
    assert all(isinstance(one, Lease) and one.again for one in again)
    assert not leases.take(1, SEGMENT, holder=6, push=3).again  # type: ignore[union-attr]


def test_what_only_some_shards_have_is_counted_and_not_leased_again() -> None:
    leases = Leases()
    held = [leases.take(0, SEGMENT, holder=5, push=number) for number in (1, 2, 3)]
    leases.lose(5)
    leases.recover(5, applied=[2, 1])
    assert leases.partial == [[0, 1, 0, 2]]  # epoch, global batch, part, parts
    assert place(leases.take(1, SEGMENT, holder=6, push=1)) == place(held[2])


def test_nobody_gets_an_end_before_it_is_known_what_a_lost_worker_left() -> None:
    leases = Leases()
    held = [leases.take(0, SEGMENT, holder=5, push=number) for number in range(1, 9)]
    leases.lose(5)
    assert leases.take(1, SEGMENT, holder=6) is None
    leases.stop("preempted")
    assert leases.released == []
    leases.recover(5, applied=[7])
    ((asker, answer),) = leases.released
    assert (asker, place(answer)) == (6, place(held[-1]))
    leases.released.clear()
    end = leases.take(1, SEGMENT, holder=6, push=2)
    assert isinstance(end, End)
    assert (end.reason, [back - front for front, back in end.left]) == ("preempted", [0, 0])


def test_a_lost_worker_that_waits_gets_nothing() -> None:
    leases = Leases()
    for number in range(1, 9):
        leases.take(0, SEGMENT, holder=5, push=number)
    leases.lose(5)
    leases.take(1, SEGMENT, holder=6)
    leases.lose(6)
    leases.recover(6, applied=[0])
    leases.recover(5, applied=[0])
    assert leases.released == []


ALONE = Segment(epoch=0, first=0, until=4, parts=2, rank0_warmup_ticks=3)


def test_whoever_waits_for_the_first_replica_is_sent_away_when_members_change() -> None:
    leases = Leases()
    leases.take(0, ALONE, holder=5)
    assert leases.take(1, ALONE, holder=6) is None
    assert (leases.send_away(), leases.send_away()) == ([6], [])
    assert leases.take(1, ALONE, holder=6) is None  # it may ask again


def test_what_the_first_replica_had_not_pushed_is_trained_alone_too() -> None:
    """Two of its slices come back: the next one has three to train before the others begin."""
    leases = Leases()
    for push in (1, 2, 2):
        leases.take(0, ALONE, holder=5, push=push)
    leases.take(1, ALONE, holder=6)
    leases.send_away()
    leases.lose(5)
    leases.recover(5, applied=[1])
    assert leases.take(1, ALONE, holder=7) is None
    for push in (1, 2, 3):  # the third one says that two are done
        leases.take(0, ALONE, holder=6, push=push)
        assert leases.released == [] or push == 3
    ((asker, answer),) = leases.released
    assert asker == 7
    assert isinstance(answer, Lease)


def test_a_later_loss_does_not_begin_the_warm_up_again() -> None:
    leases = Leases()
    for push in (1, 2, 3, 4):
        leases.take(0, ALONE, holder=5, push=push)
    leases.take(1, ALONE, holder=6)
    leases.lose(6)
    leases.recover(6, applied=[0])
    assert isinstance(leases.take(1, ALONE, holder=7), Lease)


def test_the_number_of_workers_may_change_within_a_segment() -> None:
    leases = Leases()
    first = leases.take(0, SEGMENT, holder=5)
    other = leases.take(0, Segment(**{**vars(SEGMENT), "size": 3}), holder=6)
    assert place(first) != place(other)


def test_each_slice_reaches_the_server_once_whatever_is_lost() -> None:
    """Workers push after one to three slices; who is lost has pushed what it has pushed, and no more."""
    draws = random.Random(1)
    for _ in range(200):
        leases, applied = Leases(), Counter[tuple[int, int]]()
        window: dict[int, list[Lease]] = {worker_id: [] for worker_id in range(3)}
        pushes = dict.fromkeys(window, 0)
        busy, next_id = [*window], 3
        while busy:
            worker_id = draws.choice(busy)
            if len(busy) > 1 and draws.random() < 0.1:
                leases.lose(worker_id)
                leases.recover(worker_id, [pushes[worker_id]])
                busy.remove(worker_id)
                busy.append(next_id)
                window[next_id], pushes[next_id] = [], 0
                next_id += 1
                continue
            answer = leases.take(worker_id % 2, SEGMENT, holder=worker_id, push=pushes[worker_id] + 1)
            if isinstance(answer, Lease):
                window[worker_id].append(answer)
            if isinstance(answer, End) or len(window[worker_id]) >= draws.randint(1, 3):
                applied.update(place(one) for one in window[worker_id])
                pushes[worker_id] += bool(window[worker_id])
                window[worker_id] = []
            if isinstance(answer, End):
                busy.remove(worker_id)
        assert applied == Counter((index, part) for index in range(4) for part in range(2))
