"""Virtual time: programs take turns by what is due, in an order that the seed draws; some are killed, and nobody hangs unnoticed."""

import pytest
import torch
from sim_world import raise_errors, run

from manyhands.engines.sim.timeline import Deadlock, Killed, SimProgram, Timeline


def test_time_passes_where_programs_sleep():
    timeline, log = Timeline(), []

    def program(name, naps):
        for nap in naps:
            timeline.sleep(nap)
            log.append((timeline.now, name))
        return name

    values = run(timeline, [lambda: program("a", [1.0, 2.0]), lambda: program("b", [2.5])])
    assert values == ["a", "b"]
    assert log == [(1.0, "a"), (2.5, "b"), (3.0, "a")]
    assert timeline.now == 3.0


def order_of(seed, programs=8):
    timeline, log = Timeline(seed), []

    def program(rank):
        for _ in range(3):
            timeline.sleep(1.0)
            log.append(rank)

    run(timeline, [lambda rank=rank: program(rank) for rank in range(programs)])
    return log


def test_ties_are_drawn_by_the_seed():
    assert order_of(1) == order_of(1)
    assert order_of(1) != order_of(2)
    log = order_of(1)
    assert sorted(log[:8]) == sorted(log[8:16]) == list(range(8))
    assert log[:8] != log[8:16], "the same order at every tie: drawn once only"


def test_a_cell_wakes_who_waits_at_the_time_when_it_is_set():
    timeline = Timeline()
    cell = timeline.cell()

    def waits():
        return timeline.wait(cell), timeline.now

    def sets():
        timeline.sleep(2.0)
        cell.set("first")
        cell.set("second")
        timeline.sleep(1.0)
        return timeline.wait(cell), timeline.now

    assert run(timeline, [waits, sets]) == [("first", 2.0), ("first", 3.0)]


def test_a_failed_cell_raises_in_who_waits():
    timeline = Timeline()
    cell = timeline.cell()
    timeline.at(1.0, lambda: cell.fail(ValueError("no")))

    def waits():
        with pytest.raises(ValueError, match="no"):
            timeline.wait(cell)
        return timeline.now

    assert run(timeline, [waits]) == [1.0]


def test_what_is_cancelled_does_not_happen_and_takes_no_time():
    timeline, log = Timeline(), []
    due = timeline.at(5.0, lambda: log.append("cancelled"))
    due.cancel()
    due.cancel()
    timeline.at(1.0, lambda: log.append("happened"))
    while timeline.advance():
        pass
    assert log == ["happened"]
    assert timeline.now == 1.0


def test_stuck_names_who_waits_for_what():
    timeline = Timeline()
    programs = [lambda: timeline.wait(timeline.cell(), "a letter"), lambda: timeline.sleep(2.0)]
    with pytest.raises(Deadlock, match="stuck at 2 s, because everybody waits: 0 waits for a letter"):
        run(timeline, programs)


def test_an_error_is_kept_and_ends_only_its_program():
    timeline = Timeline()

    def fails():
        raise ValueError("mine")

    failed, other = timeline.start(0, fails), timeline.start(1, lambda: timeline.sleep(1.0) or "value")
    timeline.run()
    assert isinstance(failed.error, ValueError)
    assert (other.value, other.error) == ("value", None)


def test_kill_runs_finally_blocks_and_is_no_error():
    timeline, log = Timeline(), []

    def victim():
        try:
            timeline.wait(timeline.cell(), "nothing that comes")
        except Exception:  # noqa: BLE001 - none comes: Killed is no error
            log.append("caught")
        finally:
            log.append("finally")
            with pytest.raises(Killed):
                timeline.sleep(1.0)
            log.append("did not wait")

    program = timeline.start(0, victim)
    timeline.at(3.0, program.kill)
    ended = []
    timeline.on_end = ended.append
    timeline.run()
    assert log == ["finally", "did not wait"]
    assert program.killed
    assert program.ended
    assert program.error is None
    assert ended == [program]
    assert timeline.now == 3.0


def test_who_is_killed_before_it_begins_never_runs():
    timeline, log = Timeline(), []
    program = timeline.start(0, lambda: log.append("ran"), at=2.0)
    timeline.at(1.0, program.kill)
    timeline.run()
    assert log == []
    assert program.ended
    assert program.killed
    assert timeline.now == 1.0


def test_the_dead_are_not_woken_by_what_they_waited_for():
    timeline, log = Timeline(), []
    cell = timeline.cell()

    def victim():
        try:
            timeline.wait(cell)
        finally:
            log.append(timeline.is_dead)

    program = timeline.start(0, victim)
    timeline.at(1.0, program.kill)
    timeline.at(2.0, lambda: cell.set(1))
    timeline.start(1, lambda: timeline.sleep(3.0))
    timeline.run()
    assert log == [True]
    assert not timeline.is_dead


def test_a_paused_program_goes_on_when_the_pause_is_over():
    timeline, log = Timeline(), []

    def program():
        for _ in range(3):
            timeline.sleep(1.0)
            log.append(timeline.now)

    victim = timeline.start(0, program)
    timeline.at(1.5, lambda: setattr(victim, "paused_until", 4.0))
    timeline.run()
    assert log == [1.0, 4.0, 5.0]


def test_what_on_end_raises_ends_all_programs():
    timeline, log = Timeline(), []

    def other():
        try:
            timeline.sleep(100.0)
        finally:
            log.append(timeline.now)

    def fails():
        timeline.sleep(1.0)
        raise ValueError("first")

    timeline.on_end = raise_errors
    programs = [timeline.start(0, other), timeline.start(1, fails)]
    with pytest.raises(ValueError, match="first"):
        timeline.run()
    assert log == [1.0], "the other was ended then and there"
    assert all(program.ended for program in programs)


def test_an_interrupt_of_the_cleanup_still_restores_the_process(monkeypatch):
    timeline = Timeline()

    def program():
        torch.set_grad_enabled(False)
        timeline.sleep(1.0)

    def interrupted(program):
        raise KeyboardInterrupt

    timeline.start(0, program)
    monkeypatch.setattr(SimProgram, "throw", interrupted)
    timeline.at(0.5, lambda: interrupted(None))
    with pytest.raises(KeyboardInterrupt):
        timeline.run()
    assert torch.is_grad_enabled()


def test_a_program_can_start_another():
    timeline, log = Timeline(), []

    def child():
        timeline.sleep(1.0)
        log.append(timeline.now)

    def parent():
        timeline.sleep(2.0)
        timeline.start(1, child, at=timeline.now + 1.0)

    run(timeline, [parent])
    assert log == [4.0]
