"""Fragments that are synced in turn, and on their way while workers go on."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import close, hands, path_of, slope
from torch import Tensor, nn

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.layout import Layout, layouts_of
from manyhands.strategies import strategy_of
from manyhands.strategies.streaming import GroupState, Schedule, cut
from manyhands.testing.strategy_suite import StrategyWorker, run_workers


def schedule(period: int, fragments: int, overlap: int = 0) -> Schedule:
    return Schedule(period=period, fragments=fragments, overlap=overlap, mixing=0.0, rate=1.0, momentum=0.0)


def test_each_fragment_is_due_once_a_period_and_never_two_at_once() -> None:
    for period, fragments in [(1, 1), (5, 1), (5, 2), (5, 5), (16, 3), (7, 4)]:
        due = [schedule(period, fragments).due(tick) for tick in range(1, 3 * period + 1)]
        assert [fragment for fragment in due if fragment is not None] == 3 * list(range(fragments)), (period, fragments)
        for fragment in range(fragments):
            ticks = [tick for tick, which in enumerate(due) if which == fragment]
            assert {b - a for a, b in pairwise(ticks)} <= {period}, (period, fragments)
        assert due[period - 1] == fragments - 1, (period, fragments)
        assert schedule(period, fragments).due(0) is None


def test_what_is_under_way_comes_in_the_order_in_which_it_was_started() -> None:
    under_way = [schedule(6, 3, overlap=4).under_way(tick) for tick in range(1, 9)]
    assert under_way == [[], [0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [2, 0]]


def layout(*sizes: int) -> Layout:
    """Parameters of so many times 128 bytes."""
    model = nn.Module()
    for i, size in enumerate(sizes):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size * 32)))
    return layouts_of(model)[0]


def test_fragments_are_of_about_the_same_length_and_cover_everything_once() -> None:
    for sizes, fragments, wanted in [
        ((4, 4, 4, 4), 2, [0, 8, 16]),
        ((3, 5, 4, 4), 4, [0, 3, 8, 12, 16]),  # between parameters where that is near enough
        ((1, 30, 1), 4, [0, 8, 16, 24, 32]),  # else through the middle of one
        ((3,), 3, [0, 1, 2, 3]),
        ((1, 2, 2), 4, [0, 1, 2, 3, 5]),
        ((7,), 1, [0, 7]),
    ]:
        assert cut(layout(*sizes), fragments) == [(32 * a, 32 * b) for a, b in pairwise(wanted)], sizes
    for sizes in ((1, 1, 2, 1), (5, 1, 1), (2, 9, 3, 1, 1)):
        made = layout(*sizes)
        for fragments in range(1, sum(sizes) + 1):
            pieces = cut(made, fragments)
            assert all(start < stop for start, stop in pieces), (sizes, fragments)
            assert [start for start, _ in pieces] + [made.padded] == [0] + [stop for _, stop in pieces]
    with pytest.raises(BadInput, match="streaming=4 cuts 96 numbers .* give at most 3"):
        cut(layout(2, 1), 4)


def test_one_fragment_that_is_waited_for_is_the_plain_form_bit_for_bit() -> None:
    def program(trainer: StrategyWorker) -> dict[str, Tensor]:
        trainer.train(8)
        held = {"the consensus within": trainer.consensus()}
        trainer.finish()
        return held | trainer.tensors() | {"the consensus": trainer.consensus()}

    plain, streamed = (
        run_workers(strategy_of(f"diloco:period=3{more}"), 3, program)
        for more in ("", ",streaming=1,overlap=0,mixing=0.0")
    )
    for a, b in zip(plain, streamed, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_one_fragment_under_way_by_hand_for_which_the_end_waits() -> None:
    """.1 a step, period 2, one step under way, half mixed.

    Tick 2 sends -.2; tick 3 has x=.3, c=.7·(.2 + .9·.2)=.266, x=.283. Tick 4 sends .266 - .383=-.117; tick 5 has x=.483,
    m=-.297, c=.266 + .7·(.117 + .9·.297)=.53501, x=.509005. An end after tick 4 waits for c=.53501, x=.459005; no step
    was made since, so that is all.
    """
    steps = [(0.1, 0.0), (0.2, 0.0), (0.283, 0.266), (0.383, 0.266)]
    for program, more in ((path_of(5), [(0.509005, 0.53501)]), (path_of(4, ends=2), [(0.459005, 0.53501)] * 2)):
        for path in hands("diloco:period=2,streaming=1", [slope(-1.0)] * 2, program):
            assert close(path, steps + more)


def test_at_once_only_a_fragment_is_sent_and_waited_for_in_order_later() -> None:
    """(tick, elements) of each mean: the peak falls by the number of fragments, the sum stays; 64 numbers, period 4.

    At the end, what is under way is waited for, and the fragments that were stepped since are sent once more: the plain form's not.
    """

    def program(trainer: StrategyWorker) -> tuple[list[tuple[int, int]], list[int]]:
        sent, waited, start = list[tuple[int, int]](), list[int](), trainer.worker.group.start_mean_

        def listen(tensor: Tensor, weight: float = 1.0, bits: int = 0) -> Any:
            wait, number = start(tensor, weight, bits).wait, len(sent)
            sent.append((trainer.tick, tensor.numel()))
            return SimpleNamespace(wait=lambda: (waited.append(number), wait())[1])

        trainer.worker.group.start_mean_ = listen
        trainer.replica.control.sync_if_due = lambda worker: True
        trainer.train(8)
        within = list(waited)
        trainer.finish()
        assert waited == list(range(len(sent)))
        return sent, within

    plain, streamed, slow = (
        run_workers(strategy_of(f"diloco:period=4{more}"), 2, program)[0]
        for more in ("", ",streaming=4,overlap=0,mixing=0.0", ",streaming=4,overlap=3")
    )
    assert plain == ([(4, 64), (8, 64)], [0, 1])
    assert streamed == ([(tick, 16) for tick in (*range(1, 9), 8, 8, 8)], list(range(8)))
    assert slow == (streamed[0], list(range(5)))  # three are under way at the end


def test_with_another_number_of_workers_what_is_under_way_has_the_same_mean() -> None:
    """Fragment 0 of two was sent with 3 and 1 rows: (3·2 + 1·6) / 4 = 3, of weight 4 together."""
    states = [
        GroupState(
            center=FlatVector([torch.zeros(4)]),
            momentum=FlatVector([torch.zeros(4)]),
            on_way=FlatVector([torch.tensor([sent, sent, 9.0, 9.0])]),
            counted=torch.tensor([1.0, open_], dtype=torch.float64),
            on_way_counted=torch.tensor([weight, 0.0], dtype=torch.float64),
            ticks=5,
            fragments=[(0, 2), (2, 4)],
            residual=torch.full((4,), sent),
        )
        for sent, weight, open_ in ((2.0, 3.0, 4.0), (6.0, 1.0, 8.0))
    ]
    assert [state.weight_of_window() for state in states] == [5.0, 9.0]
    merged = states[0].merge(states, 0, 4)
    assert merged.on_way.joined()[:2].tolist() == [3.0, 3.0]
    assert (merged.counted.tolist(), merged.on_way_counted.tolist()) == ([0.5, 3.0], [1.0, 0.0])
    assert merged.ticks == 5
    assert merged.residual is not None
    assert merged.residual.tolist() == [4.0] * 4
    assert states[0].merge(states, 1, 2) is states[1]
