"""Every strategy passes the conformance suite; and the suite fails strategies that break a promise.

One spec of each way through a strategy takes the whole suite; a spec that differs from it by an option takes the checks
that the option touches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from manyhands.comm import threads
from manyhands.errors import BadInput
from manyhands.replica.replica import Replica
from manyhands.strategies import CATALOGUE, strategy_of
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Change, State, StepResult
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.testing.group_suite import CheckFailed
from manyhands.testing.strategy_suite import SIZES, STRATEGY_SUITE, checks_for, in_a_prepared_loop
from manyhands.worker import Worker

ALL = ""
TICKS = "finish round_of_nothing worker_without_rows"
MEMORY = TICKS + " resume"  # of what a worker keeps between ticks: windows, residuals
MEAN = "agreed round_of_nothing worker_without_rows resume"  # of gradients
PUSHES = "consensus finish pushes"  # of several workers at their own pace
OWN_PACE = PUSHES + " resume"


@dataclass(frozen=True)
class Row:
    """Why a spec is here, and its checks: all, or those that its options touch."""

    why: str
    checks: str = ALL
    own_loop: str | None = None  # the same in a prepared loop; None: it goes another spec's way there
    sizes: Sequence[int] = SIZES


STRATEGIES = {  # the row that a new strategy adds
    "solo": Row("one worker without a group", own_loop=ALL, sizes=(1,)),
    "allreduce": Row("the mean of gradients", own_loop=ALL),
    "allreduce:overlap=true": Row("slices leave during backward", MEAN + " streams plain_loop", ALL),
    "allreduce:combine=adasum": Row("another sum, of whole gradients", MEAN + " stop", ALL, (1, 4)),
    "allreduce:sharded=true": Row("parts of the optimizer's state", MEAN + " finish repeat plain_loop"),
    "allreduce:compress=topk:0.3": Row("a codec, with a residual", MEMORY + " plain_loop", ALL),
    "allreduce:compress=qsgd:4": Row("a codec that draws", "agreed repeat resume"),
    "allreduce:compress=powersgd:1": Row("a codec with a guess", "round_of_nothing resume"),
    "local-sgd:period=3": Row("the mean of parameters", own_loop=ALL),
    "local-sgd:period=2,optimizer_state=reset,warmup=3": Row("all-reduce at first", MEAN + " streams", "finish"),
    "local-sgd:period=end,optimizer_state=kept": Row("no exchange before the end", "finish streams stop resume"),
    "gossip": Row("mixing with a peer", own_loop=ALL),
    "gossip:graph=ring,period=3": Row("two peers; windows", MEMORY + " streams stop"),
    "gossip:graph=random": Row("one of three sits out", "consensus round_of_nothing worker_without_rows resume"),
    "gossip:weights=push-sum,period=2": Row("steps, then mixes", MEMORY + " plain_loop", TICKS),
    "gossip:graph=random,weights=push-sum": Row("masses differ", "resume"),
    "gossip:graph=pairs": Row("pairs at a server, at their own pace", own_loop=ALL),
    "gossip:graph=pairs,period=2,bound=1": Row("windows; who is ahead waits", OWN_PACE),
    "gossip:graph=pairs,period=3,bound=0": Row("pairs in step", MEMORY, "consensus finish"),
    "diloco:period=3": Row("outer steps on means of updates", own_loop=ALL),
    "diloco:period=4,streaming=2": Row("fragments on their way", own_loop=ALL),
    "diloco:period=3,streaming=3,overlap=2,mixing=.25": Row("several on their way", MEMORY),
    "diloco:period=2,via=server,quorum=1,grace=0": Row("rounds at a server, at their own pace", own_loop=ALL),
    "diloco:period=3,via=server,quorum=3,bound=1": Row("rounds of all; who is ahead waits", PUSHES),
    "diloco:period=3,via=server,bound=0": Row("outer steps at a server, in step", MEMORY, "consensus finish"),
    "diloco:period=2,compress=topk:0.3": Row("a codec, with a residual", MEMORY),
    "diloco:period=3,via=server,compress=onebit": Row("a codec of pushes", PUSHES),
    "diloco:period=3,via=server,bound=0,compress=powersgd:1": Row("a codec of pushes, in step", MEMORY),
    "ensemble": Row("nothing is exchanged", own_loop=ALL),
    "downpour": Row("pushes at their own pace", own_loop=ALL),
    "downpour:push_every=2,pull_every=3,warmup=2": Row("pulls within windows", OWN_PACE),
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=1": Row("gradients accrue; a bound", OWN_PACE),
    "downpour:push_every=2,pull_every=3,bound=0": Row("pushes in step", own_loop=ALL),
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=0": Row("gradients accrue, in step", "finish resume"),
    "downpour:rule=sgd,outer_rate=.5,outer_momentum=.5,bound=0": Row("a momentum there", "round_of_nothing resume"),
    "downpour:push_every=2,pull_every=3,bound=0,compress=onebit": Row("a codec of pushes, in step", MEMORY),
    "downpour:overlap=true": Row("computes while it exchanges", own_loop=ALL),
    "downpour:push_every=2,pull_every=3,overlap=true,warmup=2": Row("windows on their way", OWN_PACE),
    "downpour:push_every=2,compress=qsgd:4,overlap=true": Row("encoded on their way", PUSHES),
    "agn": Row("windows that are divided", own_loop=ALL),
    "agn:window=3,overlap=true,compress=topk:0.3": Row("windows on their way, encoded", OWN_PACE, PUSHES),
    "agn:window=3,bound=0": Row("windows in step", MEMORY + " streams stop"),
    "dynsgd": Row("agn's windows, another rule", "description finish resume pushes"),
    "dynsgd:bound=1,overlap=true": Row("what a window on its way is based on", OWN_PACE),
    "dynsgd:window=2,bound=0": Row("in step", MEMORY),
    "distance": Row("agn's windows, another rule", "description finish resume pushes"),
    "easgd": Row("elastic forces at a server", own_loop=ALL),
    "easgd:period=3,overlap=true": Row("forces on their way", OWN_PACE + " start", PUSHES),
    "easgd:period=2,bound=0": Row("forces in step", MEMORY, "consensus finish"),
    "easgd:period=3,via=group": Row("forces over the group", own_loop=ALL),
    "eamsgd": Row("a gradient where momentum leads", "description start " + OWN_PACE, "consensus finish pushes"),
    "eamsgd:period=3,bound=0": Row("in step", MEMORY),
    "eamsgd:period=2,via=group": Row("over the group", MEMORY + " streams", "consensus finish"),
    "quorum": Row("the mean of the first gradients", own_loop=ALL),
    "quorum:backups=1": Row("the first count", "start consensus agreed finish worker_without_rows streams stop", "finish"),
    "quorum:compress=int8": Row("a codec of pushes", MEMORY, TICKS),
    "update-sharing:bound=0": Row("messages to all, in step", own_loop=ALL),
    "update-sharing": Row("messages at their own pace", own_loop=ALL),
    "hogwild": Row("one memory", own_loop=ALL),
}  # fmt: skip
EXACT = ("solo", "allreduce", "local-sgd", "gossip", "ensemble", "quorum", "update-sharing", "hogwild")
"""One worker is a plain loop."""


def applying(spec: str, names: str, *, own_loop: bool = False) -> list[str]:
    apply = checks_for(strategy_of(spec), plain_loop=spec.partition(":")[0] in EXACT, own_loop=own_loop)
    assert apply.keys() >= set(names.split()), (spec, names)
    return names.split() or [
        name for name in apply if name != "repeat"
    ]  # what is resumed with the same bits repeats them


@pytest.mark.parametrize(
    ("spec", "check"),
    [
        pytest.param(spec, check, marks=[pytest.mark.slow] if check == "resume" and row.checks else [])
        for spec, row in STRATEGIES.items()
        for check in applying(spec, row.checks)
    ],
)
def test_a_strategy_passes(spec: str, check: str) -> None:
    """CASES 1, 18, 19, 25, 27; for the options of one strategy on several workers, unless only one repeats its bits."""
    row, strategy = STRATEGIES[spec], strategy_of(spec)
    one = strategy.leasing() is not None if check == "resume" else not row.checks
    STRATEGY_SUITE[check](strategy, sizes=row.sizes if one else row.sizes[-1:])


OWN_LOOPS = {spec: row.own_loop for spec, row in STRATEGIES.items() if row.own_loop is not None}


@pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=[] if s in ("allreduce", "downpour") else pytest.mark.slow) for s in OWN_LOOPS]
)
def test_a_strategy_passes_in_a_loop_of_ones_own(spec: str) -> None:
    with in_a_prepared_loop():
        for check in applying(spec, OWN_LOOPS[spec], own_loop=True):
            try:
                STRATEGY_SUITE[check](strategy_of(spec), sizes=STRATEGIES[spec].sizes)
            except CheckFailed as failed:
                pytest.fail(f"{check}: {failed}")


def test_every_strategy_of_the_catalogue_has_a_row() -> None:
    """But those that train kernels alone: test_rotate_integration.py."""
    of_kernels = {name for name in CATALOGUE if strategy_of(name).needs.kernel}
    assert {spec.partition(":")[0] for spec in STRATEGIES} == set(CATALOGUE) - of_kernels


def test_a_check_that_does_not_apply_says_so() -> None:
    in_step, own_pace = strategy_of("allreduce"), strategy_of("downpour")
    assert {"streams", "stop", "resume"} <= checks_for(in_step).keys() < checks_for(in_step, plain_loop=True).keys()
    assert checks_for(in_step, plain_loop=True).keys() == STRATEGY_SUITE.keys() - {"pushes"}
    assert {"pushes", "resume"} <= checks_for(own_pace).keys() <= STRATEGY_SUITE.keys() - {"streams", "stop", "agreed"}
    assert "pushes" not in checks_for(strategy_of("hogwild"))
    assert not {"description", "stop", "resume"} & checks_for(in_step, own_loop=True).keys()
    for strategy in (in_step, own_pace, strategy_of("hogwild")):
        for name in STRATEGY_SUITE.keys() - checks_for(strategy, plain_loop=True).keys():
            with pytest.raises(BadInput, match="does not apply to"):
                STRATEGY_SUITE[name](strategy)
    with pytest.raises(BadInput, match="only runs of one worker are reproducible"):
        STRATEGY_SUITE["resume"](own_pace, sizes=(3,))


def broken(kind: type[Any], before: Any = None, after: Any = None, **attributes: Any) -> Any:
    """`kind` with something done before or after each exchange, or with other attributes."""

    class Broken(kind):  # type: ignore[misc]
        def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
            if before is not None:
                before(replica)
            result: StepResult = super().exchange(replica, worker, state)
            return result if after is None else after(replica, result) or result

    for name, value in attributes.items():
        setattr(Broken, name, value)
    return Broken


_own_start = broken(
    AllReduce,
    start=lambda self, r, w: setattr(r, "broadcast_from_rank0", lambda group: None) or AllReduce.start(self, r, w),
)
_never_ends = broken(AllReduce, after=lambda r, result: replace(result, rows_left=True))
_ends_alone = broken(AllReduce, after=lambda r, result: replace(result, rows_left=r.control.more))
_never_votes = broken(LocalSGD, before=lambda r: setattr(r.control, "sync_if_due", lambda worker: False))
_stops_alone = broken(AllReduce, after=lambda r, result: setattr(r.control, "received", r.control.own))
_applies_twice = broken(AllReduce, after=lambda r, result: r.apply() and None)
_moves_alone = broken(LocalSGD, before=lambda r: r.idle and r.parameters.mul_(0.99))
_finishes_twice = broken(AllReduce, finish=lambda self, r, w, s: r.parameters.mul_(0.9))
_own_answer = broken(LocalSGD, consensus=lambda self, r, w, s: r.parameters)
_consensus_moves = broken(
    LocalSGD, consensus=lambda self, r, w, s: r.set_parameters(LocalSGD.consensus(self, r, w, s)) or r.parameters
)


class _Momentum(AllReduce):
    """An outer momentum outside of its state, which goes on by itself."""

    alone = True

    def start(self, replica: Replica, worker: Worker) -> Any:
        super().start(replica, worker)
        replica.velocity = replica.zeros()  # type: ignore[attr-defined]
        return State()

    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        before, velocity = replica.parameters.clone(), replica.velocity  # type: ignore[attr-defined]
        answer = super().exchange(replica, worker, state)
        velocity.mul_(0.5).add_(replica.parameters - before)
        if self.alone or replica.weight:
            replica.parameters.add_(velocity, alpha=0.1)
        return answer


class _Remembers(_Momentum):
    """Ticks without rows damp it."""

    alone = False


class _TalksWithRowsOnly(AllReduce):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        if replica.idle:
            return StepResult(applied=False, rows_left=replica.control.more)
        return super().exchange(replica, worker, state)


class _ThirdTime(AllReduce):
    runs = 0

    def start(self, replica: Replica, worker: Worker) -> Any:
        _ThirdTime.runs += 1
        return super().start(replica, worker)

    def synchronize(self, replica: Replica, worker: Worker, state: Any, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        replica.parameters.mul_(_ThirdTime.runs)


@pytest.mark.parametrize(
    ("strategy", "check", "problem"),
    [
        (_own_start(), "start", "the start of rank 1 has other bits"),
        (_never_ends(), "streams", r"ticks \[None\] by rank"),
        (_ends_alone(), "streams", r"ticks \[2, 6, 10\] by rank"),
        (_never_votes(period="end"), "streams", "None"),
        (_never_votes(period="end"), "stop", "received at ticks"),
        (_stops_alone(), "stop", r"\[None, None, 5\]"),
        (_finishes_twice(), "finish", "finish before the first tick"),
        (_own_answer(period=3), "consensus", "after tick 0 of rank 1 has other bits"),
        (_consensus_moves(period=3), "consensus", "computing the consensus after tick 0"),
        (_Momentum(), "round_of_nothing", "9 ticks without any rows"),
        (_Remembers(), "round_of_nothing", "training after 9 ticks without rows"),
        (_Remembers(), "resume", "resumed after 1 ticks"),
        (_moves_alone(period=3), "worker_without_rows", "without rows and outside of a round"),
        (_TalksWithRowsOnly(), "worker_without_rows", "hung"),
        (_applies_twice(), "plain_loop", "2 steps, expected one at most"),
        (_Momentum(), "plain_loop", "compared with a plain loop: expected the same bits"),
        (broken(AllReduce, source="")(), "description", "source is empty"),
        (_ThirdTime(), "repeat", "the same run twice"),
    ],
)
def test_a_broken_strategy_fails(strategy: Any, check: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "DEADLINE_S", 0.5)
    with pytest.raises(CheckFailed, match=problem):
        STRATEGY_SUITE[check](strategy)
