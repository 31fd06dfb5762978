"""Virtual time: programs take turns by what is due, in an order that the seed draws; some are killed, and nobody hangs unnoticed."""

from typing import Any

import pytest
import torch
from sim_world import run

from manyhands.engines.sim.timeline import SimProgram, Timeline


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


def test_what_is_cancelled_takes_no_time() -> None:
    timeline, log = Timeline(), list[Any]()
    due = timeline.at(5.0, lambda: log.append("cancelled"))
    due.cancel()
    due.cancel()
    timeline.at(1.0, lambda: log.append("happened"))
    while timeline.advance():
        pass
    assert (log, timeline.now) == (["happened"], 1.0)


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
