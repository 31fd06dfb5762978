"""The decision and its sentence, in each case that there is; verdict and advice are one decision."""

import math
import re
from dataclasses import replace

import pytest
from by_numbers import SOLOS, Numbers, found
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.evidence.advise import advise_comparison
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Target
from manyhands.evidence.compare.text import markdown, text
from manyhands.evidence.compare.verdict import compared

ONE, TWO = SOLOS
AIM = Target(metric="test_accuracy", value=0.97, higher=True)
SLOW: dict[str, Numbers] = {ONE: [55.0, 54.0, 56.0], TWO: [100.0, 101.0, 99.0]}
NEVER: Numbers = [None] * 3


def of(
    rates: dict[str, Numbers | float],
    metrics: dict[str, Numbers] | None = None,
    seconds: dict[str, Numbers | float] | None = None,
    **more: object,
) -> Comparison:
    """Solo's rates and those of NAME on 2 workers: one number stands for three repeats. `seconds` are those to a target."""

    def each(given: dict[str, Numbers | float]) -> dict[str, Numbers]:
        names = {name: name if name.startswith("solo") else f"{name} on 2" for name in given}
        return {names[name]: [one] * 3 if isinstance(one, int | float) else one for name, one in given.items()}

    aim = {} if seconds is None else {"target": AIM}
    return found({**SLOW, **each(rates)}, each(metrics or {}), each(seconds or {}), **aim, **more)  # type: ignore[arg-type]


def said(made: Comparison, decision: str, words: str) -> None:
    assert made.decision == decision, made.verdict
    assert re.search(words, made.verdict), (words, made.verdict)


def test_without_a_target_rows_a_second_decide() -> None:
    equal: Numbers = [0.981, 0.982, 0.983]
    wide = of({"gossip": [160, 165, 162], "allreduce": [101, 99, 100]}, {TWO: equal, "gossip": [0.95, 0.981, 0.99]})
    several = of({"allreduce": [97, 98, 96], "gossip": 80, "hogwild": [103, 90, 85]})
    broke = {"easgd on 2": "it broke"}
    take, stay = "^Take gossip on 2: 1.6", "^Stay with one process: of "
    for made, decision, words in (
        (wide, "distribute", rf"{take}2× .*solo with 2 threads \(1.5.*no difference seen .*\(0.9737 and 0.9820\)"),
        (of({"gossip": 160}, {"gossip": equal}), "distribute", rf"{take}.*same .* 1 % \(0.9820 and 0.9800\)"),
        (of({"gossip": 160}, {"gossip": [0.999, 0.998, 0.997]}), "distribute", rf"{take}.*better .*\(0.9980 and"),
        (of({"gossip": 150, "allreduce": 180}), "distribute", "^Take allreduce on 2: 1.8"),
        (
            several,
            "stay",
            rf"{stay}3 others none .*2 threads by more than 5 %; .*allreduce on 2, 0.97×\. 20 % .*exchange",
        ),
        (of({"allreduce": [120, 95, 110]}), "stay", rf"{stay}1 other none .*allreduce on 2, 1.08× \(0.7"),
        (of({"allreduce": [130, 95, 120]}), "undecided", r"^Not decided: allreduce on 2 is 1.14× .*\(0.75× to .*more"),
        (found({TWO: [100.0], "gossip on 2": [200.0]}), "undecided", "1 repeat cannot .* 3 can .*gossip on 2, 2.00×"),
        (found({TWO: [100.0] * 2, "gossip on 2": [200.0] * 2}), "undecided", "2 repeats cannot"),
        (found(SLOW), "stay", "solo with 1 thread is 0.55×"),
        (of({"gossip": 90, "easgd": NEVER}, failures=broke), "stay", r"of 2 others \(1 failed\) none was"),
        (of({"easgd": NEVER}, failures=broke), "stay", "process: easgd on 2 failed.$"),
        (of({"gossip": 160}, simulated={"seed": "0"}), "distribute", "simulated cluster: take gossip on 2: 1.60×"),
    ):
        said(made, decision, words)


def test_a_reference_that_varies_by_half_is_said_and_nothing_is_decided_against_it() -> None:
    noisy: dict[str, Numbers] = {TWO: [131.0, 206.0, 240.0], "gossip on 2": [190.0, 131.0, 270.0]}
    varies = "Solo with 2 threads itself varies from"
    said(found(noisy), "undecided", f"gossip on 2 is 1.01×.*{varies} 131 to 240 rows/s.*idle machine")
    assert "varies" not in found(noisy | {TWO: [200.0, 206.0, 240.0]}).verdict
    beaten = found({ONE: [3000.0] * 3, TWO: [118.0, 200.0, 99.0], "gossip on 2": [190.0] * 3})
    assert f"{varies} 99 to 200 rows/s" in beaten.verdict
    to_target = found(noisy, {}, {TWO: [4.0, 6.0, 3.0], "gossip on 2": [3.0] * 3}, target=AIM)
    assert f"{varies} 3 to 6 s to test_accuracy ≥ 0.97" in to_target.verdict
    virtual = found({"solo": noisy[TWO], "gossip on 2": [90.0] * 3}, simulated={"seed": "0"})
    assert virtual.verdict.endswith("with more --repeats.")


