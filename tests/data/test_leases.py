"""Leases: every slice exactly once, whatever the interleaving and whoever is lost; nobody waits for rows that nobody has begun."""

import json
import random
from collections import Counter

from manyhands.data.leases import End, Lease, Leases, Segment, foreseen, from_json, to_json
from refusals import refused


def segment(first: int = 0, until: int = 4, parts: int = 2, **more: object) -> Segment:
    return Segment(epoch=0, first=first, until=until, parts=parts, **more)


def place(lease: object) -> tuple[int, int]:
    assert isinstance(lease, Lease)
    return lease.index, lease.part


def taken(leases: Leases, rank: int, of: Segment, many: int) -> list[tuple[int, int]]:
    return [place(leases.take(rank, of)) for _ in range(many)]


def test_own_queue_from_the_front_then_the_fullest_from_the_back() -> None:
    leases, of = Leases(), segment(until=3, parts=3)
    assert taken(leases, 0, of, 3) == [(0, 0), (1, 0), (2, 0)]
    assert taken(leases, 1, of, 1) == [(0, 1)]
    assert taken(leases, 0, of, 3) == [(2, 2), (2, 1), (1, 2)]
    assert taken(leases, 2, of, 2) == [(0, 2), (1, 1)]
    assert leases.take(1, of) == leases.take(2, of) == End(reason="", left=[[3, 3], [1, 1], [1, 1]])


def test_leases_are_numbered_and_a_new_segment_begins_with_who_asks_for_it() -> None:
    leases = Leases()
    assert leases.take(1, segment(until=1)) == Lease(index=0, part=1, handed=0)
    assert leases.take(0, segment(until=1)) == Lease(index=0, part=0, handed=1)
    assert isinstance(leases.take(0, segment(until=1)), End)
    assert leases.take(1, segment(first=1, until=2)) == Lease(index=1, part=1, handed=0)
    assert Leases().take(0, segment(left=[[1, 4], [2, 3]])) == Lease(index=1, part=0, handed=4), "resumed, it counts on"
    assert Leases().take(1, segment(first=4)) == End(reason="", left=[[4, 4], [4, 4]]), "nothing is left"


def test_a_stop_ends_it_for_everybody_with_the_first_reason_and_reaches_those_who_wait() -> None:
    leases, of = Leases(), segment()
    taken(leases, 1, of, 1)
    leases.stop("callback")
    leases.stop("preempted")
    assert leases.take(0, of) == leases.take(1, of) == End(reason="callback", left=[[0, 4], [1, 4]])
    for of, rank, left in [
        (segment(rank0_warmup_ticks=9), 1, [[0, 4], [0, 4]]),
        (segment(until=2, left=[[2, 2], [0, 2]], fixed=True), 0, [[2, 2], [0, 2]]),
    ]:
        leases = Leases()
        assert leases.take(rank, of) is None
        leases.stop("max_seconds")
        assert leases.released == [(rank, End(reason="max_seconds", left=left))]


def test_worker_0_trains_alone_first_and_then_lets_the_others_in() -> None:
    leases, of = Leases(), segment(until=6, parts=3, rank0_warmup_ticks=2)
    assert leases.take(2, of) is None
    assert taken(leases, 0, of, 2) == [(0, 0), (1, 0)]
    assert leases.take(1, of) is None
    assert leases.released == []
    assert taken(leases, 0, of, 1) == [(2, 0)]
    assert leases.released == [(2, Lease(index=0, part=2, handed=3)), (1, Lease(index=0, part=1, handed=4))]
    leases, of = Leases(), segment(until=1, rank0_warmup_ticks=9)  # longer than the segment: the others' slices, too
    assert leases.take(1, of) is None
    assert taken(leases, 0, of, 2) == [(0, 0), (0, 1)]
    assert leases.released == [(1, End(reason="", left=[[1, 1], [0, 0]]))]


def test_with_fixed_parts_nobody_takes_anothers_and_all_end_together() -> None:
    leases, of = Leases(), segment(until=2, fixed=True)
    assert taken(leases, 0, of, 2) == [(0, 0), (1, 0)]
    assert leases.take(0, of) is None
    assert taken(leases, 1, of, 2) == [(0, 1), (1, 1)]
    end = End(reason="", left=[[2, 2], [2, 2]])
    assert leases.released == [(0, end)]
    assert leases.take(1, of) == end
    leases, of = Leases(), segment(until=1, rank0_warmup_ticks=9, fixed=True)  # alone longer than its own part
    assert leases.take(1, of) is None
    assert taken(leases, 0, of, 1) == [(0, 0)]
    assert leases.released == [(1, Lease(index=0, part=1, handed=1))]


def test_with_fewer_workers_the_queue_furthest_behind_comes_first_and_all_of_ones_own_are_foreseen() -> None:
    of = segment(until=4, parts=4, size=2, left=[[3, 4], [0, 4], [1, 4], [4, 4]])
    assert taken(Leases(), 0, of, 4) == [(1, 2), (2, 2), (3, 0), (3, 2)]
    of = segment(until=4, parts=3, size=2, left=[[1, 4], [0, 4], [2, 4]], rank0_warmup_ticks=5)
    assert list(map(place, foreseen(of, 0))) == [(1, 0), (2, 0), (2, 2), (3, 0), (3, 2)]
    assert list(map(place, foreseen(of, 1))) == [(i, 1) for i in range(4)]
    assert list(foreseen(of, 5)) == []


