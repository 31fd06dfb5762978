import statistics

import pytest

from manyhands.engines.faults import Fault, Faults
from manyhands.errors import BadInput, UnknownName

EVERYTHING = (
    "kill=2@step:100,pause=1@2.5s+3,restart=shard0@4s+500ms,kill=shard1@9,drop=0.01,duplicate=0.02,delay=0.1:0.5,"
    "reorder=0.05,retry=0.3,notice=2,cut=host1@2s+3"
)


# -- how it is written ---------------------------------------------------------------------------------------------------


def test_everything_at_once():
    assert Faults.parse(EVERYTHING) == Faults(
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


@pytest.mark.parametrize("text", ["", EVERYTHING, "pause=0@1e-3+1e+2s", "restart=3@step:0", "drop=1e-6", "delay=0:0.5"])
def test_str_is_what_parse_reads(text):
    faults = Faults.parse(text)
    assert Faults.parse(str(faults)) == faults
    assert hash(faults) == hash(Faults.parse(str(faults)))


def test_nothing_goes_wrong_by_default():
    assert Faults.parse("") == Faults()
    assert Faults.parse("kill=1@2s").messages(0) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crash=2@1s", "faults has no option 'crash'.*kill, pause, restart, leave, join, nan, disk, cut, drop"),
        ("kill=2", "kill must be WHO@WHEN.*got '2': write for example kill=2@step:100"),
        ("pause=x@1s+1", "pause must be WHO@WHEN.*write for example pause=2@step:100\\+3"),
        ("kill=2@step:1.5", "kill must be WHO@WHEN"),
        ("kill=2@-1s", "kill must be WHO@WHEN"),
        ("kill=shard0@step:3", "kill=shard0@step:3 gives a step, and a server shard makes no steps.*kill=shard0@2.5s"),
        ("pause=1@2s", r"pause=1@2s does not say for how long: write pause=1@2s\+3"),
        ("kill=1@2s+3", r"kill=1@2s\+3 gives a time to come back, .*: write restart=1@2s\+3"),
        ("nan=1@2s", "nan=1@2s must be nan=WORKER@step:NUMBER.*write nan=1@step:100"),
        ("nan=1@step:3:exchange", "nan=1@step:3:exchange must be nan=WORKER@step:NUMBER"),
        ("disk=1@step:3+2", r"disk=1@step:3\+2 must be disk=WORKER@step:NUMBER"),
        ("disk=full@step:3", "disk must be WHO@WHEN"),
        ("cut=1@2s+3", r"cut names a host: write cut=host1@2s\+3; got '1@2s\+3'"),
        ("kill=host1@2s", "kill names a worker or a server shard, and cut alone a host"),
        ("cut=host1@2s", r"cut=host1@2s does not say for how long: write cut=host1@2s\+3"),
        ("cut=host1@step:2+3", r"cut=host1@step:2\+3 must be cut=hostNUMBER@TIME\+SECONDS"),
        ("drop=1", "drop must be a probability of at least 0 and below 1; got 1.0"),
        ("reorder=-0.1", "reorder must be a probability of at least 0 and below 1; got -0.1"),
        ("drop=often", "drop must be a number, as in drop=0.01; got 'often'"),
        ("drop=0.1:2", "drop must be a number, as in drop=0.01; got '0.1:2'"),
        ("delay=0.1", "delay=0.1 does not say for how long: write delay=0.1:0.5"),
        ("delay=x:1", "delay must be PROBABILITY:SECONDS, as in delay=0.1:0.5; got 'x:1'"),
        ("delay=0.1:soon", "the mean delay must be a time in seconds"),
        ("retry=0", r"retry \(seconds\) must be above 0; got 0"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(BadInput, match=message):
        Faults.parse(text)


def test_an_unknown_option_is_an_unknown_name():
    with pytest.raises(UnknownName):
        Faults.parse("lose=0.1")


@pytest.mark.parametrize(
    "options",
    [
        {"what": "kill", "node": 0},
        {"what": "kill", "node": 0, "step": 1, "time": 1.0},
        {"what": "kill", "node": 0, "step": -1},
        {"what": "kill", "node": 0, "time": -1.0},
        {"what": "explode", "node": 0, "time": 1.0},
    ],
)
def test_faults_that_cannot_be_are_refused_from_python_too(options):
    with pytest.raises(BadInput, match="faults: "):
        Fault(**options)


# -- messages --------------------------------------------------------------------------------------------------------------


def copies(text, n=20_000, seed=0):
    messages = Faults.parse(text).messages(seed)
    return [messages.copies() for _ in range(n)]


def test_so_many_are_lost():
    seen = copies("drop=0.25")
    assert seen.count([]) == pytest.approx(5000, rel=0.05)
    assert seen.count([]) + seen.count([0.0]) == 20_000


def test_so_many_come_twice():
    seen = copies("duplicate=0.25")
    assert seen.count([0.0, 0.0]) == pytest.approx(5000, rel=0.05)
    assert seen.count([0.0, 0.0]) + seen.count([0.0]) == 20_000


def test_so_many_are_late_by_so_much_on_average():
    late = [copy for (copy,) in copies("delay=0.25:0.5") if copy]
    assert len(late) == pytest.approx(5000, rel=0.05)
    assert statistics.fmean(late) == pytest.approx(0.5, rel=0.05)
    assert statistics.pstdev(late) == pytest.approx(0.5, rel=0.05)


def test_so_many_are_held_back_for_up_to_two_retries():
    late = [copy for (copy,) in copies("reorder=0.25,retry=0.1") if copy]
    assert len(late) == pytest.approx(5000, rel=0.05)
    assert 0.19 < max(late) <= 0.2
    assert statistics.fmean(late) == pytest.approx(0.1, rel=0.05)


def test_copies_are_late_each_for_itself():
    twice = [seen for seen in copies("duplicate=0.5,delay=0.5:1") if len(seen) == 2]
    assert any(first != second for first, second in twice)


def test_the_same_seed_draws_the_same():
    text = "drop=0.1,duplicate=0.1,delay=0.1:0.5,reorder=0.1"
    assert copies(text, 200, seed=3) == copies(text, 200, seed=3)
    assert copies(text, 200, seed=3) != copies(text, 200, seed=4)
