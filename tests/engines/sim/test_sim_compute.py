from __future__ import annotations

import math
import statistics

import pytest

from manyhands.comm.codecs import CODECS, codec_of
from manyhands.engines.sim.compute import FREE, Coding, Compute, ComputeSpeed
from manyhands.errors import BadInput, UnknownName

EVERYTHING = "row=1e-4,step=1ms,jitter=lognormal:0.2,3=5x,7=0.5x,8-10=2x,lease=1e-4,request=5e-5,merge=2e-10,topk=15e-9/1e-9,threshold=1e-9/0/12e-9/7e-9"


def draws(text, n=20_000, rank=0, seed=0, rows=1):
    pace = ComputeSpeed(Compute.parse(text), rank, seed)
    return [pace.seconds(rows) for _ in range(n)]


# -- how it is written ---------------------------------------------------------------------------------------------------


def test_everything_at_once():
    assert Compute.parse(EVERYTHING) == Compute(
        row=1e-4,
        step=1e-3,
        jitter="lognormal:0.2",
        factors={3: 5.0, 7: 0.5, 8: 2.0, 9: 2.0, 10: 2.0},
        lease=1e-4,
        request=5e-5,
        merge=2e-10,
        codecs={"topk": Coding(15e-9, 1e-9), "threshold": Coding(1e-9, 0.0, 12e-9, 7e-9)},
    )


@pytest.mark.parametrize("text", ["", "row=0", EVERYTHING, "jitter=quantiles:0.5/1/3", "row=50us,jitter=exponential"])
def test_str_is_what_parse_reads(text):
    compute = Compute.parse(text)
    assert Compute.parse(str(compute)) == compute
    assert hash(compute) == hash(Compute.parse(str(compute)))


