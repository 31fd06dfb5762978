"""EASGD and EAMSGD on mathematics that a hand can check, and in whole runs."""

from collections.abc import Iterator

import pytest
import torch
from by_hand import ROW, Hand, close, hands, path_of, quadratic, slope
from torch import Tensor
from torch.utils.data import IterableDataset

import manyhands as mh
import plain
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.elastic_averaging import ElasticState
from manyhands.testing.threads import ScriptedTurns

SHIFTS = (-1.0, 0.0, 4.0)
LOSSES = [quadratic([2.0], [b]) for b in SHIFTS]


def test_both_ways_follow_the_papers_formulas_step_by_step() -> None:
    """v ← δv - ηg(x + δv); x ← x + v - α(x - c); c ← c + Σ α(x - c), all of the old values: the force is of x, not of the
    point looked ahead to. (CASE 11)

    CASE 6: at rest v is the force α·d, so that d = h / (α(1-δ) + h + hδα)·(b - mean), with h = ηλ.
    """
    for name, momentum in (("easgd:", 0.0), ("eamsgd:momentum=.5,", 0.5)):
        for via in ("bound=0", "via=group"):
            paths = hands(f"{name}period=1,alpha=.2,{via}", LOSSES, path_of(70, ends=1), start=[1.0])
            xs, vs, c = [1.0] * 3, [0.0] * 3, 1.0
            for tick in range(5):
                force = [0.2 * (x - c) for x in xs]
                vs = [momentum * v - 0.1 * 2 * (x + momentum * v - b) for x, v, b in zip(xs, vs, SHIFTS, strict=True)]
                xs = [x + v - f for x, v, f in zip(xs, vs, force, strict=True)]
                c += sum(force)
                assert close([path[tick] for path in paths], [(x, c) for x in xs]), (name, via, tick)
            away = 0.2 / (0.2 * (1 - momentum) + 0.2 + 0.2 * momentum * 0.2)
            assert close([path[-1] for path in paths], [(1.0 + away * (b - 1), 1.0) for b in SHIFTS], 1e-4), (name, via)


def test_without_force_momentum_is_nesterovs_and_a_tick_without_rows_leaves_it() -> None:
    """v = δv - ηg(x + δv), x = x + v, by hand."""
    rows = [tick != 2 for tick in range(30)]

    def program(hand: Hand) -> list[float]:
        path = []
        for there in rows:
            hand.tick(ROW if there else None)
            path.append(float(hand.x))
        return path

    for spec in ("eamsgd:alpha=1e-300,momentum=.9", "eamsgd:period=99,momentum=.9,via=group"):
        (path,) = hands(spec, LOSSES[1:2], program, start=[1.0])
        x, v = 1.0, 0.0
        for found, there in zip(path, rows, strict=True):
            if there:
                v = 0.9 * v - 0.1 * 2 * (x + 0.9 * v)
                x += v
            assert found == pytest.approx(x, abs=1e-14), spec


def test_it_exchanges_at_steps_0_tau_and_2_tau() -> None:
    """Algorithm 1 by hand, τ=4, α=.3, 12 steps: (x - 5)² / 2 from 2. One step earlier, the center would be 2.9184."""
    for where in ("bound=none", "bound=0", "via=group"):
        spec = f"easgd:period=4,alpha=.3,{where}"
        (path,) = hands(spec, [quadratic([1.0], [5.0])], path_of(12, ends=1), start=[2.0])
        x = center = 2.0
        for step in range(12):
            force = 0.3 * (x - center) if step % 4 == 0 else 0.0
            x, center = x - 0.1 * (x - 5) - force, center + force
            assert close(path[step], (x, center)), where
        assert path[-1] == path[-2], where
        assert path[-1][1] == pytest.approx(2.6615, abs=5e-5), where


