import math
import statistics

import pytest

from manyhands.comm.codecs import CODECS, codec_of
from manyhands.engines.sim.compute import FREE, Coding, Compute, ComputeSpeed
from manyhands.errors import BadInput, UnknownName
from refusals import all_refused

EVERYTHING = "row=1e-4,step=1ms,jitter=lognormal:0.2,3=5x,7=0.5x,8-10=2x,lease=1e-4,request=5e-5,merge=2e-10,topk=15e-9/1e-9,threshold=1e-9/0/12e-9/7e-9"
THRESHOLD = Coding(1e-9, 0.0, 12e-9, 7e-9)


def draws(text: str, n: int = 20_000, rank: int = 0, seed: int = 0, rows: int = 1) -> list[float]:
    pace = ComputeSpeed(Compute.parse(text), rank, seed)
    return [pace.seconds(rows) for _ in range(n)]


# -- how it is written ---------------------------------------------------------------------------------------------------


def test_what_is_read() -> None:
    parse = Compute.parse
    assert parse(EVERYTHING) == Compute(
        row=1e-4,
        step=1e-3,
        jitter="lognormal:0.2",
        factors={3: 5.0, 7: 0.5, 8: 2.0, 9: 2.0, 10: 2.0},
        lease=1e-4,
        request=5e-5,
        merge=2e-10,
        codecs={"topk": Coding(15e-9, 1e-9), "threshold": THRESHOLD},
    )
    for text in ("", "row=0", EVERYTHING, "jitter=quantiles:0.5/1/3", "row=50us,jitter=exponential"):
        assert parse(str(parse(text))) == parse(text), text
        assert hash(parse(str(parse(text)))) == hash(parse(text)), text
    after = parse(EVERYTHING).with_text("step=2ms,3=1x,topk=2/1,int8=4/3")
    assert (after.step, after.row, after.jitter) == (2e-3, 1e-4, "lognormal:0.2")
    assert (after.factors[3], after.factors[7]) == (1.0, 0.5)
    assert after.codecs == {"topk": Coding(2.0, 1.0), "threshold": THRESHOLD, "int8": Coding(4.0, 3.0)}
    for name in CODECS:
        assert parse(f"{name}=2/1").codecs == {name: Coding(2.0, 1.0)}


JITTER = "jitter must be one of none, lognormal:SIGMA"
REFUSED = {
    "rows=1": "no option 'rows'.*did you mean 'row'.*RANK=5x",
    "row": "row must be a time",
    "3=0x": "3 must be a factor above 0",
    "topk=15ns": "topk must be ENCODE/DECODE.*got '15ns': write 15ns/1ns",
    "topk=15ns/-1ns": "topk must be a time",
    "topk:0.1=1/1": "no option 'topk:0.1'.*did you mean 'topk'",
    "jitter=normal:1": f"{JITTER}.*got 'normal:1'.*jitter=lognormal:0.2",
    "jitter=lognormal:-1": f"{JITTER}.*with numbers of at least 0",
    "jitter=uniform:1.5": "SHARE must be at most 1.*got 1.5",
    "jitter=quantiles:1": "ascending order.*got 1",
    "jitter=quantiles:2/1": "ascending order.*got 2/1",
    "jitter=quantiles:0/0": "the last one above 0; got 0/0",
    "10-8=5x": "for one worker .* or for several.*got '10-8'",
    f"{'9' * 5000}=5x": "for one worker .* or for several",
}


def test_what_is_refused() -> None:
    all_refused(Compute.parse, REFUSED.items())
    with pytest.raises(UnknownName):
        Compute.parse("rate=1")
    for options in ({"row": -1.0}, {"step": math.nan}, {"factors": {-1: 2.0}}, {"factors": {0: 0.0}}):
        with pytest.raises(BadInput, match="compute: "):
            Compute(**options)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="no option 'zip'.*topk"):
        Compute(codecs={"zip": FREE})
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(BadInput, match="decode_byte"):
            Coding(decode_byte=wrong)
    Compute.parse("3=5x").check(4)
    with pytest.raises(BadInput, match="worker 3 has a factor, and the last worker of this run is 2"):
        Compute.parse("3=5x,7=2x").check(3)


# -- seconds -------------------------------------------------------------------------------------------------------------


