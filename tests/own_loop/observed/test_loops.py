"""Which lines feed a backward, whatever the order of iterating, fetching, backward and ending, and whatever the nesting."""

from collections import defaultdict
from typing import Any

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


SITES = {"t": TRAIN, "e": TEST, "o": OTHER}
SCRIPTS = {
    "whole, then a probe, then slices": ("+t t! t! t! t! -t +t t! t! -t", "WPSSSS", "t"),
    "evaluation before, inside and after": (
        "+e e e e -e +t t +e e e -e ! +e e e -e t ! +e e e -e t +e e e -e ! -t +e e e -e",
        "WWW W WW WW P WW S WW WW",
        "t",
    ),
    "batches without autograd are whole": ("+t t! t! t! t? t! t? t!", "WPSWSWS", "t"),
    "a backward makes an evaluation's site train": ("+e e e e! e! e!", "WWWPS", "e"),
    "two loaders zipped": ("+t +o t o ! t o ! t o !", "WWPPSS", "to"),
    "an iterator that was made before the loop": ("+e +t t e ! t e ! t e !", "WWPPSS", "te"),
    "a task of an outer loader makes an inner one": (
        "+e e +t t! -t e +t t! -t e +t t! -t e +t t! -t",
        "WW WP WS WS",
        "t",
    ),
    "one batch of a fresh iterator each step": ("+t t -t ! +t t -t ! +t t -t ! +t t -t !", "WPSS", "t"),
    "evaluation goes along batch by batch": ("+e e e +t e t ! e t ! e t !", "WWWW WP WS", "t"),
    "and had no autograd at first": ("+e e? +t e t ! e t ! e t !", "WWW WP WS", "t"),
    "a batch of before the last backward": ("+t +e e +o o ! t !", "WWW", "ot"),
    "a look at one batch of another loader": ("+t t +e e -e ! t +e e -e ! t +e e -e ! t +e e -e !", "WW PW SW SW", "t"),
}
"""Of each: + a pass begins at the site, its letter fetches a batch (? without autograd), ! a backward, - it ends; what its
batches are (whole, probe, slice); which sites train."""


def test_what_each_batch_is() -> None:
    for name, (script, expected, training) in SCRIPTS.items():
        loops, passes, deals = Loops(), dict[str, Pass](), ""
        for event in script.replace("!", " !").split():
            letter = event.strip("+-?")
            if event[0] == "+":
                passes[letter] = loops.iterated(SITES[letter])
            elif event[0] == "-":
                loops.ended(passes[letter])
            elif event == "!":
                decided(loops)
            else:
                deals += loops.fetched(passes[letter], autograd="?" not in event).name[0]
        assert deals == expected.replace(" ", ""), name
        assert {site for site, one in loops.sites.items() if one.training} == {SITES[key] for key in training}, name


def test_a_backward_that_is_unclear_is_tried_again_four_times_at_most() -> None:
    loops = Loops()
    one = loops.iterated(TRAIN)
    loops.fetched(one)
    loops.backward(LINE)
    for tried in range(1, PROBES + 1):
        assert loops.fetched(one) is PassDeal.PROBE
        fed = loops.backward(LINE)
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


PLACES = [TRAIN, TEST, OTHER, Site("train.py", 40, 4)]
KINDS = {"iterate": 3, "fetch": 5, "fetch without autograd": 5, "backward": 2, "end": 5}  # with the largest number
EVENTS = st.lists(
    st.one_of(*(st.tuples(st.just(event), st.integers(0, largest)) for event, largest in KINDS.items())), max_size=80
)


def played(events: list[tuple[str, int]]) -> list[Any]:
    """What `Loops` answers, with what must hold after each answer."""
    loops, passes, answers = Loops(), list[Pass](), list[Any]()
    fed_sites, followed = set[Site](), defaultdict[Site, set[tuple[str, int]]](set)
    for event, number in events:
        alive = [one for one in passes if one.open]
        if event == "iterate":
            passes.append(loops.iterated(PLACES[number]))
        elif event.startswith("fetch") and alive:
            one = alive[number % len(alive)]
            deal = loops.fetched(one, autograd=event == "fetch")
            answers.append(deal)
            assert (deal is PassDeal.WHOLE) == (one.site not in fed_sites or event != "fetch")
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
    for site in PLACES:
        assert (site in fed_sites) == (site in loops.sites and loops.sites[site].training)
    return answers


@given(EVENTS)
def test_any_order_and_any_nesting(events: list[tuple[str, int]]) -> None:
    """Workers that see the same events decide alike; no site is shared before a backward has followed a batch of it."""
    assert played(events) == played(events)


def test_the_end_of_a_pass_frees_it() -> None:
    for autograd in (True, False):
        loops = Loops()
        for _ in range(100):
            one = loops.iterated(TEST)
            loops.fetched(one, autograd)
            loops.ended(one)
        assert len(loops._passes) <= 2
