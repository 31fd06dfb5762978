import statistics

import pytest

from manyhands.engines.faults import Fault, Faults
from manyhands.errors import BadInput, UnknownName
from refusals import all_refused

EVERYTHING = (
    "kill=2@step:100,pause=1@2.5s+3,restart=shard0@4s+500ms,kill=shard1@9,drop=0.01,duplicate=0.02,delay=0.1:0.5,"
    "reorder=0.05,retry=0.3,notice=2,cut=host1@2s+3"
)


def test_what_is_read() -> None:
    parse = Faults.parse
    assert parse(EVERYTHING) == Faults(
        planned=(
            Fault(what="kill", node=2, step=100),
            Fault(what="pause", node=1, time=2.5, seconds=3.0),
            Fault(what="restart", node=-1, time=4.0, seconds=0.5),
            Fault(what="kill", node=-2, time=9.0),
            Fault(what="cut", node=1, time=2.0, seconds=3.0),
        ),
        drop=0.01,
        duplicate=0.02,
        delay=0.1,
        delay_s=0.5,
        reorder=0.05,
        retry_s=0.3,
        notice_s=2.0,
    )
    for text in ("", EVERYTHING, "pause=0@1e-3+1e+2s", "restart=3@step:0", "drop=1e-6", "delay=0:0.5"):
        assert parse(str(parse(text))) == parse(text), text
        assert hash(parse(str(parse(text)))) == hash(parse(text)), text
    assert parse("") == Faults()
    assert parse("kill=1@2s").messages(0) is None


REFUSED = {
    "crash=2@1s": "no option 'crash'.*kill, pause, restart, leave, join, nan, disk, cut, drop",
    "kill=2": "kill must be WHO@WHEN.*got '2': write for example kill=2@step:100",
    "pause=x@1s+1": r"pause must be WHO@WHEN.*pause=2@step:100\+3",
    "kill=2@-1s": "kill must be WHO@WHEN",
    "kill=shard0@step:3": "a server shard makes no steps.*kill=shard0@2.5s",
    "pause=1@2s": r"does not say for how long: write pause=1@2s\+3",
    "kill=1@2s+3": r"gives a time to come back, .*: write restart=1@2s\+3",
    "nan=1@2s": "must be nan=WORKER@step:NUMBER.*write nan=1@step:100",
    "disk=1@step:3+2": "must be disk=WORKER@step:NUMBER",
    "cut=1@2s+3": r"cut names a host: write cut=host1@2s\+3",
    "kill=host1@2s": "kill names a worker or a server shard, and cut alone a host",
    "cut=host1@2s": r"does not say for how long: write cut=host1@2s\+3",
    "cut=host1@step:2+3": r"must be cut=hostNUMBER@TIME\+SECONDS",
    "drop=1": "drop must be a probability of at least 0 and below 1; got 1.0",
    "reorder=-0.1": "reorder must be a probability",
    "drop=often": "drop must be a number.*got 'often'",
    "delay=0.1": "does not say for how long: write delay=0.1:0.5",
    "delay=0.1:soon": "the mean delay must be a time",
    "retry=0": r"retry \(seconds\) must be above 0",
}


def test_what_is_refused() -> None:
    all_refused(Faults.parse, REFUSED.items())
    with pytest.raises(UnknownName):
        Faults.parse("lose=0.1")
    for options in ({}, {"step": 1, "time": 1.0}, {"step": -1}, {"time": -1.0}, {"what": "explode", "time": 1.0}):
        with pytest.raises(BadInput, match="faults: "):
            Fault(**{"what": "kill", "node": 0, **options})  # type: ignore[arg-type]


def copies(text: str, n: int = 20_000, seed: int = 0) -> list[list[float]]:
    messages = Faults.parse(text).messages(seed)
    assert messages is not None
    return [messages.copies() for _ in range(n)]


def test_so_many_messages_are_lost_come_twice_or_are_late() -> None:
    for text, fate in (("drop=0.25", []), ("duplicate=0.25", [0.0, 0.0])):
        seen = copies(text)
        assert seen.count(fate) == pytest.approx(5000, rel=0.05), text
        assert seen.count(fate) + seen.count([0.0]) == 20_000, text
    late = [copy for (copy,) in copies("delay=0.25:0.5") if copy]
    assert len(late) == pytest.approx(5000, rel=0.05)
    assert (statistics.fmean(late), statistics.pstdev(late)) == pytest.approx((0.5, 0.5), rel=0.05)
    late = [copy for (copy,) in copies("reorder=0.25,retry=0.1") if copy]  # held back for up to two retries
    assert len(late) == pytest.approx(5000, rel=0.05)
    assert 0.19 < max(late) <= 0.2
    assert statistics.fmean(late) == pytest.approx(0.1, rel=0.05)
    twice = [seen for seen in copies("duplicate=0.5,delay=0.5:1", 200) if len(seen) == 2]
    assert any(first != second for first, second in twice)  # each for itself


def test_the_same_seed_draws_the_same() -> None:
    text = "drop=0.1,duplicate=0.1,delay=0.1:0.5,reorder=0.1"
    assert copies(text, 200, seed=3) == copies(text, 200, seed=3)
    assert copies(text, 200, seed=3) != copies(text, 200, seed=4)
