"""Who may begin the next tick, on scripted orders."""

import pytest

from manyhands.server.gate import Gate


def begun(workers, bound):
    gate = Gate(workers, bound)
    for worker in range(workers):
        gate.activate(worker)
    return gate


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_fastest_waits_bound_ticks_ahead(bound):
    """CASE 11: who finished c ticks goes on when the slowest finished c - bound."""
    gate = begun(2, bound)
    for _ in range(bound):
        gate.tick(0, 4)
        assert gate.opened() == [(0, 4)]
    gate.tick(0, 4)
    assert gate.opened() == []
    assert gate.is_waiting(0)
    gate.tick(1, 1)
    assert [worker for worker, _ in gate.opened()] == [0, 1]
    assert not gate.is_waiting(0)


def test_without_a_bound_nobody_waits():
    gate = begun(2, None)
    for tick in range(5):
        gate.tick(0, tick)
        assert gate.opened() == [(0, tick)]


def test_in_step_everybody_gets_the_or_of_all_bits_of_the_tick():
    gate = begun(3, 0)
    for bits in (1, 8):
        for worker in (2, 0):
            gate.tick(worker, bits << worker)
            assert gate.opened() == []
        gate.tick(1, bits << 1)
        assert gate.opened() == [(worker, 7 * bits) for worker in range(3)]


def test_a_deactivated_worker_holds_nobody_up():
    """CASE 11: a dead worker blocks the others at the bound until it is declared lost, and then no longer."""
    gate = begun(3, 1)
    for _ in range(2):
        gate.tick(0, 0)
        gate.opened()
        gate.tick(1, 0)
        gate.opened()
    assert gate.is_waiting(0)
    gate.deactivate(2)
    assert gate.opened() == [(0, 0), (1, 0)]
    gate.tick(0, 0)
    assert gate.opened() == [(0, 0)]


def test_the_waiting_worker_that_parks_gets_nothing():
    gate = begun(2, 0)
    gate.tick(0, 0)
    gate.deactivate(0)
    gate.tick(1, 0)
    assert gate.opened() == [(1, 0)]


def test_who_begins_has_the_ticks_of_the_slowest():
    gate = Gate(3, 2)
    gate.activate(0)
    for _ in range(5):
        gate.tick(0, 0)
        gate.opened()
    gate.activate(1)
    assert gate.finished(1) == 5
    gate.tick(1, 0)
    gate.opened()
    gate.activate(2)
    assert (gate.finished(2), gate.slowest) == (5, 5)
    gate.activate(1)
    assert gate.finished(1) == 6, "a worker that takes part began again"


def test_bits_of_a_tick_that_nobody_completed_are_forgotten():
    gate = begun(2, 0)
    gate.tick(0, 5)
    gate.deactivate(1)
    gate.deactivate(0)
    gate.activate(0)
    gate.tick(0, 2)
    assert gate.opened() == [(0, 2)]
    assert Gate(2, 0).slowest is None