def test_one_that_is_faster_and_worse_is_named_and_not_taken() -> None:
    lossy: dict[str, Numbers] = {"downpour": [0.91, 0.90, 0.92]}
    made = of({"downpour": 160, "gossip": 90}, {**lossy, TWO: [0.98] * 3})
    words = r"downpour on 2 is 1.60× .*worse in test_accuracy \(0.9100 and 0.9800\).*other 1 none .*gossip on 2, 0.90×. 20 %"
    said(made, "stay", words)
    beside = of({"downpour": 160, "gossip": 120}, lossy)
    said(beside, "distribute", r"^Take gossip on 2: 1.20×.*; downpour on 2 .*1.60×, .*\(0.9100 and 0.9800\)\.$")
    threads = found({ONE: [200.0] * 3, TWO: [100.0] * 3, "allreduce on 2": [150.0] * 3})
    said(threads, "stay", "with 1 thread: of 1 other none .*than solo with 1 thread by .*allreduce on 2, 0.75×")


def test_with_a_target_the_time_to_it_decides() -> None:
    solo: dict[str, Numbers | float] = {ONE: 20, TWO: 10}
    most: dict[str, Numbers | float] = {"gossip": 200, "downpour": 90}
    worse: dict[str, Numbers] = {"downpour": [0.971] * 3}
    nobody: dict[str, Numbers | float] = {ONE: NEVER, TWO: NEVER}
    some: Numbers = [9.0, None, 9.0]
    quick = of(most, worse, {**solo, "gossip": 12, "downpour": 5})
    alone = of({"gossip": 90, "easgd": 90}, {}, {**nobody, "gossip": [12.0, 13.0, 14.0], "easgd": some})
    for made, decision, words in (
        (quick, "distribute", r"^Take downpour on 2: 2.00× .*≥ 0.97 as solo with 2 .*same .*1 % \(0.9710 and 0.9800\)"),
        (of(most, {}, {**solo, "gossip": 12, "downpour": 10}), "stay", "to test_accuracy .*downpour on 2, 1.00×"),
        (alone, "distribute", "^Take gossip on 2: .*≥ 0.97 in all 3 repeats, in 13 s, and solo with 2 threads in none"),
        (of({"gossip": 90}, {}, {**nobody, "gossip": NEVER}), "undecided", "2 threads did not reach test_accuracy"),
        (of({"gossip": 200}, {}, {**solo, "gossip": some}), "stay", "gossip on 2, not there in 1 of 3 repeats"),
        (of({"gossip": 200}, {}, {**solo, "gossip": NEVER}), "stay", "gossip on 2, which it never reached"),
        (of({"gossip": 200}, {}, {**solo, TWO: some, "gossip": 5}), "undecided", "did not reach .* in 1 of 3 repeats"),
        (of({"gossip": 200}, {}, {ONE: 9, TWO: NEVER, "gossip": NEVER}), "stay", "process, solo, 1 thread: it reached"),
    ):
        said(made, decision, words)


# -- what the rules of advice see ---------------------------------------------------------------------------------------


def test_contestants_are_the_middle_of_their_repeats() -> None:
    rates: dict[str, Numbers] = {ONE: [50.0] * 3, TWO: [100.0] * 3, "downpour on 2": [150.0, 160.0, 170.0]}
    made = found({**rates, "easgd on 2": NEVER}, {"downpour on 2": [0.5] * 3}, failures={"easgd on 2": "it broke"})
    seen = compared(made)
    assert [one.name for one in seen.contestants] == [ONE, TWO, "downpour on 2"]
    assert (seen.reference, seen.metric, seen.speed_of) == (TWO, "test_accuracy", "rows/s")
    assert (seen.base.speed, seen.base.quality) == (None, "")
    (own,) = seen.several
    assert own.speed.middle == pytest.approx((1.5 * 1.6 * 1.7) ** (1 / 3))
    assert (own.speed.outcome, own.quality) == ("better", "worse")
    run = own.measured
    assert (run.workers, run.threads_per_worker, run.strategy, run.steps) == (2, 1, "downpour", 10)
    assert (run.input_s, run.compute_s, run.exchange_s, run.wait_s) == pytest.approx((0.1, 0.6, 0.2, 0.1))
    assert (run.sent_bytes, run.staleness, run.rows_per_step, run.one_host) == (2_500_000, {0: 9, 2: 21}, 50, True)
    assert list(run.compute_of_workers_s) == pytest.approx([0.6, 0.6])


