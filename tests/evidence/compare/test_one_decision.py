"""Verdict and advice are one decision, and the table's numbers are those that the ratios are made of."""

from __future__ import annotations

import math

import pytest
from by_numbers import SOLOS, Numbers, found
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Target
from manyhands.evidence.compare.text import markdown, text

ONE, TWO = SOLOS
AIM = Target(metric="test_accuracy", value=0.97, higher=True)
BEGINS = {"distribute": "Take ", "stay": "Stay with one process", "undecided": "Not decided: "}


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    """Of few or many repeats, quiet or noisy, with and without a target, with failures and metrics that are lost."""
    repeats = draw(st.integers(1, 5))

    def each(middle: float, noise: float) -> list[float | None]:
        return [middle * math.exp(noise * draw(st.floats(-1, 1))) for _ in range(repeats)]

    def seconds(middle: float, noise: float) -> list[float | None]:
        misses = draw(st.sampled_from(["never", "sometimes", "always"]))
        values = each(middle, noise)
        return [
            None if misses == "never" or (misses == "sometimes" and i == 0) else one for i, one in enumerate(values)
        ]

    noise = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    others = draw(st.lists(st.sampled_from(["allreduce on 2", "gossip on 2", "gossip on 4", "agn on 2"]), unique=True))
    names = [ONE, TWO, *others]
    speeds = {name: draw(st.sampled_from([0.5, 0.95, 1.0, 1.06, 1.15, 1.6])) for name in names}
    rates: dict[str, Numbers] = {name: each(100 * speed, noise) for name, speed in speeds.items()}
    metrics: dict[str, Numbers] = {name: each(draw(st.sampled_from([0.98, 0.9])), noise / 10) for name in names}
    target = draw(st.sampled_from([None, AIM]))
    targets = {} if target is None else {name: seconds(10 / speed, noise) for name, speed in speeds.items()}
    failing = draw(st.sets(st.sampled_from(others))) if others else set()
    rates |= {name: [*rates[name][:-1], None] for name in failing}
    return found(rates, metrics, targets, target=target, failures=dict.fromkeys(failing, "it broke"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(comparisons())
def test_verdict_and_advice_never_contradict_each_other(made: Comparison) -> None:
    if all(one.solo for one in made.variants):
        assert (made.decision, made.best, made.advice) == ("stay", None, ())
        return
    assert made.verdict.startswith(BEGINS[made.decision])
    assert not [one for one in made.advice if one.kind in BEGINS]
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
