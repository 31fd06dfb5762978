"""Downpour on mathematics that a hand can check."""

import pytest
import torch
from by_hand import F64, ROW, Hand, close, hands, quadratic, scripted, slope
from torch import Tensor

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.downpour import DownpourState
from manyhands.testing.threads import ScriptedTurns

CURVATURE = [1.0, 2.0, 5.0]


def end_of(spec: str) -> Tensor:
    """[dimensions] the center at the end, of one worker that made 20 steps from ones."""

    def program(hand: Hand) -> Tensor:
        for _ in range(20):
            hand.tick()
        hand.finish()
        return hand.center

    (center,) = hands(spec, [quadratic(CURVATURE)], program, start=[1.0] * 3)
    return center


def sequential(steps: int) -> Tensor:
    w = torch.ones(3, dtype=F64)
    for _ in range(steps):
        w = w - 0.1 * torch.tensor(CURVATURE, dtype=F64) * w
    return w


def test_one_worker_is_sequential_sgd() -> None:
    """CASE 7; also where a pull comes before the push: the own updates stay."""
    for every in ("push_every=5,pull_every=5", "push_every=2,pull_every=5", "push_every=5,pull_every=2"):
        assert close(end_of(f"downpour:{every}"), sequential(20), 1e-15), every


def test_with_adagrad_on_the_server_it_is_not() -> None:
    """CASE 7: but its center is where Adagrad goes with the accumulated gradients, to the last bit of the formula."""
    center = end_of("downpour:push_every=5,pull_every=5,rule=adagrad,outer_rate=.1")
    assert (center - sequential(20)).abs().max() > 0.01
    a, w, total = torch.tensor(CURVATURE, dtype=F64), torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64)
    for _ in range(4):
        gradient, local = torch.zeros(3, dtype=F64), w
        for _ in range(5):
            gradient, local = gradient + a * local, local - 0.1 * a * local
        total = total + gradient**2
        w = w - 0.1 * gradient / (total.sqrt() + 1e-10)
    assert (center - w).abs().max() < 1e-14


def test_each_push_carries_its_own_window_only() -> None:
    """CASES 24, 26: two workers at a constant gradient of 1 push the same again and again, not ever more."""
    for rule, pushed in (("add", -0.5), ("adagrad", 5.0)):
        seen: list[float] = []

        def program(hand: Hand, seen: list[float] = seen) -> None:
            push = hand.worker.server.push
            hand.worker.server.push = lambda update, *rest, **options: (
                seen.append(float(update[0])),
                push(update, *rest, **options),
            )[1]
            for _ in range(10):
                hand.tick()
            hand.finish()

        hands(f"downpour:push_every=5,pull_every=5,rule={rule}", [slope(1.0)] * 2, program)
        assert seen == pytest.approx([pushed] * 4), rule


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

    baton = ScriptedTurns([0, 0, 1, 1, 0, 0, 0, 0, 0, 0])
    hands("downpour:push_every=1,pull_every=3", [slope(1.0)] * 2, program)
    assert seen == pytest.approx([0.0, -0.1, -0.2, -0.4])


def test_bound_0_is_the_synchronous_form_on_any_number_of_shards() -> None:
    """CASE 11: the same bits whatever the workers' speeds, here those of the scheduler, and staleness 0."""
    losses = [quadratic([1.0, 2.0], [float(b), -b]) for b in range(3)]

    def program(hand: Hand) -> tuple[Tensor, list[int]]:
        for _ in range(6):
            hand.tick()
        hand.worker.group.barrier()
        hand.finish()
        return hand.center, hand.worker.server.drain_journal()["staleness"]

    for rule in ("adagrad,outer_rate=.1", "sgd,outer_rate=.5,outer_momentum=.5", "add"):
        spec = f"downpour:bound=0,rule={rule}"
        ends = [end for n in (1, 2, 1) for end in hands(spec, losses, program, start=[1.0, 1.0], shards=n)]
        for center, staleness in ends:
            assert torch.equal(center, ends[0][0]), rule
            assert not any(staleness), rule
    w, a = torch.ones(2, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)
    for _ in range(6):
        w = w - 0.1 * sum(a * (w - torch.tensor([float(b), -b], dtype=F64)) for b in range(3))
    assert close(center, w, 1e-13)


def test_with_another_number_of_workers_all_begin_anew() -> None:
    one = FlatVector([torch.ones(1)])
    state = DownpourState(start=one, accrued=one.clone(), ticks=3, steps=2, weight=2.0, stale=False)
    others = [DownpourState(start=one, accrued=one, ticks=3, steps=2) for _ in range(2)]
    merged = state.merge(others, 0, 3)
    assert (merged.steps, merged.stale, float(merged.accrued.joined())) == (0, True, 0.0)
    assert state.merge(others, 1, 2) is others[1]
