"""Every strategy passes the conformance suite; and the suite fails strategies that break a promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from manyhands.comm import threads
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.strategies import CATALOGUE, strategy_of
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Change, State, StepResult
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.testing.group_suite import CheckFailed
from manyhands.testing.strategy_suite import OWN_LOOP_SUITE, SIZES, STRATEGY_SUITE
from manyhands.worker import Worker

STRATEGIES: dict[
    str, Sequence[int]
] = {  # the row that a new strategy adds: its spec, and the numbers of workers it takes
    "solo": (1,),
    "allreduce": SIZES,
    "allreduce:overlap=true": SIZES,
    "allreduce:combine=adasum": (1, 4),
    "allreduce:sharded=true": SIZES,
    "allreduce:compress=topk:0.3": SIZES,
    "allreduce:compress=qsgd:4": SIZES,
    "allreduce:compress=powersgd:1": SIZES,
    "allreduce:compress=bf16": SIZES,
    "local-sgd:period=3": SIZES,
    "local-sgd:period=2,optimizer_state=reset,warmup=3": SIZES,
    "local-sgd:period=end,optimizer_state=kept": SIZES,
    "gossip": SIZES,
    "gossip:graph=ring,period=3": SIZES,
    "gossip:graph=random": SIZES,
    "gossip:weights=push-sum,period=2": SIZES,
    "gossip:graph=random,weights=push-sum": SIZES,
    "gossip:graph=pairs": SIZES,
    "gossip:graph=pairs,period=2,bound=1": SIZES,
    "gossip:graph=pairs,period=3,bound=0": SIZES,
    "diloco": SIZES,
    "diloco:period=3": SIZES,
    "diloco:period=2,outer_rate=1.0,outer_momentum=0.0": SIZES,
    "diloco:period=4,streaming=2": SIZES,
    "diloco:period=3,streaming=3,overlap=2,mixing=.25": SIZES,
    "diloco:period=3,streaming=2,overlap=0,mixing=0.0": SIZES,
    "diloco:via=server": SIZES,
    "diloco:period=2,via=server,quorum=1,grace=0": SIZES,
    "diloco:period=3,via=server,quorum=3,bound=1": SIZES,
    "diloco:period=3,via=server,bound=0": SIZES,
    "diloco:period=2,compress=topk:0.3": SIZES,
    "diloco:period=3,compress=powersgd:1": SIZES,
    "diloco:compress=qsgd:4": SIZES,
    "diloco:period=3,via=server,compress=onebit": SIZES,
    "diloco:period=3,via=server,bound=0,compress=powersgd:1": SIZES,
    "ensemble": SIZES,
    "downpour": SIZES,
    "downpour:push_every=2,pull_every=3,warmup=2": SIZES,
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=1": SIZES,
    "downpour:push_every=2,pull_every=3,bound=0": SIZES,
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=0": SIZES,
    "downpour:rule=sgd,outer_rate=.5,outer_momentum=.5,bound=0": SIZES,
    "downpour:push_every=2,pull_every=3,bound=0,compress=onebit": SIZES,
    "downpour:compress=qsgd:4": SIZES,
    "downpour:overlap=true": SIZES,
    "downpour:push_every=2,pull_every=3,overlap=true,warmup=2": SIZES,
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=1,overlap=true": SIZES,
    "downpour:push_every=2,compress=qsgd:4,overlap=true": SIZES,
    "agn": SIZES,
    "agn:window=3,overlap=true,compress=topk:0.3": SIZES,
    "agn:window=3,bound=0": SIZES,
    "agn:window=2,bound=0,compress=threshold:1e-3": SIZES,
    "dynsgd": SIZES,
    "dynsgd:bound=1,overlap=true": SIZES,
    "dynsgd:window=2,bound=0": SIZES,
    "distance": SIZES,
    "distance:window=2,bound=0": SIZES,
    "easgd": SIZES,
    "easgd:period=3,overlap=true": SIZES,
    "easgd:period=2,bound=0": SIZES,
    "easgd:period=3,via=group": SIZES,
    "eamsgd": SIZES,
    "eamsgd:period=3,bound=0": SIZES,
    "eamsgd:period=2,via=group": SIZES,
    "quorum": SIZES,
    "quorum:backups=1": SIZES,
    "quorum:compress=int8": SIZES,
    "quorum:compress=powersgd:1": SIZES,
    "update-sharing:bound=0": SIZES,
    "update-sharing:bound=0,density=none,tau=1e-3": SIZES,
    "update-sharing": SIZES,
    "hogwild": SIZES,
}
EXACT = (
    "solo",
    "allreduce",
    "local-sgd",
    "gossip",
    "ensemble",
    "quorum",
    "update-sharing",
    "hogwild",
)  # one worker is a plain loop
RACES = ("repeat", "resume", "round_of_nothing")  # which gradients count depends on who is first


PAPERS = [
    pytest.param(s, c, marks=pytest.mark.slow if c == "resume" and ":" in s else ())  # more than a second each
    for s in STRATEGIES
    for c in STRATEGY_SUITE
    if c != "plain_loop" or s.partition(":")[0] in EXACT
]


@pytest.mark.parametrize(("spec", "check"), PAPERS)
def test_a_strategy_passes(spec: str, check: str) -> None:
    """CASES 1, 18, 19, 25, 27"""
    sizes = (1,) if spec == "quorum:backups=1" and check in RACES else STRATEGIES[spec]
    STRATEGY_SUITE[check](strategy_of(spec), sizes=sizes)


OWN_LOOPS = [
    pytest.param(s, c, marks=pytest.mark.slow if ":" in s else ())
    for s in STRATEGIES
    for c in OWN_LOOP_SUITE
    if s != "allreduce:sharded=true" and (c != "plain_loop" or s.partition(":")[0] in EXACT)
]


@pytest.mark.parametrize(("spec", "check"), OWN_LOOPS)
def test_a_strategy_passes_in_a_loop_of_ones_own(spec: str, check: str) -> None:
    sizes = (1,) if spec == "quorum:backups=1" and check in RACES else STRATEGIES[spec]
    OWN_LOOP_SUITE[check](strategy_of(spec), sizes=sizes)


def test_every_strategy_of_the_catalogue_has_a_row() -> None:
    """But those that train kernels alone: test_rotate_integration.py."""
    of_kernels = {name for name in CATALOGUE if strategy_of(name).needs.kernel}
    assert {spec.partition(":")[0] for spec in STRATEGIES} == set(CATALOGUE) - of_kernels


class _OwnStart(AllReduce):
    def start(self, replica: Replica, worker: Worker) -> Any:
        replica.broadcast_from_rank0 = lambda group: None  # type: ignore[method-assign]
        return super().start(replica, worker)


class _NeverEnds(AllReduce):
    def exchange(self, *args: Any) -> StepResult:
        return replace(super().exchange(*args), rows_left=True)


class _EndsAlone(AllReduce):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        return replace(super().exchange(replica, worker, state), rows_left=replica.control.more)


class _NeverVotes(LocalSGD):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        replica.control.sync_if_due = lambda worker: False  # type: ignore[method-assign]
        return super().exchange(replica, worker, state)


class _StopsAlone(AllReduce):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        answer = super().exchange(replica, worker, state)
        replica.control.received = replica.control.own
        return answer


class _FinishesTwice(AllReduce):
    def finish(self, replica: Replica, worker: Worker, state: Any) -> None:
        replica.parameters.mul_(0.9)


class _OwnAnswer(LocalSGD):
    def consensus(self, replica: Replica, worker: Worker, state: Any) -> FlatVector:
        return replica.parameters


class _ConsensusMoves(LocalSGD):
    def consensus(self, replica: Replica, worker: Worker, state: Any) -> FlatVector:
        replica.set_parameters(super().consensus(replica, worker, state))
        return replica.parameters


@dataclass(kw_only=True)
class _Velocity(State):
    velocity: FlatVector
    before: FlatVector | None = None


class _Momentum(AllReduce):
    """An outer momentum that goes on by itself."""

    def start(self, replica: Replica, worker: Worker) -> Any:
        super().start(replica, worker)
        return _Velocity(velocity=replica.zeros())

    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        before = replica.parameters.clone()
        answer = super().exchange(replica, worker, state)
        state.velocity.mul_(0.5).add_(replica.parameters - before)
        replica.parameters.add_(state.velocity, alpha=0.1)
        return answer


class _Remembers(AllReduce):
    """Outer momentum outside of its state, damped by ticks without rows."""

    def start(self, replica: Replica, worker: Worker) -> Any:
        super().start(replica, worker)
        replica.velocity = replica.zeros()  # type: ignore[attr-defined]
        return State()

    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        before, velocity = replica.parameters.clone(), replica.velocity  # type: ignore[attr-defined]
        answer = super().exchange(replica, worker, state)
        velocity.mul_(0.5).add_(replica.parameters - before)
        if replica.weight:
            replica.parameters.add_(velocity, alpha=0.1)
        return answer


class _MovesAlone(LocalSGD):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        if replica.idle:
            replica.parameters.mul_(0.99)
        return super().exchange(replica, worker, state)


class _TalksWithRowsOnly(AllReduce):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        if replica.idle:
            return StepResult(applied=False, rows_left=replica.control.more)
        return super().exchange(replica, worker, state)


class _AppliesTwice(AllReduce):
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        result = super().exchange(replica, worker, state)
        replica.apply()
        return result


class _Undescribed(AllReduce):
    source = ""


class _ThirdTime(AllReduce):
    runs = 0

    def start(self, replica: Replica, worker: Worker) -> Any:
        _ThirdTime.runs += 1
        return super().start(replica, worker)

    def synchronize(self, replica: Replica, worker: Worker, state: Any, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        replica.parameters.mul_(_ThirdTime.runs)


@pytest.mark.parametrize(
    ("broken", "check", "problem"),
    [
        (_OwnStart(), "start", "the start of rank 1 has other bits"),
        (_NeverEnds(), "streams", r"ticks \[None\] by rank"),
        (_EndsAlone(), "streams", r"ticks \[2, 6, 10\] by rank"),
        (_NeverVotes(period="end"), "streams", "None"),
        (_NeverVotes(period="end"), "stop", "received at ticks"),
        (_StopsAlone(), "stop", r"\[None, None, 5\]"),
        (_FinishesTwice(), "finish", "finish before the first tick"),
        (_OwnAnswer(period=3), "consensus", "after tick 0 of rank 1 has other bits"),
        (_ConsensusMoves(period=3), "consensus", "computing the consensus after tick 0"),
        (_Momentum(), "round_of_nothing", "9 ticks without any rows"),
        (_Remembers(), "round_of_nothing", "training after 9 ticks without rows"),
        (_Remembers(), "resume", "resumed after 1 ticks"),
        (_MovesAlone(period=3), "worker_without_rows", "without rows and outside of a round"),
        (_TalksWithRowsOnly(), "worker_without_rows", "hung"),
        (_AppliesTwice(), "plain_loop", "2 steps, expected one at most"),
        (_Momentum(), "plain_loop", "compared with a plain loop: expected the same bits"),
        (_Undescribed(), "description", "source is empty"),
        (_ThirdTime(), "repeat", "the same run twice"),
    ],
)
def test_a_broken_strategy_fails(broken: Any, check: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "DEADLINE_S", 0.5)
    with pytest.raises(CheckFailed, match=problem):
        STRATEGY_SUITE[check](broken)
