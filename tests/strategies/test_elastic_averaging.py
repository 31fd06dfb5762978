"""What EASGD and EAMSGD share: options, the default force, the warning, and the limits it rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import Hand, hands, quadratic, slope

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Leasing
from manyhands.strategies.easgd import EASGD
from manyhands.strategies.elastic_averaging import ElasticState
from manyhands.testing.threads import ScriptedTurns


def warnings_of(spec: str, workers: int) -> list[list[str]]:
    """Each rank's."""
    strategy = strategy_of(spec)
    start, output = type(strategy).start, [[] for _ in range(workers)]

    class Listening(type(strategy)):  # type: ignore[misc]
        name = strategy.name

        def start(self, replica: Any, worker: Any) -> Any:
            worker.emit = lambda type, **values: output[worker.rank].append(values["message"])
            return start(self, replica, worker)

    hands(Listening(**vars(strategy)), [slope(1.0)] * workers, lambda hand: None)
    return output


@pytest.mark.parametrize(
    ("spec", "workers", "number"),
    [
        ("easgd:alpha=.51,bound=0", 3, "alpha=0.51 is above 0.5"),
        ("easgd:alpha=.51,via=group", 3, "alpha=0.51 is above 0.5"),
        ("eamsgd:alpha=.41,via=group", 4, "alpha=0.41 is above 0.4"),
        ("easgd:alpha=1.01", 3, "alpha=1.01 is above 1,"),
    ],
)
def test_a_force_that_no_rate_makes_stable_is_warned_of_with_the_number(spec: str, workers: int, number: str) -> None:
    first, *others = warnings_of(spec, workers)
    assert number in first[0]
    assert f"leave it out (then it is {0.9 / workers:.4g})" in first[0]
    assert not any(others)


@pytest.mark.parametrize("spec", ["easgd", "easgd:alpha=.5,bound=0", "easgd:via=group", "eamsgd:alpha=1"])
def test_up_to_the_limit_nothing_is_said(spec: str) -> None:
    assert warnings_of(spec, 3) == [[], [], []]


def limit_in_step(workers: int, h: float) -> float:
    """The largest α for a curvature λ and rate η, h = ηλ; for one worker it is the paper's (4 - 2h)/(4 - h)."""
    return (4 - 2 * h) / (2 * (workers + 1) - workers * h)


@pytest.mark.parametrize(("factor", "converges"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize(("workers", "h"), [(1, 0.4), (2, 0.4)])
def test_the_limit_in_step_is_the_closed_form(workers: int, h: float, factor: float, converges: bool) -> None:
    """1 % below and above it; and for small steps it is 2/(N + 1), of which the warning speaks."""
    assert limit_in_step(workers, 1e-9) == pytest.approx(2 / (workers + 1))
    alpha = limit_in_step(workers, h) * factor

    def program(hand: Hand) -> list[float]:
        for _ in range(300):
            hand.tick()
        return float((hand.x - hand.center).abs())

    ends = hands(f"easgd:period=1,alpha={alpha},via=group", [quadratic([1.0])] * workers, program, start=[1.0], rate=h)
    assert max(ends) < 0.1 if converges else max(ends) > 10


def test_the_default_force_is_a_share_of_all_workers() -> None:
    """β = .9: with 3 workers each difference is .3 of the distance."""

    def program(hand: Hand) -> float:
        for _ in range(2):
            hand.tick()
        return float(hand.center)

    ends = hands("easgd:period=1,bound=0", [slope(-1.0)] * 3, program)  # the force is of x=.1, which all have
    assert ends == pytest.approx([0.9 * 0.1] * 3)


def test_a_worker_that_begins_later_begins_at_the_center_as_it_is_then() -> None:
    """With warmup, worker 0 has trained alone: the others do not draw the center back to where all began."""
    turns = ScriptedTurns([0] * 8 + [1] * 2)

    def program(hand: Hand) -> tuple[float, float]:
        for _ in range(4 if hand.worker.rank == 0 else 1):
            with turns.take(hand.worker.rank):
                hand.gradient()
                seen = float(hand.x)
            with turns.take(hand.worker.rank):
                hand.exchange()
        hand.worker.group.barrier()
        return seen, float(hand.center)

    (_, center), (seen, _) = hands("easgd:period=2,alpha=.5,warmup=4", [slope(-1.0)] * 2, program)
    assert seen == center == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"period": 0}, "period must be a whole number of at least 1"),
        ({"alpha": 0.0}, "alpha must be a number above 0, or none"),
        ({"via": "mail"}, "via must be server or group"),
        ({"via": "group", "bound": 0}, "have no effect with via=group"),
        ({"via": "group", "warmup": 5}, "have no effect with via=group"),
        ({"bound": 0, "warmup": 5}, "give bound=1 or more, or no warmup"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        EASGD(**options)


def test_what_it_wants() -> None:
    assert strategy_of("easgd:warmup=3").leasing() == Leasing(rank0_warmup_ticks=3)
    assert strategy_of("easgd:bound=0").leasing() is None
    group = strategy_of("easgd:via=group")
    assert (group.server(), group.leasing()) == (None, None)


def test_with_another_number_of_workers_the_window_begins_anew() -> None:
    memory = [FlatVector([torch.zeros(1)])]
    states = [ElasticState(center=FlatVector([torch.full((1,), 5.0)]), ticks=2, steps=3, inside=True) for _ in range(2)]
    merged = ElasticState(center=FlatVector([torch.zeros(1)]), memory=memory).merge(states, 2, 3)
    assert (merged.ticks, merged.steps, merged.inside, float(merged.center.joined())) == (0, 0, False, 5.0)
    assert merged.memory is memory
