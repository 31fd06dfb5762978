"""Gossip in pairs on mathematics that a hand can check, and as runs that go on with another number of workers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_hand import Hand, hands, slope

from manyhands.checkpoint import checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.testing.threads import ScriptedTurns


def test_two_workers_at_their_own_pace_by_hand() -> None:
    """Each at a slope of -1, η=.1. Worker 1's first gradient and step know nothing of worker 0's; worker 0 finds at its second
    exchange what worker 1 did to its vector meanwhile."""
    turns = ScriptedTurns([0, 1, 0, 1, 0, 0])

    def program(hand: Hand) -> tuple[list[float], float]:
        path = []
        for _ in range(2 - hand.worker.rank):
            with turns.take(hand.worker.rank):
                hand.gradient()
            with turns.take(hand.worker.rank):
                hand.exchange()
                path.append(float(hand.x))
        hand.worker.group.barrier()
        hand.finish()
        return path, float(hand.center)

    (first, center), (second, same) = hands("gossip:graph=pairs", [slope(-1.0)] * 2, program)
    assert first == pytest.approx([0.1, 0.2], abs=1e-15)  # (.05 + .15) / 2 + .1
    assert second == pytest.approx([0.15], abs=1e-15)  # (.1 + 0) / 2 + .1
    assert center == same == pytest.approx(0.15)  # three steps of .1 by two workers


def test_alone_a_worker_keeps_its_own_bits() -> None:
    """The sum of what steps moved is not always rounded as the steps were, so the server's answer is not taken over."""

    def program(hand: Hand) -> tuple[float, float]:
        server, push = hand.worker.server, hand.worker.server.push
        server.push = lambda *given, **named: replace(
            push(*given, **named), answer=torch.full_like(given[0], torch.nan)
        )
        for _ in range(3):
            hand.tick()
        return float(hand.x), float(hand.center)

    assert hands("gossip:graph=pairs", [slope(-1.0)], program) == [(0.1 + 0.1 + 0.1,) * 2]


def test_in_whatever_order_nothing_is_lost() -> None:
    """The center moves by a N-th of every worker's steps: 3 workers, 7 steps of .1, .2 and .3, an open window included."""

    def program(hand: Hand) -> float:
        for _ in range(7):
            hand.tick()
        hand.worker.group.barrier()
        hand.finish()
        hand.worker.group.barrier()
        return float(hand.center)

    for options, shards in (("", 1), (",period=3", 2), (",bound=0", 1), (",period=3,bound=0", 2)):
        ends = hands(f"gossip:graph=pairs{options}", [slope(-1.0), slope(-2.0), slope(-3.0)], program, shards=shards)
        assert ends == pytest.approx([7 * 0.2] * 3, abs=1e-13), (options, shards)


def written(folder: Path, spec: str, slopes: list[float], ticks: list[int]) -> Checkpoint:
    """By workers at `slopes` that made so many ticks each, in rank order."""
    turns = ScriptedTurns([rank for rank, count in enumerate(ticks) for _ in range(count)])

    def program(hand: Hand) -> None:
        rank, server = hand.worker.rank, hand.worker.server
        for _ in range(ticks[rank]):
            with turns.take(rank):
                hand.tick()
        hand.worker.group.barrier()
        tensors, values = run_state.capture(hand.replica, hand.state, {"total": None})
        if rank == 0:
            shared, values["server"] = run_state.capture_server(server, hand.replica)
            tensors |= shared
        checkpoints.save(folder, 1, hand.worker.group, tensors, values)

    hands(spec, [slope(-value) for value in slopes], program)
    return Checkpoint(folder / "step-00000001", 1, len(ticks))


def gone_on(saved: Checkpoint, spec: str, workers: int, ticks: int) -> list[tuple[float, list[float], float]]:
    """Where each of other workers stands after so many ticks at a slope of -1, what it calls the answer then, and at the end."""

    def program(hand: Hand) -> tuple[float, list[float], float]:
        rank, server = hand.worker.rank, hand.worker.server
        hand.state, _ = run_state.restore(saved, hand.replica, hand.state, rank, workers, None)
        if rank == 0:
            run_state.restore_server(saved, 0, server, hand.replica)
        hand.worker.group.barrier()
        answers = []
        for _ in range(ticks):
            answers.append(float(hand.center))
            hand.worker.group.barrier()
            hand.tick()
            hand.worker.group.barrier()
        hand.finish()
        hand.worker.group.barrier()
        return float(hand.x), answers, float(hand.center)

    return hands(spec, [slope(-1.0)] * workers, program)


def test_open_windows_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    """Every step enters the answer, a third of each of three workers', then an equal part of each of the others'."""
    slopes, spec = [1.0, 2.0, 3.0], "gossip:graph=pairs,period=4"
    for ticks in ([3, 3, 3], [0, 1, 9]):
        before = sum(0.1 * s * t for s, t in zip(slopes, ticks, strict=True)) / 3
        saved = written(tmp_path / str(ticks), spec, slopes, ticks)
        for workers, more in ((1, 0), (2, 1), (3, 6), (5, 6)):
            ends = [end for _, _, end in gone_on(saved, spec, workers, more)]
            assert ends == pytest.approx([before + 0.1 * more] * workers, abs=1e-13), (ticks, workers, more)


def test_one_worker_that_goes_on_from_several_holds_the_answer(tmp_path: Path) -> None:
    """Its replica is a mean of replicas that had not met since; the server knows better, and says so at the first exchange."""
    spec = "gossip:graph=pairs,period=2"
    saved = written(tmp_path, spec, [1.0, 2.0, 3.0], [5, 4, 3])
    ((end, answers, center),) = gone_on(saved, spec, 1, 5)
    closed = 0.1 * (1 * 4 + 2 * 4 + 3 * 2) / 3
    left = 0.1 * (1 * 1 + 3 * 1) / 3
    assert answers[0] == pytest.approx(closed, abs=1e-14)  # what is in an open window is in nobody's answer
    assert answers[1] == pytest.approx(closed + left + 0.1, abs=1e-14)
    assert end == center == pytest.approx(closed + left + 0.5, abs=1e-14)
