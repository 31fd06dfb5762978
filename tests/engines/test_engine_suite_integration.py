"""Engine `local` passes the conformance suite, warm and cold; and the suite fails engines that break a promise."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError, Unsupported, WorkerFailed
from manyhands.testing import engine_suite
from manyhands.testing.engine_suite import ENGINE_SUITE
from manyhands.testing.group_suite import CheckFailed
from manyhands.worker import Worker, set_current


@pytest.mark.parametrize("check", ENGINE_SUITE)
@pytest.mark.parametrize("workers", [1, 2])
def test_local_passes(local: Local, workers: int, check: str) -> None:
    """CASES 21, 28"""
    ENGINE_SUITE[check](local, workers=workers)


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_a_cold_local_leaves_nothing() -> None:
    """CASE 28"""
    ENGINE_SUITE["nothing_left"](Local())


class _Broken(Engine):
    """Engine `local`, until a subclass breaks it."""

    name: ClassVar[str] = "broken"
    whole: ClassVar[Local] = Local()

    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        return self.whole.launch(program, plan)


class _Backwards(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        return [program(Worker(rank=rank, size=plan.workers)) for rank in reversed(range(plan.workers))]


class _WithoutThreads(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        worker = Worker(threads=3)
        set_current(worker)
        try:
            return [program(worker)]
        finally:
            set_current(None)


class _StaysCurrent(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        values = super().launch(program, plan)
        set_current(Worker())
        return values


class _WrongGroup(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        def forgets(worker: Worker) -> Any:
            worker.group.broadcast_ = lambda tensor, source: tensor.zero_()  # type: ignore[method-assign]
            return program(worker)

        return super().launch(forgets, plan)


class _OneGroup(_Broken):
    """What it gives for a part of the workers is the group of all."""

    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        return super().launch(lambda worker: program(replace(worker, subgroup=lambda ranks: worker.group)), plan)


class _Swallows(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        try:
            return super().launch(program, plan)
        except ManyhandsError:
            return [None] * plan.workers


class _Anonymous(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        try:
            return super().launch(program, plan)
        except WorkerFailed as error:
            place = {"rank": error.rank, "host": error.host, "phase": error.phase, "step": 0}
            raise WorkerFailed("a worker failed", error=error.error, **place) from error  # type: ignore[arg-type]


class _Deaf(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        class Late(Observer):
            heard: ClassVar[list[Any]] = []

            def event(self, event: Any) -> None:
                self.heard.insert(0, event)

            def answer(self, event: Any) -> dict[str, Any]:
                return plan.observer.answer(event)

        values = super().launch(program, LaunchSpec(workers=plan.workers, threads_per_worker=1, observer=Late()))
        for event in Late.heard:
            plan.observer.event(event)
        return values


class _NeverStops(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        class Content(Observer):
            def event(self, event: Any) -> None:
                plan.observer.event(event)

        return super().launch(program, LaunchSpec(workers=plan.workers, threads_per_worker=1, observer=Content()))


class _OtherThread(_Broken):
    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        values: list[Any] = []
        thread = threading.Thread(target=lambda: values.extend(Local().launch(program, plan)))
        thread.start()
        thread.join(30)
        return values


class _Leaky(_Broken):
    left: ClassVar[list[Any]] = []

    def launch(self, program: Callable[[Worker], Any], plan: LaunchSpec) -> list[Any]:
        self.left.append(self.leak())
        return super().launch(program, plan)

    def leak(self) -> Any:
        return open(os.devnull)


class _Orphans(_Leaky):
    left: ClassVar[list[Any]] = []

    def leak(self) -> Any:
        return subprocess.Popen(["sleep", "30"])


@pytest.fixture
def tidied() -> Iterator[None]:
    yield
    set_current(None)
    for file in _Leaky.left:
        file.close()
    for process in _Orphans.left:
        process.kill()
        process.wait(10)
    _Leaky.left.clear()
    _Orphans.left.clear()


@pytest.mark.usefixtures("tidied")
@pytest.mark.parametrize(
    ("broken", "workers", "check", "problem"),
    [
        (_Backwards(), 2, "values", "in rank order"),
        (_WithoutThreads(), 1, "worker", r"threads: expected \(1, 1\), got \(3"),
        (_StaysCurrent(), 1, "worker", "still counts as a worker"),
        (_OneGroup(), 2, "groups_of_some", r"\[0, 2\]: is [02] of 3"),
        (_Swallows(), 1, "bad_input", "raised BadInput, and launch returned"),
        (_Swallows(), 1, "failure", "raised KeyError, and launch returned"),
        (_Anonymous(), 1, "failure", "'step': 7.*got.*'step': 0"),
        (_Deaf(), 1, "events", "expected the order of sending"),
        (_Deaf(), 1, "rows", "expected 4 pieces of rows, each once; got 0"),
        (_NeverStops(), 1, "stopping", r"expected \('', 'enough'\), got \[\('', ''\)\]"),
        (_OtherThread(), 1, "events", "another thread"),
        (_Leaky(), 1, "nothing_left", "descriptors"),
        (_Orphans(), 1, "nothing_left", "processes"),
    ],
)
def test_a_broken_engine_fails(
    broken: Engine, workers: int, check: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_suite, "DEADLINE_S", 3.0)
    with pytest.raises(CheckFailed, match=problem):
        ENGINE_SUITE[check](broken, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_group_fails(local: Local, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker found comes out as CheckFailed, from another process too."""
    monkeypatch.setattr(_Broken, "whole", local)
    with pytest.raises(CheckFailed, match="broadcast_"):
        ENGINE_SUITE["group"](_WrongGroup(), workers=workers)


def test_engines_in_place_are_refused() -> None:
    class InPlace(_Broken):
        capabilities = Capabilities(spmd=True)

    with pytest.raises(Unsupported, match="every worker would have to run the suite"):
        ENGINE_SUITE["values"](InPlace())
