"""Virtual time: programs take turns by what is due, in an order that the seed draws; some are killed, and nobody hangs unnoticed."""

from typing import Any

import pytest
import torch
from sim_world import run

from manyhands.engines.sim.timeline import Killed, SimProgram, Timeline


def test_ties_are_drawn_by_the_seed() -> None:
    def order_of(seed: int) -> list[int]:
        timeline, log = Timeline(seed), []

        def program(rank: int) -> None:
            for _ in range(3):
                timeline.sleep(1.0)
                log.append(rank)

        run(timeline, [lambda rank=rank: program(rank) for rank in range(8)])
        return log

    log = order_of(1)
    assert order_of(1) == log != order_of(2)
    assert sorted(log[:8]) == sorted(log[8:16]) == list(range(8))
    assert log[:8] != log[8:16], "the same order at every tie: drawn once only"


def test_a_cell_wakes_who_waits_at_the_time_when_it_is_set() -> None:
    timeline = Timeline()
    cell, failing = timeline.cell(), timeline.cell()
    timeline.at(1.0, lambda: failing.fail(ValueError("no")))

    def waits() -> Any:
        with pytest.raises(ValueError, match="no"):
            timeline.wait(failing)
        return timeline.now, timeline.wait(cell), timeline.now

    def sets() -> Any:
        timeline.sleep(2.0)
        cell.set("first")
        cell.set("second")
        timeline.sleep(1.0)
        return timeline.wait(cell), timeline.now

    assert run(timeline, [waits, sets]) == [(1.0, "first", 2.0), ("first", 3.0)]


def test_what_is_cancelled_takes_no_time() -> None:
    timeline, log = Timeline(), list[Any]()
    due = timeline.at(5.0, lambda: log.append("cancelled"))
    due.cancel()
    due.cancel()
    timeline.at(1.0, lambda: log.append("happened"))
    while timeline.advance():
        pass
    assert (log, timeline.now) == (["happened"], 1.0)


def test_kill_runs_finally_blocks_and_is_no_error() -> None:
    """Who is killed before it begins never runs; nor is the dead woken by what it waited for."""
    timeline, log, ended = Timeline(), [], []
    cell = timeline.cell()

    def victim() -> None:
        try:
            timeline.wait(cell)
        except Exception:  # noqa: BLE001 - none comes: Killed is no error
            log.append("caught")
        finally:
            log.append(timeline.is_dead)
            with pytest.raises(Killed):
                timeline.sleep(1.0)
            log.append("did not wait")

    program, late = timeline.start(0, victim), timeline.start(1, lambda: log.append("ran"), at=5.0)
    timeline.start(2, lambda: timeline.sleep(4.5))
    timeline.at(3.0, program.kill)
    timeline.at(4.0, lambda: cell.set(1))
    timeline.at(4.2, late.kill)
    timeline.on_end = ended.append
    timeline.run()
    assert log == [True, "did not wait"]
    for one in (program, late):
        assert (one.killed, one.ended, one.error) == (True, True, None)
    assert ended[:2] == [program, late]
    assert timeline.now == 4.5
    assert not timeline.is_dead


def test_an_interrupt_of_the_cleanup_still_restores_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()

    def program() -> None:
        torch.set_grad_enabled(False)
        timeline.sleep(1.0)

    def interrupted(program: Any) -> None:
        raise KeyboardInterrupt

    timeline.start(0, program)
    monkeypatch.setattr(SimProgram, "throw", interrupted)
    timeline.at(0.5, lambda: interrupted(None))
    with pytest.raises(KeyboardInterrupt):
        timeline.run()
    assert torch.is_grad_enabled()
