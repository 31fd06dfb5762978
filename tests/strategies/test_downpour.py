"""Downpour on mathematics that a hand can check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from by_hand import F64, ROW, Hand, hands, quadratic, scripted, slope
from torch import Tensor

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.base import Leasing
from manyhands.strategies.downpour import Downpour, DownpourState
from manyhands.testing.threads import ScriptedTurns

CURVATURE = [1.0, 2.0, 5.0]


def ends_of(spec: str, losses: Sequence[Any], ticks: int, **options: Any) -> list[Tensor]:
    """[dimensions] the center at the end, as each worker sees it."""

    def program(hand: Hand) -> Tensor:
        for _ in range(ticks):
            hand.tick()
        hand.finish()
        return hand.center

    return hands(spec, losses, program, **options)


def sequential(steps: int) -> Tensor:
    w = torch.ones(3, dtype=F64)
    for _ in range(steps):
        w = w - 0.1 * torch.tensor(CURVATURE, dtype=F64) * w
    return w


def vector(number: float) -> FlatVector:
    return FlatVector([torch.tensor([number])])


def test_one_worker_is_sequential_sgd() -> None:
    """CASE 7; also where a pull comes before the push: the own updates stay."""
    for every in ("push_every=5,pull_every=5", "push_every=2,pull_every=5", "push_every=5,pull_every=2"):
        (center,) = ends_of(f"downpour:{every}", [quadratic(CURVATURE)], 20, start=[1.0] * 3)
        assert (center - sequential(20)).abs().max() < 1e-15, every


def test_with_adagrad_on_the_server_it_is_not() -> None:
    """CASE 7: but its center is where Adagrad goes with the accumulated gradients, to the last bit of the formula."""
    spec = "downpour:push_every=5,pull_every=5,rule=adagrad,outer_rate=.1"
    (center,) = ends_of(spec, [quadratic(CURVATURE)], 20, start=[1.0] * 3)
    assert (center - sequential(20)).abs().max() > 0.01
    a, w, total = torch.tensor(CURVATURE, dtype=F64), torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64)
    for _ in range(4):
        gradient, local = torch.zeros(3, dtype=F64), w
        for _ in range(5):
            gradient, local = gradient + a * local, local - 0.1 * a * local
        total = total + gradient**2
        w = w - 0.1 * gradient / (total.sqrt() + 1e-10)
    assert (center - w).abs().max() < 1e-14


@pytest.mark.parametrize("rule", ["add", "adagrad"])
def test_each_push_carries_its_own_window_only(rule: str) -> None:
    """CASES 24, 26: two workers at a constant gradient of 1 push the same again and again, not ever more."""
    seen: list[float] = []

    def program(hand: Hand) -> None:
        push = hand.worker.server.push
        hand.worker.server.push = lambda update, *rest, **options: (
            seen.append(float(update[0])),
            push(update, *rest, **options),
        )[1]
        for _ in range(10):
            hand.tick()
        hand.finish()

    hands(f"downpour:push_every=5,pull_every=5,rule={rule}", [slope(1.0)] * 2, program)
    assert seen == pytest.approx([-0.5] * 4 if rule == "add" else [5.0] * 4)


def test_updates_add() -> None:
    """CASE 24: two workers move the center twice as far as one, not four times and not once."""
    ends = ends_of("downpour:push_every=5,pull_every=5", [slope(1.0)] * 2, 10)
    assert float(ends[0]) == pytest.approx(-0.1 * 10 * 2)


def test_a_short_last_window_enters_and_an_empty_one_or_a_tick_without_rows_does_not() -> None:
    """Seven ticks with a push every 5: the last two enter at the epoch's end, once. CASE 27"""

    def program(hand: Hand) -> tuple[float, int]:
        for _ in range(7):
            hand.tick()
        hand.finish()
        hand.worker.server.activate()
        hand.finish()
        return float(hand.center), len(hand.worker.server.drain_journal()["pushes"])

    assert hands("downpour:push_every=5,pull_every=5", [slope(1.0)], program)[0] == (pytest.approx(-0.7), 2)

    def once(hand: Hand) -> int:
        for tick in range(4):
            hand.tick(ROW if tick == 1 else None)
        hand.finish()
        return len(hand.worker.server.drain_journal()["pushes"])

    assert hands("downpour:bound=0", [slope(1.0)], once) == [1]


def test_a_scripted_order_shows_the_stale_gradient() -> None:
    """Both pull w=1, then both push: the second gradient is of the old center. (1 - .1·1) - .1·1 = .8, twice: .8 - 2·.08"""
    ends = hands("downpour", [quadratic([1.0])] * 2, scripted([0, 1, 0, 1] * 2, 2), start=[1.0])
    assert [float(end) for end in ends] == pytest.approx([0.64, 0.64], abs=1e-15)


