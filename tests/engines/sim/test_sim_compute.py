import math
import statistics

import pytest

from manyhands.comm.codecs import CODECS
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


def test_what_a_codec_takes_is_read_as_it_is_written() -> None:
    for text, coding in {
        "15ns/1ns": Coding(15e-9, 1e-9),
        "0/0": FREE,
        "1e-9/0/12ns/7ns": THRESHOLD,
        "1us/2us/0/3us": Coding(1e-6, 2e-6, 0.0, 3e-6),
    }.items():
        assert Coding.parse(text, "compute: topk") == coding == Coding.parse(str(coding), "compute: topk"), text
    assert (str(Coding(2.0, 1.0)), str(Coding(2.0, 1.0, 0.0, 3.0))) == ("2/1", "2/1/0/3")
