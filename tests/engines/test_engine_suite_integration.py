"""Engine `local` passes the conformance suite; and the suite fails engines that break a promise."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError, Unsupported, WorkerFailed
from manyhands.testing import engine_suite
from manyhands.testing.engine_suite import ENGINE_SUITE
from manyhands.testing.group_suite import CheckFailed
from manyhands.worker import Worker, set_current

Program = Callable[[Worker], Any]
CHECKS = [check for check in ENGINE_SUITE if check != "nothing_left"]  # which is of a process of its own


@pytest.mark.parametrize(
    "check", [pytest.param(one, marks=pytest.mark.slow) if one == "groups_of_some" else one for one in CHECKS]
)
def test_local_passes(local: Local, check: str) -> None:
    """CASES 21, 28"""
    ENGINE_SUITE[check](local, workers=2)


def test_one_worker_passes(local: Local) -> None:
    for check in CHECKS:
        ENGINE_SUITE[check](local, workers=1)


def local_launch(program: Program, plan: LaunchSpec) -> list[Any]:
    return Local().launch(program, plan)


@dataclass(frozen=True, kw_only=True)
class Broken(Engine):
    """Engine `local`, with another launch."""

    name: ClassVar[str] = "broken"
    breaks: Callable[[Program, LaunchSpec], list[Any]] = local_launch

    def launch(self, program: Program, plan: LaunchSpec) -> list[Any]:
        return self.breaks(program, plan)


def backwards(program: Program, plan: LaunchSpec) -> list[Any]:
    return [program(Worker(rank=rank, size=plan.workers)) for rank in reversed(range(plan.workers))]


def without_threads(program: Program, plan: LaunchSpec) -> list[Any]:
    worker = Worker(threads=3)
    set_current(worker)
    try:
        return [program(worker)]
    finally:
        set_current(None)


def stays_current(program: Program, plan: LaunchSpec) -> list[Any]:
    try:
        return local_launch(program, plan)
    finally:
        set_current(Worker())


def wrong_group(program: Program, plan: LaunchSpec) -> list[Any]:
    def forgets(worker: Worker) -> Any:
        worker.group.broadcast_ = lambda tensor, source: tensor.zero_()  # type: ignore[method-assign]
        return program(worker)

    return local_launch(forgets, plan)


def one_group(program: Program, plan: LaunchSpec) -> list[Any]:
    """What it gives for a part of the workers is the group of all."""
    return local_launch(lambda worker: program(replace(worker, subgroup=lambda ranks: worker.group)), plan)


def swallows(program: Program, plan: LaunchSpec) -> list[Any]:
    try:
        return local_launch(program, plan)
    except ManyhandsError:
        return [None] * plan.workers


def anonymous(program: Program, plan: LaunchSpec) -> list[Any]:
    try:
        return local_launch(program, plan)
    except WorkerFailed as error:
        place = {"rank": error.rank, "host": error.host, "phase": error.phase, "step": 0}
        raise WorkerFailed("a worker failed", error=error.error, **place) from error  # type: ignore[arg-type]


def deaf(program: Program, plan: LaunchSpec) -> list[Any]:
    """Events come late, the newest first; rows never, and nobody asks for a stop."""
    heard: list[Any] = []
    late = Observer()
    late.event = lambda event: heard.insert(0, event)  # type: ignore[method-assign]
    late.answer = plan.observer.answer  # type: ignore[method-assign]
    values = local_launch(program, replace(plan, observer=late))
    for event in heard:
        plan.observer.event(event)
    return values


def other_thread(program: Program, plan: LaunchSpec) -> list[Any]:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(local_launch(program, plan)))
    thread.start()
    thread.join(30)
    return values


LEFT = ExitStack()


def leaky(program: Program, plan: LaunchSpec) -> list[Any]:
    LEFT.enter_context(open(os.devnull))  # noqa: SIM115
    return local_launch(program, plan)


def orphans(program: Program, plan: LaunchSpec) -> list[Any]:
    process = LEFT.enter_context(subprocess.Popen(["sleep", "30"]))
    LEFT.callback(process.kill)
    return local_launch(program, plan)


@pytest.fixture
def tidied() -> Iterator[None]:
    yield
    set_current(None)
    LEFT.close()


@pytest.mark.usefixtures("tidied")
@pytest.mark.parametrize(
    ("breaks", "workers", "check", "problem"),
    [
        (backwards, 2, "values", "in rank order"),
        (without_threads, 1, "worker", r"threads: expected \(1, 1\), got \(3"),
        (stays_current, 1, "worker", "still counts as a worker"),
        (wrong_group, 2, "group", "broadcast_"),  # found by a worker in another process
        (one_group, 2, "groups_of_some", r"\[0, 2\]: is [02] of 3"),
        (swallows, 1, "bad_input", "raised BadInput, and launch returned"),
        (swallows, 1, "failure", "raised KeyError, and launch returned"),
        (anonymous, 1, "failure", "'step': 7.*got.*'step': 0"),
        (deaf, 1, "events", "expected the order of sending"),
        (deaf, 1, "rows", "expected 4 pieces of rows, each once; got 0"),
        (deaf, 1, "stopping", r"expected \('', 'enough'\), got \[\('', ''\)\]"),
        (other_thread, 1, "events", "another thread"),
        (leaky, 1, "nothing_left", "descriptors"),
        (orphans, 1, "nothing_left", "processes"),
    ],
)
def test_a_broken_engine_fails(
    breaks: Any, workers: int, check: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_suite, "DEADLINE_S", 30.0 if workers > 1 else 3.0)
    with pytest.raises(CheckFailed, match=problem):
        ENGINE_SUITE[check](Broken(breaks=breaks), workers=workers)


def test_engines_in_place_are_refused() -> None:
    class InPlace(Broken):
        capabilities = Capabilities(spmd=True)

    with pytest.raises(Unsupported, match="every worker would have to run the suite"):
        ENGINE_SUITE["values"](InPlace())
