"""Schedules: what each stage does, how many micro-batches it holds, that no order ends in a deadlock."""

from collections import deque
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.schedules import SCHEDULES, Schedule, actions, bubble, in_flight, micro_batches_of


def test_the_bubble_of_equal_stages() -> None:
    shares = {(4, 4): 0.4286, (4, 8): 0.2727, (4, 32): 0.0857, (8, 32): 0.1795}
    for (stages, micros), share in shares.items():
        assert bubble(stages, micros) == pytest.approx(share, abs=5e-5), (stages, micros)


def test_each_micro_batch_goes_forward_and_back_once() -> None:
    for schedule, stages, micros in product(SCHEDULES, range(1, 9), (1, 2, 3, 4, 7, 8, 32)):
        for stage in range(stages):
            case, order = (schedule, stages, micros, stage), actions(schedule, stages, micros, stage)
            assert [one.micro for one in order if one.forward] == list(range(micros)), case
            assert [one.micro for one in order if not one.forward] == list(range(micros)), case
            for micro in range(micros):
                assert [one.forward for one in order if one.micro == micro] == [True, False], case
            assert in_flight(order) == (micros if schedule == "gpipe" else min(stages - stage, micros)), case


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_ends_in_a_deadlock_where_messages_wait_to_be_taken(schedule: Schedule) -> None:
    """A send waits while so many are not taken: as many as a stage holds, and one."""
    for micros, stages in product((1, 2, 3, 5, 8, 13, 32), range(1, 9)):
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
        assert not any(orders), f"{stages} stages with {micros} micro-batches wait for each other"


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