def test_the_best_that_waits_for_files_is_told_what_would_help() -> None:
    made = of({"gossip": 150})
    times = ({"input": 0.6, "compute": 0.4, "exchange": 0.0, "wait": 0.0},) * 2
    stored = {"stored_bytes": 3e9}
    for input, remedy in (
        ({"hits": 0, "misses": 0, **stored}, 'cache="12.0GB"'),
        ({"hits": 90, "misses": 10, **stored}, "has the blocks already"),
        ({}, "--loader-processes"),
    ):
        trials = (replace(one, timing=times, input=input) if "gossip" in one.variant else one for one in made.trials)
        seen = compared(replace(made, trials=tuple(trials)))
        assert seen.several[0].measured.input == input
        (advice,) = (one for one in advise_comparison(seen) if one.kind == "input-bound")
        assert advice.text.startswith("gossip on 2: input-bound: 60 %")
        assert remedy in advice.text


BEGINS = {"distribute": "Take ", "stay": "Stay with one process", "undecided": "Not decided: "}


OTHERS = ("allreduce on 2", "allreduce:compress=topk:0.01 on 2", "gossip on 4", "agn on 2")


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    """Of few or many repeats, quiet or noisy, with and without a target, with failures and metrics that are lost."""
    repeats = draw(st.integers(1, 5))

    def each(middle: float, noise: float) -> list[float | None]:
        return [middle * math.exp(noise * draw(st.floats(-1, 1))) for _ in range(repeats)]

    def seconds(middle: float, noise: float) -> list[float | None]:
        misses = draw(st.sampled_from(["never", "sometimes", "always"]))
        values = each(middle, noise)
        return [None if misses == "never" or (misses, i) == ("sometimes", 0) else one for i, one in enumerate(values)]

    noise = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    others = draw(st.lists(st.sampled_from(OTHERS), unique=True))
    names = [ONE, TWO, *others]
    speeds = {name: draw(st.sampled_from([0.5, 0.95, 1.0, 1.06, 1.15, 1.6])) for name in names}
    rates: dict[str, Numbers] = {name: each(100 * speed, noise) for name, speed in speeds.items()}
    metrics: dict[str, Numbers] = {name: each(draw(st.sampled_from([0.98, 0.9])), noise / 10) for name in names}
    target = draw(st.sampled_from([None, AIM]))
    targets = {} if target is None else {name: seconds(10 / speed, noise) for name, speed in speeds.items()}
    failing = draw(st.sets(st.sampled_from(others))) if others else set()
    rates |= {name: [*rates[name][:-1], None] for name in failing}
    return found(rates, metrics, targets, target=target, failures=dict.fromkeys(failing, "it broke"))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(comparisons())
def test_verdict_and_advice_never_contradict_each_other(made: Comparison) -> None:
    if all(one.solo for one in made.variants):
        assert (made.decision, made.best, made.advice) == ("stay", None, ())
        return
    assert made.verdict.startswith(BEGINS[made.decision])
    kinds = {one.kind for one in made.advice}
    assert not any(pair <= kinds for pair in ({"compress", "codec-costs"}, {"processes", "threads-win"}))
    assert not kinds & BEGINS.keys()
    assert [one.wins for one in made.advice] == sorted((one.wins for one in made.advice), reverse=True)
    if made.decision == "distribute":
        assert made.verdict.startswith(f"Take {made.best}: ")
        assert made.best in {one.name for one in made.variants if not one.solo and not made.failure(one.name)}
    elif made.best is not None and "cannot tell" not in made.verdict:
        assert made.best in made.verdict
    page = text(made)
    assert " ".join(made.verdict.split()) in " ".join(page.split())
    assert [begins for begins in BEGINS.values() if begins in page] == [BEGINS[made.decision]]
    if made.best is not None and made.target is None and f"{made.best}, " in made.verdict:
        ratios = [measures.speed_up(made, made.best, solo) for solo in SOLOS]  # the better of solo's decides
        assert [one for one in ratios if one is not None and f"{one.middle:.2f}×" in made.verdict]


def test_a_slow_variant_beside_a_reference_that_varies_says_one_thing_everywhere() -> None:
    """Medians of 206 and 131 rows/s once stood beside a ratio of 1.03x, and a verdict beside another advice."""
    made = found({TWO: [110.0, 206.0, 330.0], "gossip on 2": [130.0, 131.0, 452.0]})
    ratio = measures.speed_up(made, "gossip on 2", TWO).middle
    own, other = ((a * b * c) ** (1 / 3) for a, b, c in ((130, 131, 452), (110, 206, 330)))
    assert ratio == pytest.approx(own / other)
    for page in (text(made), markdown(made)):
        assert f"{own:.4g}" in page or f"{own:.3g}" in page
        assert f"{other:.4g}" in page or f"{other:.3g}" in page
        assert f"{ratio:.2f}" in page
        assert "ot decided: gossip on 2 is" in page
        assert "tay with one process" not in page
        assert "itself varies from 110 to 330 rows/s" in " ".join(page.split())
    assert (made.decision, made.best) == ("undecided", "gossip on 2")
