"""Numbers and lists as people read them."""

import math

import pytest

from manyhands.evidence.compare import wording


@pytest.mark.parametrize(
    ("value", "output"),
    [(12970, "12,970"), (0.98667, "0.9867"), (1234.6, "1,235"), (0.000012, "1.2e-05"), (math.nan, "not finite")],
)
def test_numbers_have_four_digits(value: float, output: str) -> None:
    assert wording.number(value) == output


def test_metrics_of_a_column_line_up() -> None:
    assert [wording.metric(value) for value in (0.98, 0.97251, 2.0, 0.00012)] == [
        "0.9800",
        "0.9725",
        "2.0000",
        "0.00012",
    ]


@pytest.mark.parametrize(
    ("value", "output"),
    [(0, "0"), (0.2, "0.20"), (2.4e-6, "2.4×10⁻⁶"), (12.3, "12"), (math.inf, "not finite"), (math.nan, "not finite")],
)
def test_distances_say_zero_only_where_it_is(value: float, output: str) -> None:
    assert wording.small(value) == output


@pytest.mark.parametrize(
    ("value", "output"),
    [(0.00041, "0.410 ms"), (3.2, "3.20 s"), (99.96, "1 min 40 s"), (125, "2 min 5 s"), (11530, "3 h 12 min")],
)
def test_seconds(value: float, output: str) -> None:
    assert wording.seconds(value) == output


@pytest.mark.parametrize(("value", "output"), [(512, "512 B"), (61_200_000, "61.2 MB"), (5e9, "5.0 GB")])
def test_sizes(value: float, output: str) -> None:
    assert wording.size(value) == output


def test_ratios_and_shares() -> None:
    assert [wording.times(ratio) for ratio in (1.618, 52.8, 1024.0, 0.0516)] == ["1.62×", "52.8×", "1,024×", "0.052×"]
    assert [wording.percent(share) for share in (0.384, 0.004, 0.0)] == ["38 %", "0.4 %", "0 %"]
    assert [wording.signed(value) for value in (0.00312, -0.02, 0.0)] == ["+0.0031", "−0.02", "0"]
    assert [wording.power(exponent) for exponent in (-12, -2, 0, 3)] == ["10⁻¹²", "0.01", "1", "10³"]


def test_a_span_says_its_unit_once_and_nothing_where_both_ends_read_the_same() -> None:
    assert wording.between(3.1, 3.4, wording.seconds) == "3.10–3.40 s"
    assert wording.between(0.09, 3.4, wording.seconds) == "90.0 ms–3.40 s"
    assert wording.between(0.97, 0.98, wording.metric) == "0.9700–0.9800"
    assert wording.between(0.970001, 0.970002, wording.metric) == ""


def test_lists_say_how_many_more_and_keep_commas_apart() -> None:
    assert wording.named(["a"]) == "a"
    assert wording.named(["a", "b"]) == "a and b"
    assert wording.named(["a, 1", "b", "c"]) == "a, 1; b and c"
    assert wording.named(list("abcde")) == "a, b, c and 2 more"
    assert wording.named(list("abcd")) == "a, b, c and d"  # "1 more" would be no shorter than the name


def test_long_names_lose_their_middle_only() -> None:
    name = "diloco:period=16,outer_momentum=0.9,compress=topk:0.01 on 64"
    short = wording.label(name)
    assert len(short) == wording.LABEL
    assert short.startswith("diloco:period=16")
    assert short.endswith(" on 64")
    assert wording.label("allreduce on 2") == "allreduce on 2"
