"""Which lines feed a backward, whatever the order of iterating, fetching, backward and ending, and whatever the nesting."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.own_loop.observed.loops import PROBES, UNSEEN, Loops, Pass, PassDeal, Scale, Site

TRAIN, TEST, OTHER = Site("train.py", 10, 1), Site("train.py", 20, 2), Site("train.py", 10, 3)
LINE = ("train.py", 12)


def decided(loops: Loops, scale: Scale = Scale.MEAN, line: tuple[str, int] = LINE) -> None:
    """A backward, and what a probe says of it."""
    fed = loops.backward(line)
    assert fed is not None
    if fed.deal is PassDeal.PROBE:
        loops.decided(fed, line, scale)


def test_whole_then_a_probe_then_slices() -> None:
    loops = Loops()
    for epoch in range(2):
        one = loops.iterated(TRAIN)
        deals = []
        for _ in range(4):
            deals.append(loops.fetched(one))
            decided(loops)
        loops.ended(one)
        assert (
            deals == ([PassDeal.WHOLE, PassDeal.PROBE] if epoch == 0 else [PassDeal.SLICE] * 2) + [PassDeal.SLICE] * 2
        )


def test_evaluation_stays_whole_before_inside_and_after_training() -> None:
    loops = Loops()

    def evaluate() -> None:
        one = loops.iterated(TEST)
        assert [loops.fetched(one) for _ in range(3)] == [PassDeal.WHOLE] * 3
        loops.ended(one)

    evaluate()
    training = loops.iterated(TRAIN)
    for _ in range(5):
        loops.fetched(training)
        evaluate()
        decided(loops)
        evaluate()
    loops.ended(training)
    evaluate()
    assert not loops.sites[TEST].training


def test_a_batch_that_is_fetched_without_autograd_is_whole() -> None:
    loops = Loops()
    one = loops.iterated(TRAIN)
    for _ in range(3):
        loops.fetched(one)
        decided(loops)
    assert loops.fetched(one, autograd=False) is PassDeal.WHOLE
    assert loops.fetched(one) is PassDeal.SLICE


def test_a_backward_at_an_evaluation_site_makes_it_a_training_site_from_its_next_batch_on() -> None:
    loops = Loops()
    one = loops.iterated(TEST)
    assert [loops.fetched(one) for _ in range(3)] == [PassDeal.WHOLE] * 3
    decided(loops)
    assert loops.fetched(one) is PassDeal.PROBE


def test_two_loaders_zipped_are_shared_together() -> None:
    loops = Loops()
    one, other = loops.iterated(TRAIN), loops.iterated(OTHER)
    for expected in (PassDeal.WHOLE, PassDeal.PROBE, PassDeal.SLICE):
        assert [loops.fetched(one), loops.fetched(other)] == [expected] * 2
        decided(loops)


def test_an_iterator_made_before_the_loop_goes_along_with_it() -> None:
    loops = Loops()
    other, one = loops.iterated(TEST), loops.iterated(TRAIN)
    for expected in (PassDeal.WHOLE, PassDeal.PROBE, PassDeal.SLICE):
        assert [loops.fetched(one), loops.fetched(other)] == [expected] * 2
        decided(loops)


def test_an_outer_loader_whose_batch_makes_the_inner_one_is_not_shared() -> None:
    """Each task of an outer loader has a loader of its own."""
    loops = Loops()
    outer = loops.iterated(TEST)
    for _ in range(4):
        assert loops.fetched(outer) is PassDeal.WHOLE
        inner = loops.iterated(TRAIN)
        loops.fetched(inner)
        decided(loops)
        loops.ended(inner)
    assert loops.sites[TRAIN].training
    assert not loops.sites[TEST].training


def test_one_batch_of_a_fresh_iterator_at_each_step() -> None:
    """`next(iter(loader))`: the pass is over before its backward comes."""
    loops = Loops()
    deals = []
    for _ in range(4):
        one = loops.iterated(TRAIN)
        deals.append(loops.fetched(one))
        loops.ended(one)
        decided(loops)
    assert deals == [PassDeal.WHOLE, PassDeal.PROBE, PassDeal.SLICE, PassDeal.SLICE]


def test_a_look_at_one_batch_of_another_loader_does_not_share_it() -> None:
    loops = Loops()
    training = loops.iterated(TRAIN)
    for _ in range(4):
        loops.fetched(training)
        look = loops.iterated(TEST)
        assert loops.fetched(look) is PassDeal.WHOLE
        loops.ended(look)
        decided(loops)
    assert not loops.sites[TEST].training


def test_a_loop_that_fetches_one_batch_ahead() -> None:
    loops = Loops()
    one = loops.iterated(TRAIN)
    loops.fetched(one)
    seen = []
    for _ in range(4):
        loops.fetched(one)
        fed = loops.backward(LINE, lambda one: 1)
        assert fed is not None
        seen.append(fed.deal)
        if fed.deal is PassDeal.PROBE:
            loops.decided(fed, LINE, Scale.SUM)
    assert seen == [PassDeal.WHOLE, PassDeal.WHOLE, PassDeal.PROBE, PassDeal.PROBE]


def test_every_backward_has_a_scale_of_its_own() -> None:
    loops, second = Loops(), ("train.py", 14)
    one = loops.iterated(TRAIN)
    for _ in range(2):
        loops.fetched(one)
        decided(loops, Scale.MEAN)
        decided(loops, Scale.SUM, second)
    assert loops.fetched(one) is PassDeal.SLICE
    first, other = loops.backward(LINE), loops.backward(second)
    assert first is not None
    assert other is not None
    assert (first.scale, other.scale) == (Scale.MEAN, Scale.SUM)


def test_a_backward_that_is_unclear_is_tried_again_four_times_at_most() -> None:
    loops = Loops()
    one = loops.iterated(TRAIN)
    loops.fetched(one)
    loops.backward(LINE)
    for tried in range(1, PROBES + 1):
        assert loops.fetched(one) is PassDeal.PROBE
        fed = loops.backward(LINE)
        assert fed is not None
        assert loops.decided(fed, LINE, None) is (tried < PROBES)


def test_a_backward_that_does_not_come_again_is_not_waited_for_without_end() -> None:
    loops = Loops()
    one = loops.iterated(TRAIN)
    loops.fetched(one)
    loops.backward(("train.py", 30))
    deals = []
    for _ in range(UNSEEN + 3):
        deals.append(loops.fetched(one))
        decided(loops)
    assert deals == [PassDeal.PROBE] * (UNSEEN + 1) + [PassDeal.SLICE] * 2  # the other backward began anew


def test_a_backward_without_a_batch_is_of_none() -> None:
    loops = Loops()
    assert loops.backward(LINE) is None
    loops.fetched(loops.iterated(TRAIN), autograd=False)
    assert loops.backward(LINE) is None


SITES = [TRAIN, TEST, OTHER, Site("train.py", 40, 4)]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("iterate"), st.integers(0, 3)),
        st.tuples(st.just("fetch"), st.integers(0, 5)),
        st.tuples(st.just("fetch without autograd"), st.integers(0, 5)),
        st.tuples(st.just("backward"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 5)),
    ),
    max_size=80,
)


def played(events: list[tuple[str, int]]) -> list[Any]:
    """What `Loops` answers, with what must hold after each answer."""
    loops, passes, answers = Loops(), list[Pass](), list[Any]()
    fed_sites, followed = set[Site](), defaultdict[Site, set[tuple[str, int]]](set)
    for event, number in events:
        alive = [one for one in passes if one.open]
        if event == "iterate":
            passes.append(loops.iterated(SITES[number]))
        elif event.startswith("fetch") and alive:
            one = alive[number % len(alive)]
            deal = loops.fetched(one, autograd=event == "fetch")
            answers.append(deal)
            if one.site not in fed_sites or event != "fetch":
                assert deal is PassDeal.WHOLE
            else:
                assert deal is not PassDeal.WHOLE
            if deal is PassDeal.SLICE:
                record = loops.sites[one.site]
                assert followed[one.site] <= set(record.scales) or record.probes >= UNSEEN
        elif event == "backward":
            line = ("train.py", 100 + number)
            fed = loops.backward(line)
            answers.append(None if fed is None else (fed.deal, fed.scale, [one.site for one in fed.passes]))
            if fed is None:
                continue
            for one in fed.passes:
                assert one.deals
                fed_sites.add(one.site)
                followed[one.site].add(line)
            newest = fed.passes[0]
            assert all(one.fetched <= newest.fetched for one in fed.passes)
            assert fed.deal in {one.deals[-1] for one in fed.passes}
            if fed.deal is PassDeal.PROBE:
                loops.decided(fed, line, Scale.MEAN)
        elif event == "end" and alive:
            loops.ended(alive[number % len(alive)])
    for site in SITES:
        assert (site in fed_sites) == (site in loops.sites and loops.sites[site].training)
    return answers


@given(EVENTS)
def test_any_order_and_any_nesting(events: list[tuple[str, int]]) -> None:
    """Workers that see the same events decide alike; no site is shared before a backward has followed a batch of it."""
    assert played(events) == played(events)


@pytest.mark.parametrize("autograd", [True, False])
def test_the_end_of_a_pass_frees_it(autograd: bool) -> None:
    loops = Loops()
    for _ in range(100):
        one = loops.iterated(TEST)
        loops.fetched(one, autograd)
        loops.ended(one)
    assert len(loops._passes) <= 2
