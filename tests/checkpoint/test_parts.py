"""When parts make a checkpoint: decided from what happened, in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manyhands.checkpoint.checkpoints import CheckpointFile
from manyhands.checkpoint.parts import Attempt, CheckpointParts, Drop, Fail, Finish

DIGEST = "0" * 64


def files(worker_id: int) -> tuple[CheckpointFile, ...]:
    return CheckpointFile(worker_id, DIGEST), CheckpointFile(100 + worker_id, DIGEST)


def begun(newest: int | None = 3, tick: int = 6, worker_ids: tuple[int, ...] = (0, 1, 4)) -> CheckpointParts:
    parts = CheckpointParts(newest)
    parts.begin(Attempt(tick, 0, worker_ids))
    assert parts.decide() == []
    return parts


def test_once_all_parts_are_there_in_the_order_of_ranks() -> None:
    parts = begun()
    for worker_id in (4, 0, 1):
        assert parts.decide() == []
        parts.part(worker_id, 6, 0, files(worker_id))
    (action,) = parts.decide()
    assert action == Finish(Attempt(6, 0, (0, 1, 4)), (files(0), files(1), files(4)))
    assert parts.newest == 3
    parts.finished(action.attempt)
    assert parts.newest == 6
    assert parts.settle(6)
    assert parts.decide() == []


def test_a_worker_that_is_lost_before_its_part() -> None:
    parts = begun()
    parts.part(0, 6, 0, files(0))
    parts.lost(7)  # no member
    assert parts.decide() == []
    parts.lost(1)
    (action,) = parts.decide()
    assert isinstance(action, Drop)
    assert action.attempt.tick == 6
    for word in ("step 6", "worker 1", "step 3"):
        assert word in action.message
    for worker_id in (1, 4):
        parts.part(worker_id, 6, 0, files(worker_id))
    parts.lost(4)
    assert parts.decide() == []
    assert not parts.settle(6), "it is to be saved again"
    assert parts.decide() == []


def test_a_worker_that_is_lost_after_its_part_is_not_needed() -> None:
    parts = begun()
    parts.part(1, 6, 0, files(1))
    parts.lost(1)
    for worker_id in (0, 4):
        parts.part(worker_id, 6, 0, files(worker_id))
    (action,) = parts.decide()
    assert isinstance(action, Finish)


def test_parts_of_another_attempt_do_not_count() -> None:
    """The same step is saved again by the next generation, and a worker's rank is another one's there."""
    parts = begun()
    parts.part(0, 6, 0, files(0))
    parts.lost(1)
    parts.begin(Attempt(6, 1, (0, 4)))
    assert len(parts.decide()) == 1
    parts.part(4, 6, 0, files(4))
    parts.part(0, 3, 1, files(0))
    parts.part(2, 6, 1, files(2))
    parts.failed(6, 0, "too late")
    assert parts.decide() == []
    parts.part(0, 6, 1, files(0))
    parts.part(4, 6, 1, files(4))
    assert [type(action) for action in parts.decide()] == [Finish]


def test_the_next_one_begins_while_a_part_is_missing() -> None:
    """Of a worker that has left in order, say, and still writes."""
    parts = begun()
    parts.part(0, 6, 0, files(0))
    parts.begin(Attempt(9, 1, (0, 1)))
    (action,) = parts.decide()
    assert isinstance(action, Drop)
    assert action.attempt.tick == 6


def test_a_full_disk_while_there_is_an_older_one() -> None:
    parts = begun()
    parts.part(0, 6, 0, files(0))
    parts.failed(6, 0, "worker 1: No space left on device")
    (action,) = parts.decide()
    assert isinstance(action, Drop)
    for word in ("step 6", "worker 1: No space left on device", "step 3"):
        assert word in action.message
    parts.failed(6, 0, "worker 4: No space left on device")
    assert parts.decide() == [], "told once"
    parts.begin(Attempt(9, 0, (0,)))
    parts.part(0, 9, 0, files(0))
    assert [type(action) for action in parts.decide()] == [Finish]
    parts.finished(Attempt(9, 0, (0,)))
    assert parts.settle(9)
    assert parts.decide() == []


def test_a_full_disk_and_no_older_one() -> None:
    parts = begun(newest=None)
    parts.failed(6, 0, "worker 1: No space left on device")
    (action,) = parts.decide()
    assert isinstance(action, Fail)
    for word in ("step 6", "worker 1: No space left on device", "no older one"):
        assert word in action.message


def test_a_full_disk_at_the_end() -> None:
    parts = begun()
    parts.failed(6, 0, "worker 1: No space left on device")
    assert len(parts.decide()) == 1
    assert not parts.settle(6)
    (action,) = parts.decide()
    assert isinstance(action, Fail)
    for word in ("step 6", "worker 1: No space left on device", "step 3", "--resume"):
        assert word in action.message


def test_a_checkpoint_without_older_ones_may_be_dropped() -> None:
    parts = begun(newest=None)
    parts.lost(4)
    (action,) = parts.decide()
    assert isinstance(action, Drop)
    assert "no older one" in action.message


def test_at_the_end_what_is_not_whole_is_saved_again() -> None:
    parts = begun()
    parts.part(0, 6, 0, files(0))
    assert not parts.settle(6)
    (action,) = parts.decide()
    assert isinstance(action, Drop)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_attempt_ends_once_and_whole_ones_have_all_parts(seed: int) -> None:
    draw, parts = random.Random(seed), CheckpointParts(0)
    written: set[tuple[int, int, int]] = set()  # (tick, generation, worker id)
    ended: list[Attempt] = []
    attempts: list[Attempt] = []
    for event in range(400):
        happens: Any = draw.choice(["begin", "part", "part", "part", "failed", "lost"])
        if happens == "begin" or not attempts:
            worker_ids = tuple(sorted(draw.sample(range(4), draw.randint(1, 3))))
            attempts.append(Attempt(draw.randint(1, 3), event, worker_ids))
            parts.begin(attempts[-1])
        else:
            of, worker_id = draw.choice(attempts[-2:]), draw.randrange(4)
            if happens == "part":
                written.add((of.tick, of.generation, worker_id))
                parts.part(worker_id, of.tick, of.generation, files(worker_id))
            elif happens == "failed":
                parts.failed(of.tick, of.generation, "the disk is full")
            else:
                parts.lost(worker_id)
        for action in parts.decide():
            assert not isinstance(action, Fail)
            ended.append(action.attempt)
            if isinstance(action, Finish):
                tick, generation = action.attempt.tick, action.attempt.generation
                assert all((tick, generation, one) in written for one in action.attempt.worker_ids)
                assert action.parts == tuple(files(one) for one in action.attempt.worker_ids)
                parts.finished(action.attempt)
    assert len(ended) == len(set(ended))
    assert set(attempts[:-1]) <= set(ended)
