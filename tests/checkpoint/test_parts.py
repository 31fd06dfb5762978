"""When parts make a checkpoint: decided from what happened, in any order."""

import random
from typing import Any

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


def part(parts: CheckpointParts, *worker_ids: int, tick: int = 6, generation: int = 0) -> None:
    for worker_id in worker_ids:
        parts.part(worker_id, tick, generation, files(worker_id))


def decided(parts: CheckpointParts, kind: type[Any], *words: str) -> Any:
    """The one action, of this kind, whose message has these words."""
    (action,) = parts.decide()
    assert isinstance(action, kind)
    assert [word for word in words if word not in action.message] == []
    return action


def test_once_all_parts_are_there_in_the_order_of_ranks() -> None:
    parts = begun()
    for worker_id in (4, 0, 1):
        assert parts.decide() == []
        part(parts, worker_id)
    action = decided(parts, Finish)
    assert action == Finish(Attempt(6, 0, (0, 1, 4)), (files(0), files(1), files(4)))
    assert parts.newest == 3
    parts.finished(action.attempt)
    assert parts.newest == 6
    assert parts.settle(6)
    assert parts.decide() == []


def test_a_worker_that_is_lost_before_its_part() -> None:
    parts = begun()
    part(parts, 0)
    parts.lost(7)  # no member
    assert parts.decide() == []
    parts.lost(1)
    assert decided(parts, Drop, "step 6", "worker 1", "step 3").attempt.tick == 6
    part(parts, 1, 4)
    parts.lost(4)
    assert parts.decide() == []
    assert not parts.settle(6), "it is to be saved again"
    assert parts.decide() == []
    parts = begun(newest=None)  # one without older ones may be dropped, too
    parts.lost(4)
    decided(parts, Drop, "no older one")


def test_a_worker_that_is_lost_after_its_part_is_not_needed() -> None:
    parts = begun()
    part(parts, 1)
    parts.lost(1)
    part(parts, 0, 4)
    decided(parts, Finish)


def test_parts_of_another_attempt_do_not_count() -> None:
    """The same step is saved again by the next generation, and a worker's rank is another one's there."""
    parts = begun()
    part(parts, 0)
    parts.lost(1)
    parts.begin(Attempt(6, 1, (0, 4)))
    assert len(parts.decide()) == 1
    part(parts, 4)
    part(parts, 0, tick=3, generation=1)
    part(parts, 2, generation=1)
    parts.failed(6, 0, "too late")
    assert parts.decide() == []
    part(parts, 0, 4, generation=1)
    decided(parts, Finish)
    parts = begun()  # the next one begins while a part is missing: of a worker that has left in order, say
    part(parts, 0)
    parts.begin(Attempt(9, 1, (0, 1)))
    assert decided(parts, Drop).attempt.tick == 6


def test_a_full_disk() -> None:
    full = "worker 1: No space left on device"
    parts = begun()
    part(parts, 0)
    parts.failed(6, 0, full)
    decided(parts, Drop, "step 6", full, "step 3")
    parts.failed(6, 0, "worker 4: No space left on device")
    assert parts.decide() == [], "told once"
    parts.begin(Attempt(9, 0, (0,)))
    part(parts, 0, tick=9)
    decided(parts, Finish)
    parts.finished(Attempt(9, 0, (0,)))
    assert parts.settle(9)
    assert parts.decide() == []
    parts = begun(newest=None)
    parts.failed(6, 0, full)
    decided(parts, Fail, "step 6", full, "no older one")
    parts = begun()  # at the end
    parts.failed(6, 0, full)
    decided(parts, Drop)
    assert not parts.settle(6)
    decided(parts, Fail, "step 6", full, "step 3", "--resume")
    parts = begun()  # what is not whole at the end is saved again
    part(parts, 0)
    assert not parts.settle(6)
    decided(parts, Drop)


def test_whatever_happens_each_attempt_ends_once_and_whole_ones_have_all_parts() -> None:
    for seed in range(30):
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
                    part(parts, worker_id, tick=of.tick, generation=of.generation)
                elif happens == "failed":
                    parts.failed(of.tick, of.generation, "the disk is full")
                else:
                    parts.lost(worker_id)
            for action in parts.decide():
                assert not isinstance(action, Fail), (seed, event)
                ended.append(action.attempt)
                if isinstance(action, Finish):
                    tick, generation = action.attempt.tick, action.attempt.generation
                    assert all((tick, generation, one) in written for one in action.attempt.worker_ids), (seed, event)
                    assert action.parts == tuple(files(one) for one in action.attempt.worker_ids)
                    parts.finished(action.attempt)
        assert len(ended) == len(set(ended)), seed
        assert set(attempts[:-1]) <= set(ended), seed