def test_alone_at_its_own_pace_a_window_cut_short_is_closed_without_a_gradient() -> None:
    """A constant gradient of -1, η=.1, α=.5, period 3: at step 3 x is .3, so both move by .15; steps count from the end."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for _ in range(2):
            path += path_of(4)(hand)
            for _ in range(2):
                path += path_of(0, ends=1)(hand)
                hand.worker.server.activate()
        return path

    expected = [(0.1, 0), (0.2, 0), (0.3, 0), (0.25, 0.15), (0.2, 0.2), (0.2, 0.2)]
    expected += [(0.3, 0.2), (0.4, 0.2), (0.5, 0.2), (0.45, 0.35), (0.4, 0.4), (0.4, 0.4)]
    assert close(hands("easgd:period=3,alpha=.5", [slope(-1.0)], program)[0], expected)


def test_who_has_not_moved_or_has_no_rows_takes_no_part() -> None:
    """CASE 27: it does not draw the center to where it stands, and a round of nobody moves nothing."""
    rows = ("000111", "010101", "000000")

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for there in rows[hand.worker.rank]:
            hand.tick(ROW if there == "1" else None)
            path.append((float(hand.x), float(hand.center)))
        return path

    xs, c, wanted = [0.0] * 3, 0.0, []
    for tick in range(6):
        has = [one[tick] == "1" for one in rows]
        force = [0.2 * (x - c) if x and there else 0.0 for x, there in zip(xs, has, strict=True)]
        xs = [x + 0.1 * there - f for x, there, f in zip(xs, has, force, strict=True)]
        c += sum(force)
        wanted.append([(x, c) for x in xs])
    for where in ("bound=0", "via=group"):
        paths = hands(f"easgd:period=1,alpha=.2,{where}", [slope(-1.0)] * 3, program)
        assert close(zip(*paths, strict=True), wanted), where


def test_a_force_that_no_rate_makes_stable_is_warned_of_with_the_number() -> None:
    task = plain.task(train_data=plain.rows(24), epochs=1)
    for spec, workers, number in [
        ("easgd:period=1,alpha=.51,bound=0", 3, "alpha=0.51 is above 0.5"),
        ("eamsgd:period=1,alpha=.41,via=group", 4, "alpha=0.41 is above 0.4"),
        ("easgd:period=1,alpha=1.01", 3, "alpha=1.01 is above 1,"),
    ]:
        (warning,) = mh.train(task, strategy=spec, workers=workers, engine="sim").info["warnings"]
        assert number in warning
        assert f"leave it out (then it is {0.9 / workers:.4g})" in warning
    for spec in ("easgd:", "easgd:alpha=.5,bound=0,", "easgd:via=group,", "eamsgd:alpha=1,"):
        run = mh.train(task, strategy=f"{spec}period=1", workers=3, engine="sim")
        assert run.info["warnings"] == [], spec


def test_the_limit_in_step_is_the_closed_form() -> None:
    """1 % below and above it, with h = ηλ = .4; for small steps it is 2/(N + 1), of which the warning speaks."""

    def apart(hand: Hand) -> float:
        for _ in range(300):
            hand.tick()
        return abs(float(hand.x) - float(hand.center))

    for workers, factor in ((1, 0.99), (1, 1.01), (2, 0.99), (2, 1.01)):
        limit = 3.2 / (2 * (workers + 1) - workers * 0.4)  # for one worker the paper's (4 - 2h)/(4 - h)
        spec = f"easgd:period=1,alpha={limit * factor},via=group"
        found = hands(spec, [quadratic([1.0])] * workers, apart, start=[1.0], rate=0.4)[0]
        assert found < 0.1 if factor < 1 else found > 10, (workers, factor)


def test_the_default_force_is_a_share_of_all_workers() -> None:
    """β = .9: with 3 workers each difference is .3 of the distance; the force is of x=.1, which all have."""
    paths = hands("easgd:period=1,bound=0", [slope(-1.0)] * 3, path_of(2))
    assert [path[-1][1] for path in paths] == pytest.approx([0.9 * 0.1] * 3)


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


def test_with_another_number_of_workers_the_window_begins_anew() -> None:
    memory = [FlatVector([torch.zeros(1)])]
    states = [
        ElasticState(center=FlatVector([torch.full((1,), 5.0)]), ticks=2, moved=True, inside=True) for _ in range(2)
    ]
    merged = ElasticState(center=FlatVector([torch.zeros(1)]), memory=memory).merge(states, 2, 3)
    assert (merged.ticks, merged.moved, merged.inside, float(merged.center.joined())) == (0, False, False, 5.0)
    assert merged.memory is memory


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*plain.rows(8), strict=True)


def test_in_step_both_ways_are_one_algorithm_with_uneven_slices() -> None:
    """Batches of 2 rows on 2 workers: the last one of an epoch leaves a worker without rows, also where an exchange is due."""
    for name, rows, epochs in (("easgd", 9, 3), ("eamsgd", 7, 5)):
        task = plain.task(train_data=plain.rows(rows), batch_size=2, epochs=epochs)
        one, other = (
            mh.train(task, strategy=f"{name}:{way}", workers=2, engine="sim").parameters
            for way in ("bound=0", "via=group")
        )
        assert (one - other).abs().max() < 1e-12, (rows, epochs)


def test_the_end_of_a_stream_is_seen_where_an_exchange_is_due() -> None:
    """Two epochs of 4 batches and a tick that finds no rows; without the bits of that exchange it took hundreds."""
    task = plain.task(train_data=Stream(), batch_size=2, epochs=2)
    run = mh.train(task, strategy="easgd:via=group,period=4", workers=2, engine="sim")
    assert (run.rows["total"], len(run.history)) == (16, 10)


def test_a_period_as_long_as_the_training_is_a_warning() -> None:
    """Its exchange would come with the next step: the answer is the start."""
    task = plain.task(train_data=plain.rows(8), batch_size=2, epochs=1)
    run = mh.train(task, strategy="easgd:via=group,period=4", workers=2, engine="sim")
    assert "its answer is where it began" in run.info["warnings"][0]
    assert mh.train(task, strategy="easgd:via=group,period=3", workers=2, engine="sim").info["warnings"] == []
