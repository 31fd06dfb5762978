import math

import pytest

from manyhands.engines.quantities import expect_number, read_bandwidth, read_factor, read_items, read_seconds, shown
from manyhands.errors import BadInput


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.01", 0.01),
        ("1e-4", 1e-4),
        ("10ms", 0.01),
        ("50us", 5e-5),
        ("50µs", 5e-5),
        ("7ns", 7e-9),
        ("2s", 2.0),
        ("2 s", 2.0),
        (".5", 0.5),
    ],
)
def test_times(text, seconds):
    assert read_seconds(text, "latency") == seconds


@pytest.mark.parametrize("text", ["", "1m", "10MS", "-1", "1 0", "nan", "inf", "1min", "s", "1e", "1,5"])
def test_what_is_no_time(text):
    with pytest.raises(BadInput, match="latency must be a time in seconds, such as"):
        read_seconds(text, "latency")


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("1e9", 1e9),
        ("100Mbit", 1e8),
        ("100mbit", 1e8),
        ("100Mbit/s", 1e8),
        ("100Mbps", 1e8),
        ("56kbit", 56e3),
        ("1Gbit", 1e9),
        ("2.5Gbit", 2.5e9),
        ("1Tbit", 1e12),
        ("1000bit", 1e3),
        ("inf", math.inf),
    ],
)
def test_bandwidths(text, bandwidth):
    assert read_bandwidth(text, "bandwidth") == bandwidth


@pytest.mark.parametrize("text", ["", "0", "-1", "1G", "100M", "nan", "Mbit", "1Xbit"])
def test_what_is_no_bandwidth(text):
    with pytest.raises(BadInput, match=r"bandwidth must be a number of bit/s above 0, such as 1e9.*; got '[^']*'$"):
        read_bandwidth(text, "bandwidth")


@pytest.mark.parametrize("text", ["100MB", "100MB/s", "1GBps", "100 Mbyte", "8B"])
def test_bytes_are_not_bits(text):
    with pytest.raises(BadInput, match="bytes are not bits, 1 MB/s is 8Mbit"):
        read_bandwidth(text, "bandwidth")


def test_factors():
    assert [read_factor(text, "3") for text in ("5x", "0.5x", "2")] == [5.0, 0.5, 2.0]
    for text in ("0x", "-1x", "x", "5y", ""):
        with pytest.raises(BadInput, match="3 must be a factor above 0, such as 5x"):
            read_factor(text, "3")


def test_items():
    assert read_items("lan, a=1 ,b='x,y'", "network") == [("lan", ""), ("a", "1"), ("b", "x,y")]
    assert read_items("[a=1,b=2]", "network") == [("a", "1"), ("b", "2")]
    assert read_items("  ", "network") == []
    for text in ("a=", "=1", "a=1,,b=2"):
        with pytest.raises(BadInput, match="network must be option=value"):
            read_items(text, "network")


def test_numbers_of_dataclasses():
    expect_number(0, "row", least=0)
    for value in (math.nan, math.inf, True, "1", None):
        with pytest.raises(BadInput, match="row must be a finite number; got"):
            expect_number(value, "row")
    with pytest.raises(BadInput, match="row must be at least 0; got -1"):
        expect_number(-1, "row", least=0)
    with pytest.raises(BadInput, match="row must be above 0; got 0"):
        expect_number(0, "row", above=0)


@pytest.mark.parametrize(
    ("value", "text"), [(1e9, "1e+09"), (0.1, "0.1"), (1 / 3, "0.3333333333333333"), (math.inf, "inf")]
)
def test_a_number_is_shown_short_and_exact(value, text):
    assert shown(value) == text
    assert float(text) == value
