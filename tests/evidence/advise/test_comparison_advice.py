"""A comparison's decision, and advice about what the best strategy still loses."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_runs import compared, contestant, measured, reads_well, solo

from manyhands.evidence.advise import Advice, Compared, Contestant, Decision, Ratio, advise_comparison, largest_loss

LINE = 240  # with the name of the strategy in front


def allreduce(speed: float | None, workers: int = 2, **more: Any) -> Contestant:
    """A tenth of its time is exchange."""
    of = measured(**{"compute": 9.0, "exchange": 1.0, "workers": workers, "cores": 8, **more.pop("measured", {})})
    return contestant(f"allreduce on {workers}", of, speed, **more)


def decision(*contestants: Contestant, **more: Any) -> Decision:
    return compared(solo(), *contestants, **more).decision


def best(*contestants: Contestant, **more: Any) -> str | None:
    found = decision(*contestants, **more).best
    return None if found is None else found.name


def named(kind: str, *contestants: Contestant, **more: Any) -> Advice | None:
    return next((one for one in advise_comparison(compared(*contestants, **more)) if one.kind == kind), None)


def test_distribute_where_the_best_is_surely_faster_and_not_worse() -> None:
    found = decision(allreduce(1.5), allreduce(2.0, workers=4))
    assert (found.kind, found.why, found.best.name, found.best.times) == ("distribute", "faster", "allreduce on 4", 2.0)
    assert best(allreduce(2.5, outcome="unclear"), allreduce(2.0, workers=4)) == "allreduce on 4"
    assert advise_comparison(compared(solo())) == []
    worse = allreduce(2.0, quality="worse")
    assert (decision(worse).kind, decision(worse).why) == ("stay", "worse")
    assert best(worse, allreduce(1.5, workers=4)) == "allreduce on 4"
    to_target = decision(worse, allreduce(1.5, workers=4), speed_of="time to test_accuracy ≥ 0.97")
    assert (to_target.kind, to_target.best) == ("distribute", worse)


def test_stay_where_nothing_is_faster_and_say_why() -> None:
    def lost(**more: Any) -> str:
        found = compared(solo(), allreduce(1.0, outcome="same", measured=more))
        assert (found.decision.kind, found.decision.why) == ("stay", "slower")
        return largest_loss(found)

    assert lost() == ""
    assert lost(steps=2000) == " Its steps compute 4.5 ms, and under 10 ms sharing rarely pays."
    for part, word in (("exchange", "exchange"), ("wait", "waiting"), ("input", "input")):
        assert lost(**{"compute": 8.5, "exchange": 0.0, part: 1.5}) == f" 15 % of its time is {word}."
    assert lost(one_host=True) == " One process already uses the same cores."


def test_what_is_not_sure_is_not_decided_and_beside_a_reference_that_varies_the_upper_end_counts() -> None:
    unclear = decision(allreduce(1.5, outcome="unclear"))
    assert (unclear.kind, unclear.why) == ("undecided", "unclear")
    once = replace(allreduce(1.5), speed=Ratio(middle=1.5, low=0.0, high=float("inf"), outcome="unclear"))
    few = decision(once, enough=False)
    assert (few.kind, few.why, few.best) == ("undecided", "repeats", once)
    assert decision(allreduce(1.05, outcome="unclear")).kind == "stay"
    near = allreduce(1.05, outcome="unclear")
    assert decision(near).kind == "stay"
    assert compared(replace(solo(), varies=1.6), near).decision.kind == "undecided"
    wide = allreduce(1.15, outcome="unclear")
    assert decision(wide, margin=0.2).kind == "stay"
    assert decision(wide).kind == "undecided"


def test_where_times_to_the_target_do_not_compare_it_counts_who_reached_it() -> None:
    aim = {"speed_of": "time to test_accuracy ≥ 0.97"}
    for alone, on_two, on_four, kind, why, name in (
        (False, False, True, "distribute", "reached", "allreduce on 4"),
        (True, False, False, "stay", "slower", "allreduce on 2"),
        (False, False, False, "undecided", "unreached", None),
        (0.5, True, False, "undecided", "unreached", "allreduce on 2"),  # the reference reached it now and then
    ):
        several = (allreduce(None, reached=on_two), allreduce(None, workers=4, reached=on_four))
        found = compared(replace(solo(), reached=alone), *several, **aim).decision
        assert (found.kind, found.why) == (kind, why)
        assert alone == 0.5 or (found.best and found.best.name) == name


def test_what_the_best_still_loses_is_said_unless_it_was_tried() -> None:
    lossy = allreduce(1.5, measured={"compute": 6.0, "exchange": 4.0})
    advice = named("exchange-bound", solo(), lossy)
    assert advice.text.startswith("allreduce on 2: exchange-bound: 40 %")
    assert advice.numbers["period"] == 6

    def local_sgd(period: float, workers: int = 2) -> Contestant:
        spec = {"strategy": f"local-sgd:period={period:.0f}", "period": period, "workers": workers}
        return contestant("local-sgd", measured(compute=6.0, exchange=1.0, **spec), 1.4)

    assert named("exchange-bound", solo(), lossy, local_sgd(8.0)) is None
    for other in (local_sgd(4.0), local_sgd(8.0, workers=4)):
        assert named("exchange-bound", solo(), lossy, other) is not None


def test_compression_is_judged_by_what_was_measured() -> None:
    coded = measured(compute=9.0, exchange=1.0, strategy="allreduce:compress=powersgd:2")
    helps = named("compress", solo(), allreduce(0.5), contestant("allreduce:compress=powersgd:2 on 2", coded, 1.5))
    assert "compress=powersgd:2 on 2 is 3.00×" in helps.text
    costs = named("codec-costs", solo(), allreduce(1.5), contestant("coded on 2", coded, 1.0))
    assert "allreduce on 2 is 1.50× as fast as coded on 2" in costs.text
    for near in (1.4, 1.5, 1.7):  # the intervals of 1.5 and these meet
        found = advise_comparison(compared(solo(), allreduce(1.5), contestant("coded", coded, near)))
        assert not {"compress", "codec-costs"} & {one.kind for one in found}
    elsewhere = contestant("coded on 4", replace(coded, workers=4), 3.0)
    assert named("compress", solo(), allreduce(1.5), elsewhere) is None
    link: dict[str, Any] = {"parameters": 3_250_000, "sent_bytes": 195e6, "compute": 1.345, "exchange": 17.346}
    slow = allreduce(0.2, workers=4, measured=link)
    assert named("compress", solo(), slow) is not None
    coded = measured(**{**link, "exchange": 3.0}, workers=4, strategy="allreduce:compress=bf16")
    assert named("compress", solo(), slow, contestant("coded", coded, 0.19)) is None


def test_threads_or_processes_of_as_many_cores() -> None:
    here = {"one_host": True}
    single = contestant("solo, 1 thread", measured(compute=10.0, workers=1, strategy="solo"), 0.8)
    better = named("processes", solo(), single, allreduce(1.3, measured=here))
    assert re.search("allreduce on 2 is 1.30× as fast as solo, .* 1.25×", better.text)
    worse = named("threads-win", solo(), allreduce(0.5, measured=here))
    assert "solo is 2.00× as fast as allreduce on 2" in worse.text
    for silent in (allreduce(1.0, measured=here), allreduce(1.3), allreduce(1.3, workers=4, measured=here)):
        assert named("processes", solo(), silent) is None
        assert named("threads-win", solo(), silent) is None
    assert named("processes", solo(threads=1), allreduce(1.3, measured={**here, "workers": 1})) is None


def test_causes_are_ordered_by_what_the_strategy_would_win() -> None:
    slower = contestant("slower", measured(compute=1.0, strategy="downpour"), 1.2, quality="worse", effective_rate=0.4)
    faster = contestant("faster", measured(compute=1.0, strategy="downpour"), 3.0, quality="worse", effective_rate=0.4)
    found = advise_comparison(compared(solo(), slower, allreduce(1.5), faster))
    assert [one.kind for one in found] == ["rate-too-high", "rate-too-high"]
    assert [one.numbers.get("name") for one in found] == ["faster", "slower"]
    assert [one.wins for one in found] == [pytest.approx(0.5), 0.0]


SPECS = (
    "allreduce",
    "local-sgd:period=8",
    "diloco:period=50",
    "downpour",
    "agn",
    "easgd",
    "allreduce:compress=topk:0.01",
)


@st.composite
def comparisons(draw: st.DrawFn) -> Compared:
    several = []
    for spec in draw(st.lists(st.sampled_from(SPECS), min_size=1, max_size=5, unique=True)):
        workers = draw(st.sampled_from([2, 4]))
        served = spec in ("downpour", "agn", "easgd")
        parts = {part: draw(st.sampled_from([0.0, 1.0, 7.0, 90.0])) for part in ("input", "exchange", "wait")}
        of = measured(
            **parts,
            compute=draw(st.sampled_from([0.5, 8.0])),
            steps=draw(st.sampled_from([10, 700])),
            workers=workers,
            strategy=spec,
            server=served,
            one_host=draw(st.booleans()),
            period=draw(st.sampled_from([1.0, 8.0])),
            parameters=10**6,
            sent_bytes=draw(st.sampled_from([1e5, 1e11])),
            rate=0.01,
            staleness=draw(st.sampled_from([{}, {3: 9}])) if served else {},
        )
        several.append(
            contestant(
                f"{spec} on {workers}",
                of,
                draw(st.sampled_from([None, 0.3, 1.0, 2.0, 9.0])),
                quality=draw(st.sampled_from(["same", "worse", "unclear"])),
                effective_rate=draw(st.sampled_from([0.001, 0.01, 0.08])),
                batch_size=draw(st.sampled_from([64, 256])),
            )
        )
    return compared(solo(), *several, speed_of=draw(st.sampled_from(["rows/s", "time to test_accuracy ≥ 0.97"])))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(comparisons())
def test_no_line_contradicts_another_and_all_read_well(found: Compared) -> None:
    lines = advise_comparison(found)
    kinds = [one.kind for one in lines]
    assert not {"compress", "codec-costs"} <= set(kinds)
    assert not {"processes", "threads-win"} <= set(kinds)
    explained = [one.numbers["name"] for one in lines if "name" in one.numbers]
    assert len(explained) == len(set(explained))
    assert [one.wins for one in lines] == sorted((one.wins for one in lines), reverse=True)
    for one in lines:
        assert 0 <= one.wins <= 1
        reads_well(one.text, LINE)
