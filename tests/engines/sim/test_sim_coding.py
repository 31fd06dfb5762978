"""What a codec takes, as people write it."""

import math

import pytest

from manyhands.engines.sim.coding import FREE, Coding
from manyhands.errors import BadInput


@pytest.mark.parametrize(
    ("text", "coding"),
    [
        ("15ns/1ns", Coding(15e-9, 1e-9)),
        ("0/0", FREE),
        ("1e-9/0/12ns/7ns", Coding(1e-9, 0.0, 12e-9, 7e-9)),
        ("1us/2us/0/3us", Coding(1e-6, 2e-6, 0.0, 3e-6)),
    ],
)
def test_what_is_read_is_what_is_written(text, coding):
    read = Coding.parse(text, "compute: topk")
    assert read == coding
    assert Coding.parse(str(read), "compute: topk") == read


def test_seconds_a_byte_are_written_only_where_there_are_any():
    assert str(Coding(2.0, 1.0)) == "2/1"
    assert str(Coding(2.0, 1.0, 0.0, 3.0)) == "2/1/0/3"


@pytest.mark.parametrize("text", ["1ns", "1ns/1ns/1ns", "1/2/3/4/5"])
def test_two_or_four_times(text):
    with pytest.raises(
        BadInput, match=f"compute: topk is seconds to encode/to decode a number.*got '{text}': write 15ns/1ns"
    ):
        Coding.parse(text, "compute: topk")


def test_what_is_no_time():
    with pytest.raises(BadInput, match="compute: topk is a time in seconds.*got 'fast'"):
        Coding.parse("1ns/fast", "compute: topk")
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(BadInput, match="a codec's decode_byte"):
            Coding(decode_byte=wrong)


def test_seconds_are_linear_in_numbers_bytes_and_payloads():
    coding = Coding(1.0, 10.0, 100.0, 1000.0)
    assert coding.encoding(3, 2) == 3 + 200
    assert coding.decoding(3, 2) == 30 + 2000
    assert coding.decoding(3, 8, payloads=4) == 4 * 30 + 8000
    assert coding.times(2.0).encoding(3, 2) == 2 * coding.encoding(3, 2)
    assert coding.times(2.0).decoding(3, 8, 4) == 2 * coding.decoding(3, 8, 4)
    assert coding.times(1.0) is coding