def test_text_changes_only_what_it_names():
    after = Compute.parse(EVERYTHING).with_text("step=2ms,3=1x,topk=2/1,int8=4/3")
    assert (after.step, after.row, after.jitter) == (2e-3, 1e-4, "lognormal:0.2")
    assert (after.factors[3], after.factors[7]) == (1.0, 0.5)
    assert after.codecs == {
        "topk": Coding(2.0, 1.0),
        "threshold": Coding(1e-9, 0.0, 12e-9, 7e-9),
        "int8": Coding(4.0, 3.0),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=1", "compute has no option 'rows'.*did you mean 'row'.*RANK=5x"),
        ("row", "compute: row must be a time"),
        ("row=-1", "compute: row must be a time in seconds"),
        ("3=0x", "compute: 3 must be a factor above 0"),
        ("topk=15ns", "compute: topk must be ENCODE/DECODE.*got '15ns'"),
        ("topk=15ns/-1ns", "compute: topk must be a time in seconds"),
        ("topk:0.1=1/1", "compute has no option 'topk:0.1'.*did you mean 'topk'"),
        ("jitter=normal:1", "jitter must be one of none, lognormal:SIGMA.*got 'normal:1'.*jitter=lognormal:0.2"),
        ("jitter=none:1", "jitter must be one of"),
        ("jitter=lognormal", "jitter must be one of.*with numbers of at least 0; got 'lognormal'"),
        ("10-8=5x", "for one worker .* or for several.*got '10-8'"),
        ("0-999999999999=5x", "for one worker .* or for several"),
        (f"{'9' * 5000}=5x", "for one worker .* or for several"),
        ("jitter=lognormal:-1", "with numbers of at least 0"),
        ("jitter=uniform:1.5", "SHARE in jitter=uniform:SHARE must be at most 1.*got 1.5"),
        ("jitter=quantiles:1", "two or more numbers in ascending order.*got 1"),
        ("jitter=quantiles:2/1", "two or more numbers in ascending order.*got 2/1"),
        ("jitter=quantiles:0/0", "the last one above 0; got 0/0"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(BadInput, match=message):
        Compute.parse(text)


def test_an_unknown_option_is_an_unknown_name():
    with pytest.raises(UnknownName):
        Compute.parse("rate=1")


@pytest.mark.parametrize("options", [{"row": -1.0}, {"step": math.nan}, {"factors": {-1: 2.0}}, {"factors": {0: 0.0}}])
def test_numbers_that_make_no_sense_are_refused_from_python_too(options):
    with pytest.raises(BadInput, match="compute: "):
        Compute(**options)


def test_a_codec_that_is_not_there():
    with pytest.raises(UnknownName, match="compute has no option 'zip'.*topk"):
        Compute(codecs={"zip": FREE})


def test_a_codec_takes_what_is_said_times_the_workers_factor():
    """Whatever the numbers behind its name; shards have no factor, and codecs of which nothing is said are free."""
    compute = Compute.parse("topk=2/1/4/3,1=3x")
    for text in ("topk:0.01", "topk:0.5"):
        codec = codec_of(text).name
        assert compute.coding(codec, 0) == compute.coding(codec, -2) == Coding(2.0, 1.0, 4.0, 3.0)
        assert compute.coding(codec, 1) == Coding(6.0, 3.0, 12.0, 9.0)
    assert compute.coding("bf16", 1) == FREE


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_can_be_named(name):
    assert Compute.parse(f"{name}=2/1").codecs == {name: Coding(2.0, 1.0)}


def test_a_factor_of_a_worker_that_is_not_there():
    Compute.parse("3=5x").check(4)
    with pytest.raises(BadInput, match="worker 3 has a factor, and the last worker of this run is 2"):
        Compute.parse("3=5x,7=2x").check(3)


# -- seconds -------------------------------------------------------------------------------------------------------------


def test_seconds_of_a_tick():
    """1 ms and 32 rows of 0.1 ms: 4.2 ms; a tick without rows takes none."""
    pace = ComputeSpeed(Compute.parse("row=1e-4,step=1ms"), 0, 0)
    assert pace.seconds(32) == pytest.approx(4.2e-3)
    assert pace.seconds(0) == 0.0


def test_a_straggler_takes_so_many_times_as_long():
    compute = Compute.parse("row=1e-4,step=1ms,3=5x,7=0.5x")
    assert [ComputeSpeed(compute, rank, 0).seconds(32) for rank in (0, 3, 7)] == pytest.approx([4.2e-3, 21e-3, 2.1e-3])


@pytest.mark.parametrize(
    ("jitter", "deviation"),
    [
        ("lognormal:0.5", math.sqrt(math.expm1(0.25))),
        ("exponential", 1.0),
        ("uniform:0.3", 0.3 / math.sqrt(3)),
        ("quantiles:0/2", 1 / math.sqrt(3)),  # uniform between 0 and 2
        ("quantiles:1/1", 0.0),
    ],
)
def test_jitter_has_mean_1_and_its_own_spread(jitter, deviation):
    factors = draws(f"row=1,jitter={jitter}")
    assert statistics.fmean(factors) == pytest.approx(1, abs=0.03)
    assert statistics.pstdev(factors) == pytest.approx(deviation, rel=0.03, abs=1e-12)
    assert min(factors) >= 0


def test_quantiles_are_joined_by_lines():
    """1, 1, 4: the mean of the two lines is (1 + 2.5) / 2 = 1.75; so half of the draws are 1/1.75, the greatest below 4/1.75."""
    factors = draws("row=1,jitter=quantiles:1/1/4")
    assert sum(factor == pytest.approx(1 / 1.75) for factor in factors) == pytest.approx(10_000, rel=0.05)
    assert 3.9 / 1.75 < max(factors) < 4 / 1.75
    assert statistics.fmean(factors) == pytest.approx(1, abs=0.03)


def test_each_worker_draws_its_own_and_the_same_again():
    text = "row=1,jitter=exponential"
    assert draws(text, 5, rank=1, seed=7) == draws(text, 5, rank=1, seed=7)
    assert draws(text, 5, rank=1, seed=7) != draws(text, 5, rank=2, seed=7)
    assert draws(text, 5, rank=1, seed=7) != draws(text, 5, rank=1, seed=8)
    assert draws(text, 5, rank=11, seed=1) != draws(text, 5, rank=1, seed=11)


def test_the_draw_of_a_tick_does_not_depend_on_its_rows_or_on_empty_ticks():
    pace, other = (ComputeSpeed(Compute.parse("row=1,jitter=exponential"), 0, 0) for _ in range(2))
    first = [pace.seconds(1), pace.seconds(1)]
    assert [other.seconds(2) / 2, other.seconds(0), other.seconds(1)] == [first[0], 0.0, first[1]]


# -- sim coding --------------------------------------------------------------------------------------------------------


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
    with pytest.raises(BadInput, match=f"compute: topk must be ENCODE/DECODE.*got '{text}': write 15ns/1ns"):
        Coding.parse(text, "compute: topk")


def test_what_is_no_time():
    with pytest.raises(BadInput, match="compute: topk must be a time in seconds.*got 'fast'"):
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