def test_each_slice_exactly_once() -> None:
    """CASE 18: any interleaving of any number of workers, stopped and resumed with another number at any time."""
    draw = random.Random(0)
    for _ in range(150):
        first, batches, parts, alone = draw.randint(0, 3), draw.randint(0, 9), draw.randint(1, 5), draw.randint(0, 6)
        sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
        case = f"{first=} {batches=} {parts=} {alone=} {sizes=}"
        left, got, handed = None, [], []
        for launch, size in enumerate(sizes):
            of = segment(first, first + batches, parts, size=size, left=left, rank0_warmup_ticks=alone)
            stop_after = None if launch == len(sizes) - 1 else draw.randint(0, batches * parts)
            answers = _interleaved(of, size, stop_after, draw)
            leases = [answer for answer in answers if isinstance(answer, Lease)]
            ends = [answer for answer in answers if isinstance(answer, End)]
            assert len(ends) == size, case
            assert all(end.left == ends[0].left for end in ends), case  # a stop at the end changes the reason alone
            got += map(place, leases)
            handed += [lease.handed for lease in leases]
            left = ends[0].left
        assert sorted(got) == [(i, p) for i in range(first, first + batches) for p in range(parts)], case
        assert handed == list(range(batches * parts)), case


def _interleaved(of: Segment, size: int, stop_after: int | None, draw: random.Random) -> list[Lease | End]:
    """All answers, in the order in which they were given; whoever has no End and does not wait may ask next."""
    leases, ready, answers = Leases(), list(range(size)), []
    if stop_after == 0:
        leases.stop("test")
    while ready:
        rank = ready.pop(draw.randrange(len(ready)))
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
    return answers


def test_they_travel_as_json() -> None:
    for answer in (Lease(index=3, part=1, handed=7), End(reason="callback", left=[[0, 2], [1, 1]])):
        assert from_json(json.loads(json.dumps(to_json(answer)))) == answer
    of = segment(left=[[0, 1], [2, 3]], size=3, rank0_warmup_ticks=4)
    assert Segment(**json.loads(json.dumps(vars(of)))) == of


def test_a_segment_that_cannot_be_is_refused() -> None:
    wrong = [{"first": 5}, {"parts": 0}, {"size": -1}, {"rank0_warmup_ticks": -1}]
    wrong += [{"left": left} for left in ([[0, 4]], [[0, 5], [0, 4]], [[2, 1], [0, 4]])]
    for fields in wrong:
        refused("expected|must hold", lambda fields: segment(**fields), fields, kind=AssertionError)


# -- of a worker that is lost: what no shard has of it is leased again, before anybody gets an End -----------------------

SEGMENT = segment()
ALONE = segment(rank0_warmup_ticks=3)


def held_by_5(many: int, of: Segment = SEGMENT) -> tuple[Leases, list[Lease]]:
    """Worker 5 took so many slices, each for a push of its own."""
    leases = Leases()
    return leases, [leases.take(0, of, holder=5, push=number) for number in range(1, many + 1)]


def test_what_no_shard_has_is_leased_again_first() -> None:
    leases, held = held_by_5(3)
    leases.lose(5)
    leases.recover(5, applied=[1])
    again = [leases.take(1, SEGMENT, holder=6, push=number) for number in (1, 2)]
    assert list(map(place, again)) == list(map(place, held[1:]))
    assert [one.again for one in again] == [True, True]
    assert not leases.take(1, SEGMENT, holder=6, push=3).again


def test_what_only_some_shards_have_is_counted_and_not_leased_again() -> None:
    leases, held = held_by_5(3)
    leases.lose(5)
    leases.recover(5, applied=[2, 1])
    assert leases.partial == [[0, 1, 0, 2]]  # epoch, global batch, part, parts
    assert place(leases.take(1, segment(size=3), holder=6, push=1)) == place(
        held[2]
    )  # also with other numbers of workers
    leases, _ = held_by_5(2)
    leases.lose(5)
    leases.recover(5, applied=[2, 1])  # the last push was on its way to one shard
    assert leases.partial == [[0, 1, 0, 2]]


def test_nobody_gets_an_end_before_it_is_known_what_a_lost_worker_left() -> None:
    leases, held = held_by_5(8)
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
    leases, _ = held_by_5(8)
    leases.lose(5)
    leases.take(1, SEGMENT, holder=6)
    leases.lose(6)  # it waits, and is lost, too: it gets nothing
    leases.recover(6, applied=[0])
    leases.recover(5, applied=[0])
    assert leases.released == []


def test_whoever_waits_for_the_first_replica_is_sent_away_when_members_change() -> None:
    leases, _ = held_by_5(1, ALONE)
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
    leases, _ = held_by_5(4, ALONE)  # a later loss does not begin the warm-up again
    leases.take(1, ALONE, holder=6)
    leases.lose(6)
    leases.recover(6, applied=[0])
    assert isinstance(leases.take(1, ALONE, holder=7), Lease)


def test_each_slice_reaches_the_server_once_whatever_is_lost() -> None:
    """Workers push after one to three slices; who is lost has pushed what it has pushed, and no more."""
    draws = random.Random(1)
    for number in range(200):
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
                applied.update(map(place, window[worker_id]))
                pushes[worker_id] += bool(window[worker_id])
                window[worker_id] = []
            if isinstance(answer, End):
                busy.remove(worker_id)
        assert applied == Counter((index, part) for index in range(4) for part in range(2)), number