def test_after_a_push_without_a_pull_the_worker_goes_on_from_where_it_is() -> None:
    """Worker 1 pushes between; worker 0, which pulls every 3 ticks, does not see it before."""
    order = [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    seen: list[float] = []

    def program(hand: Hand) -> None:
        turns = hand.worker.rank
        for _ in range(1 if turns else 4):
            with baton.take(turns):
                hand.gradient()
                if not turns:
                    seen.append(float(hand.x))
            with baton.take(turns):
                hand.exchange()

    baton = ScriptedTurns(order)
    hands("downpour:push_every=1,pull_every=3", [slope(1.0)] * 2, program)
    assert seen == pytest.approx([0.0, -0.1, -0.2, -0.4])


@pytest.mark.parametrize("rule", ["add", "adagrad,outer_rate=.1", "sgd,outer_rate=.5,outer_momentum=.5"])
def test_bound_0_is_the_synchronous_form_on_any_number_of_shards(rule: str) -> None:
    """CASE 11: the same bits whatever the workers' speeds, here those of the scheduler, and staleness 0."""
    losses = [quadratic([1.0, 2.0], [float(b), -b]) for b in range(3)]

    def program(hand: Hand) -> tuple[Tensor, list[int]]:
        for _ in range(6):
            hand.tick()
        hand.worker.group.barrier()
        hand.finish()
        return hand.center, hand.worker.server.drain_journal()["staleness"]

    ends = [
        hands(f"downpour:bound=0,rule={rule}", losses, program, start=[1.0, 1.0], shards=shards) for shards in (1, 2, 1)
    ]
    for run in ends:
        for center, staleness in run:
            assert torch.equal(center, ends[0][0][0])
            assert not any(staleness)
    if rule == "add":
        w, a = torch.ones(2, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)
        for _ in range(6):
            w = w - 0.1 * sum(a * (w - torch.tensor([float(b), -b], dtype=F64)) for b in range(3))
        assert (ends[0][0][0] - w).abs().max() < 1e-13


def test_with_another_number_of_workers_all_begin_anew() -> None:
    state = DownpourState(start=vector(1.0), accrued=vector(1.0), ticks=3, steps=2, weight=2.0, stale=False)
    others = [DownpourState(start=vector(1.0), accrued=vector(1.0), ticks=3, steps=2) for _ in range(2)]
    merged = state.merge(others, 0, 3)
    assert (merged.steps, merged.stale, float(merged.accrued.joined())) == (0, True, 0.0)
    assert state.merge(others, 1, 2) is others[1]


def test_options_that_cannot_be_are_refused() -> None:
    for options, problem in [
        ({"push_every": 0}, "push_every must be a whole number of at least 1, not 0"),
        ({"pull_every": 1.5}, "pull_every must be"),
        ({"bound": -1}, "bound must be a whole number of 0 or more, or none"),
        ({"warmup": -1}, "warmup must be"),
        ({"bound": 0, "warmup": 5}, "give bound=1 or more, or no warmup"),
        ({"rule": "lbfgs"}, "rule must be one of add, adagrad, sgd"),
        ({"outer_rate": 0.5}, "rule add has no outer_rate"),
        ({"rule": "sgd", "outer_rate": 0.0}, "outer_rate must be a number above 0"),
        ({"rule": "adam", "outer_momentum": 0.5}, "rule adam has no outer_momentum"),
        ({"rule": "sgd", "outer_momentum": 1.0}, "below 1"),
        ({"overlap": True, "bound": 0}, "overlap=true lets a worker compute while it exchanges, and bound=0"),
    ]:
        with pytest.raises(BadInput, match=problem):
            Downpour(**options)


def test_what_it_wants_and_its_rate_factor() -> None:
    assert Downpour().server().bound is None
    assert (Downpour(warmup=7).leasing(), Downpour(bound=0).leasing()) == (Leasing(rank0_warmup_ticks=7), None)
    assert Downpour(rule="adamw").server().options == {"optimizer": "AdamW", "rate": 1e-3, "momentum": 0.0}
    assert [Downpour(rule=rule).server().options["rate"] for rule in ("adagrad", "sgd")] == [0.01, 1.0]
    halved = {"rule": "sgd", "outer_rate": 0.5}
    for options, factor in (({}, 4), (halved, 2), ({**halved, "outer_momentum": 0.5}, 4), ({"rule": "adagrad"}, 4)):
        assert Downpour(**options).rate_factor(4) == factor, options
    assert Downpour(**halved, outer_momentum=0.5, bound=0).rate_factor(4) == 1
