"""Searches random schedules of what befalls workers for one in which `Membership` breaks a promise.

The world and its promises are in membership_chaos.py. `failure_of(seed)` repeats what a failure names.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
from membership_chaos import World, failure_of

from manyhands.engines.driver.membership import Action, Membership


class OfBlanksOnly(Membership):
    """Rule 1 out: starts anew at step 0 with whoever is there."""

    def _may_form_of(self, waiting: list[Any]) -> bool:
        return True


class BeforeAllAsked(Membership):
    """Rule 1 out: does not wait until all live members of the last generation have requested."""

    def _form(self, now: float) -> None:
        members, generation = self._members, self.generation
        if self.phase == "gathering" and self._waiting():
            self._members = set()
        super()._form(now)
        if self.generation == generation:
            self._members = members


class LosesWhoHasNotAsked(Membership):
    """Rule 2 out: whoever has not requested when others have is lost."""

    def _must_request_by(self, worker: Any) -> float:
        return self._since if self.phase == "gathering" else super()._must_request_by(worker)


class WithoutFence(Membership):
    """Rule 3 out: forms while a lost worker's process may still run."""

    def _unfenced(self) -> bool:
        return False


class InterruptsAgain(Membership):
    """Rule 4 out: members are interrupted as often as somebody asks."""

    def _interrupt(self) -> None:
        self._interrupted.clear()
        super()._interrupt()


class TakesOldRequests(Membership):
    """Rule 4 out: a repeated request of an older generation counts for this one."""

    def requested(self, worker_id: int, generation: int, blank: bool, now: float) -> None:
        super().requested(worker_id, self._workers[worker_id].generation, blank, now)


class ForgetsToRelease(Membership):
    """Rule 5 out: whoever requests after the end gets no answer."""

    def _release(self, *workers: Any) -> None:
        super()._release(*(worker for worker in workers if self.phase != "finishing" or worker.blank))


class WaitsForEver(Membership):
    """min_workers without an end of the wait."""

    def _waits_until(self) -> float:
        return float("inf")


class ForgetsTheJoiner(Membership):
    """A joiner that requests while others gather is not taken along."""

    def _waiting(self) -> list[Any]:
        waiting = super()._waiting()
        return [one for one in waiting if one.generation >= 0] or waiting


MUTATIONS: dict[str, tuple[type[Membership], bool]] = {
    kind.__name__: (kind, False)
    for kind in (
        OfBlanksOnly,
        BeforeAllAsked,
        LosesWhoHasNotAsked,
        WithoutFence,
        InterruptsAgain,
        TakesOldRequests,
        ForgetsToRelease,
        WaitsForEver,
        ForgetsTheJoiner,
    )
} | {"workers obey an old Interrupt": (Membership, True)}


def search(first: int, until: int, kind: type[Membership] = Membership, obeys_any: bool = False) -> tuple[int, str]:
    """(The first seed at which something breaks, what), (-1, "") where nothing does."""
    for seed in range(first, until):
        if broken := failure_of(seed, kind, obeys_any):
            return seed, broken
    return -1, ""


def test_two_thousand_schedules_keep_all_promises() -> None:
    assert search(0, 2000) == (-1, "")


@pytest.mark.slow
def test_many_more_schedules_keep_all_promises() -> None:
    assert search(2000, 22_000) == (-1, "")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_search_finds_a_rule_that_is_left_out(mutation: str) -> None:
    seed, broken = search(0, 10_000, *MUTATIONS[mutation])
    assert broken, f"{mutation} was not found in 10,000 schedules"
    assert failure_of(seed) == ""


def test_all_that_can_happen_happens() -> None:
    """The search has teeth only if it comes everywhere."""
    worlds = [World(seed) for seed in range(500)]
    for world in worlds:
        world.run()
    causes = {loss["cause"] for world in worlds for loss in world.membership.losses}
    assert causes == {"death", "hang", "silence", "host", "link"}
    assert {world.end for world in worlds} == {"", "RestartRun", "FailRun"}
    assert {type(action) for world in worlds for action in world.actions} == set(get_args(Action))
    assert max(len(world.generations) for world in worlds) > 5
    assert min(len(world.generations) for world in worlds) == 0
