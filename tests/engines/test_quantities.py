from __future__ import annotations

import math

import pytest
from refused_cases import all_refused

from manyhands.engines.quantities import expect_number, read_bandwidth, read_factor, read_items, read_seconds, shown
from manyhands.errors import BadInput

TIMES = {"0.01": 0.01, "1e-4": 1e-4, "10ms": 0.01, "50us": 5e-5, "50µs": 5e-5, "7ns": 7e-9, "2s": 2.0, "2 s": 2.0}
BANDWIDTHS = {"1e9": 1e9, "100Mbit": 1e8, "100mbit": 1e8, "100Mbit/s": 1e8, "100Mbps": 1e8, "56kbit": 56e3}
BANDWIDTHS |= {"1Gbit": 1e9, "2.5Gbit": 2.5e9, "1Tbit": 1e12, "1000bit": 1e3, "inf": math.inf}


def test_times_and_bandwidths() -> None:
    assert {text: read_seconds(text, "latency") for text in [*TIMES, ".5"]} == {**TIMES, ".5": 0.5}
    assert {text: read_bandwidth(text, "bandwidth") for text in BANDWIDTHS} == BANDWIDTHS
    all_refused(
        lambda text: read_seconds(text, "latency"),
        [
            (text, "latency must be a time in seconds, such as")
            for text in ("", "1m", "10MS", "-1", "1 0", "nan", "inf", "1min", "s", "1e", "1,5")
        ],
    )
    words = r"bandwidth must be a number of bit/s above 0, such as 1e9.*; got '[^']*'$"
    no_bandwidths = [(text, words) for text in ("", "0", "-1", "1G", "100M", "nan", "Mbit", "1Xbit")]
    bytes_ = [(text, "bytes are not bits, 1 MB/s is 8Mbit") for text in ("100MB", "100MB/s", "1GBps", "8B")]
    all_refused(
        lambda text: read_bandwidth(text, "bandwidth"), [*no_bandwidths, *bytes_, ("100 Mbyte", "are not bits")]
    )


def test_factors() -> None:
    assert [read_factor(text, "3") for text in ("5x", "0.5x", "2")] == [5.0, 0.5, 2.0]
    no_factors = [(text, "3 must be a factor above 0, such as 5x") for text in ("0x", "-1x", "x", "5y", "")]
    all_refused(lambda text: read_factor(text, "3"), no_factors)


def test_items() -> None:
    assert read_items("lan, a=1 ,b='x,y'", "network") == [("lan", ""), ("a", "1"), ("b", "x,y")]
    assert read_items("[a=1,b=2]", "network") == [("a", "1"), ("b", "2")]
    assert read_items("  ", "network") == []
    all_refused(
        lambda text: read_items(text, "network"),
        [(text, "network must be option=value") for text in ("a=", "=1", "a=1,,b=2")],
    )


def test_numbers_of_dataclasses() -> None:
    expect_number(0, "row", least=0)
    odd = [(value, "row must be a finite number; got") for value in (math.nan, math.inf, True, "1", None)]
    all_refused(lambda value: expect_number(value, "row"), odd)
    with pytest.raises(BadInput, match="row must be at least 0; got -1"):
        expect_number(-1, "row", least=0)
    with pytest.raises(BadInput, match="row must be above 0; got 0"):
        expect_number(0, "row", above=0)


def test_a_number_is_shown_short_and_exact() -> None:
    for value, text in ((1e9, "1e+09"), (0.1, "0.1"), (1 / 3, "0.3333333333333333"), (math.inf, "inf")):
        assert (shown(value), float(text)) == (text, value)
