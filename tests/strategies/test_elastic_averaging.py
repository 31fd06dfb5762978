"""What EASGD and EAMSGD share: options, the default force, the warning, and the limits it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_hand import Hand, hands, path_of, quadratic, slope
from torch import Tensor
from torch.utils.data import IterableDataset

import manyhands as mh
import plain
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
    output: list[list[str]] = [[] for _ in range(workers)]

    class Listening(type(strategy)):  # type: ignore[misc]
        name = strategy.name

        def start(self, replica: Any, worker: Any) -> Any:
            worker.emit = lambda type, **values: output[worker.rank].append(values["message"])
            return super().start(replica, worker)

    hands(Listening(**vars(strategy)), [slope(1.0)] * workers, lambda hand: None)
    return output


def test_a_force_that_no_rate_makes_stable_is_warned_of_with_the_number() -> None:
    for spec, workers, number in [
        ("easgd:alpha=.51,bound=0", 3, "alpha=0.51 is above 0.5"),
        ("eamsgd:alpha=.41,via=group", 4, "alpha=0.41 is above 0.4"),
        ("easgd:alpha=1.01", 3, "alpha=1.01 is above 1,"),
    ]:
        first, *others = warnings_of(spec, workers)
        assert number in first[0]
        assert f"leave it out (then it is {0.9 / workers:.4g})" in first[0]
        assert not any(others), spec
    for spec in ("easgd", "easgd:alpha=.5,bound=0", "easgd:via=group", "eamsgd:alpha=1"):
        assert warnings_of(spec, 3) == [[], [], []], spec


@pytest.mark.parametrize(("workers", "h"), [(1, 0.4), (2, 0.4)])
def test_the_limit_in_step_is_the_closed_form(workers: int, h: float) -> None:
    """1 % below and above it, with h = ηλ; for small steps it is 2/(N + 1), of which the warning speaks."""
    limit = (4 - 2 * h) / (2 * (workers + 1) - workers * h)  # for one worker the paper's (4 - 2h)/(4 - h)
    for factor in (0.99, 1.01):
        spec = f"easgd:period=1,alpha={limit * factor},via=group"
        path = hands(spec, [quadratic([1.0])] * workers, path_of(300), start=[1.0], rate=h)[0]
        apart = abs(path[-1][0] - path[-1][1])
        assert apart < 0.1 if factor < 1 else apart > 10


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


def test_options_and_what_it_wants() -> None:
    for options, problem in [
        ({"period": 0}, "period must be a whole number of at least 1"),
        ({"alpha": 0.0}, "alpha must be a number above 0, or none"),
        ({"via": "mail"}, "via must be server or group"),
        ({"via": "group", "bound": 0}, "have no effect with via=group"),
        ({"via": "group", "warmup": 5}, "have no effect with via=group"),
        ({"bound": 0, "warmup": 5}, "give bound=1 or more, or no warmup"),
    ]:
        with pytest.raises(BadInput, match=problem):
            EASGD(**options)
    assert EASGD(warmup=3).leasing() == Leasing(rank0_warmup_ticks=3)
    assert EASGD(bound=0).leasing() is None
    assert (EASGD(via="group").server(), EASGD(via="group").leasing()) == (None, None)


def test_with_another_number_of_workers_the_window_begins_anew() -> None:
    memory = [FlatVector([torch.zeros(1)])]
    states = [
        ElasticState(center=FlatVector([torch.full((1,), 5.0)]), ticks=2, moved=True, inside=True) for _ in range(2)
    ]
    merged = ElasticState(center=FlatVector([torch.zeros(1)]), memory=memory).merge(states, 2, 3)
    assert (merged.ticks, merged.moved, merged.inside, float(merged.center.joined())) == (0, False, False, 5.0)
    assert merged.memory is memory


# -- whole trainings -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*plain.rows(8), strict=True)


@pytest.mark.parametrize("name", ["easgd", "eamsgd"])
def test_in_step_both_ways_are_one_algorithm_with_uneven_slices(name: str) -> None:
    """Batches of 2 rows on 2 workers: the last one of an epoch leaves a worker without rows, also where an exchange is due."""
    for rows, epochs in ((9, 3), (8, 2), (7, 5)):
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
