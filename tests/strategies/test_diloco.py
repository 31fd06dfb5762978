"""DiLoCo on mathematics that a hand can check: over the group, and over a server."""

from typing import Any

import pytest
import torch
from by_hand import ROW, Hand, Point, close, hands, path_of, quadratic, scripted, slope
from torch import Tensor

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import strategy_of
from manyhands.strategies.decoupled import ServedState
from manyhands.strategies.diloco import DiLoCo
from manyhands.testing.strategy_suite import StrategyWorker, run_workers
from manyhands.testing.threads import ScriptedTurns

SHIFTS = (-1.0, 0.0, 4.0)
LOSSES = [quadratic([2.0], [b]) for b in SHIFTS]


def centers(spec: str, losses: list[Any], ticks: int, **options: Any) -> list[float]:
    """The center after each tick and after the end, the same on all workers."""
    paths = [[center for _, center in path] for path in hands(spec, losses, path_of(ticks, ends=1), **options)]
    assert all(close(path, paths[0]) for path in paths)
    return paths[0]


def test_with_outer_rate_one_and_no_momentum_it_is_local_sgd() -> None:
    """CASE 5, with an inner optimizer whose state is kept, uneven slices, and a last window that is shorter."""

    def program(trainer: StrategyWorker) -> list[Tensor]:
        trainer.train(7)
        trainer.finish()
        return [trainer.consensus(), *trainer.tensors().values()]

    ours = run_workers(strategy_of("diloco:period=3,outer_rate=1.0,outer_momentum=0.0"), 3, program)
    theirs = run_workers(strategy_of("local-sgd:period=3,optimizer_state=kept"), 3, program)
    for mine, wanted in zip(ours, theirs, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert (a - b).abs().max() < 1e-13


def test_with_period_one_it_is_nesterov_sgd_on_the_mean_gradient() -> None:
    """CASE 5: inner rate .1 and outer rate .7 are one rate of .07."""
    point = Point([1.0])
    optimizer = torch.optim.SGD(point.parameters(), lr=0.07, momentum=0.9, nesterov=True)
    wanted = []
    for _ in range(12):
        point.w.grad = (2 * (point.w - 1.0)).detach()
        optimizer.step()
        wanted.append(float(point.w.detach()))
    for spec in ("diloco:period=1", "diloco:period=1,via=server,bound=0"):
        assert close(centers(spec, LOSSES, 12, start=[1.0]), [*wanted, wanted[-1]]), spec


def test_rounds_by_hand_all_go_on_from_the_center_and_an_epochs_end_closes_the_window() -> None:
    """A steady way of .1 a step: g=-.2, m=-.2, c=.7·(.2 + .9·.2)=.266; then m=-.38, c=.266 + .7·(.2 + .9·.38)=.6454."""
    for spec in ("diloco:period=2", "diloco:period=2,via=server"):
        assert close(centers(spec, [slope(-1.0)], 4), [0.0, 0.266, 0.266, 0.6454, 0.6454]), spec
    c = 0.266 + 0.7 * (0.1 + 0.9 * (0.1 + 0.9 * 0.2))
    for path in hands("diloco:period=2", [slope(-1.0)] * 2, path_of(3, ends=2)):
        assert close(path, [(0.1, 0.0), (0.266, 0.266), (0.366, 0.266), (c, c), (c, c)])


@pytest.mark.parametrize("spec", ["diloco:period=2", "diloco:period=2,via=server,bound=0"])
def test_the_mean_is_weighted_by_rows(spec: str) -> None:
    """3 + 1 rows go .1 a step, 1 + 1 rows .7: (4·.2 + 2·1.4) / 6."""

    def program(hand: Hand) -> float:
        for n in ((3, 1), (1, 1))[hand.worker.rank]:
            hand.tick(ROW.expand(n))
        hand.worker.group.barrier()
        return float(hand.center)

    spec += ",outer_rate=1.0,outer_momentum=0.0"
    assert close(hands(spec, [slope(-1.0), slope(-7.0)], program), [0.6, 0.6])


def test_with_equal_speeds_the_server_gives_what_the_group_gives() -> None:
    """Two windows of four ticks and one of two: at each tick all take their gradient, then all exchange."""
    wanted = centers("diloco:period=4", LOSSES, 10, start=[1.0])[-1]
    assert centers("diloco:period=4,via=server,bound=0", LOSSES, 10, start=[1.0])[-1] == pytest.approx(
        wanted, abs=1e-14
    )
    for options in ("quorum=3", "quorum=2", "quorum=3,grace=0,bound=2"):
        in_turn = scripted([0, 1, 2] * 2 * 10, 10)
        ends = hands(f"diloco:period=4,via=server,{options}", LOSSES, in_turn, start=[1.0])
        assert [float(end) for end in ends] == pytest.approx([wanted] * 3, abs=1e-14), options


def test_who_is_fast_goes_on_from_where_it_is_while_the_round_is_open() -> None:
    """Worker 0 makes three windows of .1 before worker 1 has made its one of .5; then both begin at the center.

    (3·.3 + 1·.5) / 4 = .35: three windows weigh three times, and went .3.
    """
    turns = ScriptedTurns([1, 0, 0, 0, 0, 0, 0, 1, 0, 1])
    spec = "diloco:period=1,via=server,quorum=2,outer_rate=1.0,outer_momentum=0.0"

    def program(hand: Hand) -> list[float]:
        path = []
        for act in [*(hand.gradient, hand.exchange) * (3 - 2 * hand.worker.rank), hand.gradient]:
            with turns.take(hand.worker.rank):
                act()
                path.append(float(hand.x))
        return path[::2]

    first, second = hands(spec, [slope(-1.0), slope(-5.0)], program)
    assert close(first, [0.0, 0.1, 0.2, 0.35])
    assert close(second, [0.0, 0.35])


def test_with_another_number_of_workers_the_open_windows_become_one() -> None:
    """What was moved and not pushed stays in: (3·2 + 1·4) / 4 beyond the mean start, with half of 4 rows on each of two."""

    def state(start: float, ticks: int, counted: float) -> ServedState:
        center, begun = (FlatVector([torch.tensor([number])]) for number in (0.0, start))
        return ServedState(center=center, start=begun, ticks=ticks, counted=counted, residual=torch.tensor([counted]))

    states = [state(1.0, 2, 3.0), state(5.0, 3, 1.0)]
    merged = state(0.0, 0, 0.0).merge(states, 0, 4)
    assert merged.residual is not None
    assert (float(merged.residual), float(merged.start.joined()), merged.ticks, merged.counted) == (2.0, 2.0, 3, 1.0)
    assert [one.weight_of_window() for one in states] == [3.0, 1.0]


@pytest.mark.parametrize(
    "spec",
    [
        "diloco:period=4,outer_rate=1.5,outer_momentum=.5",
        "diloco:period=4,via=server,bound=0,outer_momentum=.5",
        "diloco:period=4,streaming=1,overlap=0,mixing=.5,outer_momentum=.5",
        "diloco:period=4,streaming=2,overlap=3,mixing=.2,outer_momentum=.5",
    ],
)
def test_a_steady_way_is_gone_as_far_as_the_summary_says(spec: str) -> None:
    """How far the center goes in the last of 30 periods, in steps of .1 a tick."""
    strategy = strategy_of(spec)

    def program(hand: Hand) -> float:
        for tick in range(30 * strategy.period):
            if tick == 29 * strategy.period:
                before = float(hand.center.mean())
            hand.tick()
        return (float(hand.center.mean()) - before) / (0.1 * strategy.period)

    ways = hands(spec, [slope(-1.0)] * 2, program, start=[0.0] * 32)
    assert ways == pytest.approx([strategy.rate_factor(2)] * 2, rel=1e-6)


def test_a_steady_way_over_a_server_is_gone_as_far_as_the_summary_says() -> None:
    """Equally fast, one after the other, 12 windows each; no momentum, so that it is exact."""
    for quorum, grace, workers in [(1, 0, 3), (2, 0, 4), (2, 1, 3), (None, 0, 4)]:
        strategy = DiLoCo(period=1, via="server", quorum=quorum, grace=grace, outer_rate=0.5, outer_momentum=0.0)
        order = [rank for _ in range(12) for rank in range(workers) for _ in range(2)]
        ends = hands(strategy, [slope(-1.0)] * workers, scripted(order, 12))
        factor = strategy.rate_factor(workers)
        assert float(ends[0]) / (0.1 * 12) == pytest.approx(factor, abs=1e-12), (quorum, grace, workers)