def test_seconds_of_a_tick() -> None:
    """1 ms and 32 rows of 0.1 ms, times the worker's factor; a tick without rows takes none."""
    compute = Compute.parse("row=1e-4,step=1ms,3=5x,7=0.5x")
    assert [ComputeSpeed(compute, rank, 0).seconds(32) for rank in (0, 3, 7)] == pytest.approx([4.2e-3, 21e-3, 2.1e-3])
    assert ComputeSpeed(compute, 0, 0).seconds(0) == 0.0


def test_jitter_has_mean_1_and_its_own_spread() -> None:
    deviations = {
        "lognormal:0.5": math.sqrt(math.expm1(0.25)),
        "exponential": 1.0,
        "uniform:0.3": 0.3 / math.sqrt(3),
        "quantiles:0/2": 1 / math.sqrt(3),  # uniform between 0 and 2
        "quantiles:1/1": 0.0,
    }
    for jitter, deviation in deviations.items():
        factors = draws(f"row=1,jitter={jitter}")
        assert statistics.fmean(factors) == pytest.approx(1, abs=0.03), jitter
        assert statistics.pstdev(factors) == pytest.approx(deviation, rel=0.03, abs=1e-12), jitter
        assert min(factors) >= 0, jitter
    # quantiles are joined by lines: the mean of 1, 1, 4 is (1 + 2.5) / 2, so half of the draws are 1/1.75
    factors = draws("row=1,jitter=quantiles:1/1/4")
    assert sum(factor == pytest.approx(1 / 1.75) for factor in factors) == pytest.approx(10_000, rel=0.05)
    assert 3.9 / 1.75 < max(factors) < 4 / 1.75
    assert statistics.fmean(factors) == pytest.approx(1, abs=0.03)


def test_each_worker_draws_its_own_whatever_its_rows() -> None:
    text = "row=1,jitter=exponential"
    first = draws(text, 5, rank=1, seed=7)
    assert draws(text, 5, rank=1, seed=7) == first
    assert first not in (draws(text, 5, rank=2, seed=7), draws(text, 5, rank=1, seed=8))
    assert draws(text, 5, rank=11, seed=1) != draws(text, 5, rank=1, seed=11)
    pace = ComputeSpeed(Compute.parse(text), 1, 7)
    assert [pace.seconds(2) / 2, pace.seconds(0), pace.seconds(1)] == [first[0], 0.0, first[1]]


# -- what codecs take ------------------------------------------------------------------------------------------------------


def test_a_codec_takes_what_is_said_times_the_workers_factor() -> None:
    """Whatever the numbers behind its name; shards have no factor, and codecs of which nothing is said are free."""
    compute = Compute.parse("topk=2/1/4/3,1=3x")
    for text in ("topk:0.01", "topk:0.5"):
        codec = codec_of(text).name
        assert compute.coding(codec, 0) == compute.coding(codec, -2) == Coding(2.0, 1.0, 4.0, 3.0)
        assert compute.coding(codec, 1) == Coding(6.0, 3.0, 12.0, 9.0)
    assert compute.coding("bf16", 1) == FREE


def test_what_a_codec_takes() -> None:
    """As it is written, and linear in numbers, bytes and payloads."""
    for text, coding in {
        "15ns/1ns": Coding(15e-9, 1e-9),
        "0/0": FREE,
        "1e-9/0/12ns/7ns": THRESHOLD,
        "1us/2us/0/3us": Coding(1e-6, 2e-6, 0.0, 3e-6),
    }.items():
        assert Coding.parse(text, "compute: topk") == coding == Coding.parse(str(coding), "compute: topk"), text
    assert (str(Coding(2.0, 1.0)), str(Coding(2.0, 1.0, 0.0, 3.0))) == ("2/1", "2/1/0/3")
    coding = Coding(1.0, 10.0, 100.0, 1000.0)
    assert coding.encoding(3, 2) == 3 + 200
    assert (coding.decoding(3, 2), coding.decoding(3, 8, payloads=4)) == (30 + 2000, 4 * 30 + 8000)
    assert coding.times(2.0).encoding(3, 2) == 2 * coding.encoding(3, 2)
    assert coding.times(2.0).decoding(3, 8, 4) == 2 * coding.decoding(3, 8, 4)
    assert coding.times(1.0) is coding
