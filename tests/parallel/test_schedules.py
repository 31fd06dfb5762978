"""Schedules: what each stage does, how many micro-batches it holds, that no order ends in a deadlock."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.schedules import SCHEDULES, Schedule, actions, bubble, in_flight, micro_batches_of

SIZES = [(stages, micros) for stages in range(1, 9) for micros in (1, 2, 3, 4, 7, 8, 32)]


@pytest.mark.parametrize(
    ("stages", "micros", "share"), [(4, 4, 0.4286), (4, 8, 0.2727), (4, 32, 0.0857), (8, 32, 0.1795)]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_equal_stages(schedule: Schedule, stages: int, micros: int, share: float) -> None:
    assert bubble(stages, micros) == pytest.approx(share, abs=5e-5)
    forward, back = 1.0, 2.0
    seconds = played(schedule, stages, micros, forward, back)
    assert 1 - micros * (forward + back) / seconds == pytest.approx(bubble(stages, micros), abs=1e-12)


def played(schedule: Schedule, stages: int, micros: int, forward: float, back: float) -> float:
    """Seconds of a step in which messages take none."""
    orders = [deque(actions(schedule, stages, micros, stage)) for stage in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    now = [0.0] * stages
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            while order:
                action = order[0]
                source = action.source(stage, stages)
                needed = (action.forward, source, action.micro) if source is not None else None
                if needed is not None and needed not in done:
                    break
                order.popleft()
                begun = max(now[stage], 0.0 if needed is None else done[needed])
                now[stage] = begun + (forward if action.forward else back)
                done[action.forward, stage, action.micro] = now[stage]
                moved = True
        assert moved, "nobody can go on"
    return max(now)


@pytest.mark.parametrize(("stages", "micros"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_goes_forward_and_back_once(schedule: Schedule, stages: int, micros: int) -> None:
    for stage in range(stages):
        order = actions(schedule, stages, micros, stage)
        assert [one.micro for one in order if one.forward] == list(range(micros))
        assert [one.micro for one in order if not one.forward] == list(range(micros))
        for micro in range(micros):
            mine = [one.forward for one in order if one.micro == micro]
            assert mine == [True, False]
        most = micros if schedule == "gpipe" else min(stages - stage, micros)
        assert in_flight(order) == most


@pytest.mark.parametrize("micros", range(1, 33))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_ends_in_a_deadlock_where_messages_wait_to_be_taken(schedule: Schedule, micros: int) -> None:
    """A send waits while so many are not taken: as many as a stage holds, and one."""
    for stages in range(1, 9):
        room = (micros if schedule == "gpipe" else stages) + 1
        orders = [deque(actions(schedule, stages, micros, stage)) for stage in range(stages)]
        waiting: dict[tuple[int, int], int] = {}
        received = [False] * stages  # for the action at hand
        moved = True
        while moved and any(orders):
            moved = False
            for stage, order in enumerate(orders):
                while order:
                    source, target = order[0].source(stage, stages), order[0].target(stage, stages)
                    if source is not None and not received[stage]:
                        if not waiting.get((source, stage)):
                            break
                        waiting[source, stage] -= 1
                        received[stage] = moved = True
                    if target is not None:
                        if waiting.get((stage, target), 0) >= room:
                            break
                        waiting[stage, target] = waiting.get((stage, target), 0) + 1
                    order.popleft()
                    received[stage], moved = False, True
        assert not any(orders), f"{stages} stages wait for each other"


@given(rows=st.integers(1, 200), most=st.integers(1, 40))
def test_micro_batches_cover_the_rows_once(rows: int, most: int) -> None:
    pieces = list(micro_batches_of(rows, most, None))
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(rows))
    assert len(pieces) <= min(rows, most)
    assert max(stop - start for start, stop in pieces) == -(-rows // min(rows, most))


def test_micro_batches_of_a_size() -> None:
    assert list(micro_batches_of(39, None, 10)) == [(0, 10), (10, 20), (20, 30), (30, 39)]
    assert list(micro_batches_of(39, 4, None)) == [(0, 10), (10, 20), (20, 30), (30, 39)]
    assert list(micro_batches_of(3, 4, None)) == [(0, 1), (1, 2), (2, 3)]
