"""Searches random schedules of deaths, cuts and late messages for one in which copies of a shard break a promise.

The world and its promises are in replication_chaos.py. `failure_of(seed)` repeats what a failure names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from replication_chaos import Rules, World, failure_of

from manyhands.server.replication.log import Copy, ReleasedReplies


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class AnswersAtOnce(Copy):
    """Rule 2 out: what a call gave leaves before the backup has it."""

    def may_leave(self, index: int) -> bool:
        return self.is_primary


class TakesOldEntries(Copy):
    """Rule 3 out: a copy makes and acknowledges the calls of a primary in whose place it is."""

    def receive(self, link: int, index: int) -> None:
        if not self.is_primary:
            super().receive(link, index)


class IsCopiedWithTheImage(Copy):
    """Rule 4 out: a new copy is the backup once it has the image, whatever was answered meanwhile."""

    def acknowledge(self, link: int, index: int) -> bool:
        first = not self.waits and link == self.view.link and self.is_primary
        done = super().acknowledge(link, index)
        self._copied_at = None
        return first or done

    def may_leave(self, index: int) -> bool:
        return self.is_primary and (self.view.backup is None or self.acknowledged >= index)


class GoesOnAlone(Copy):
    """Rule 5 out: a primary whose backup does not acknowledge answers all the same, once it has asked for a view."""

    alone = False

    def may_leave(self, index: int) -> bool:
        return self.is_primary and (self.alone or super().may_leave(index))


class KeepsReplies(ReleasedReplies):
    """Rule 6 out: what was given for an earlier call answers a later one."""

    def begin(self, worker_id: int) -> None:
        pass


MUTATIONS = {
    "the fence at the server": Rules(fence_at_server=False),
    "TICK has no number": Rules(ticks_numbered=False),
    "the worker's own count of answers": Rules(counts_at_server=False),
    "rule 2": Rules(copy=AnswersAtOnce),
    "rule 3": Rules(copy=TakesOldEntries),
    "rule 4": Rules(copy=IsCopiedWithTheImage),
    "rule 5": Rules(copy=GoesOnAlone, goes_on_alone=True),
    "rule 6": Rules(replies=KeepsReplies),
}


def search(first: int, until: int, rules: Rules = Rules()) -> tuple[int, str]:  # noqa: B008
    """(The first seed at which something breaks, what), (-1, "") where nothing does."""
    for seed in range(first, until):
        if broken := failure_of(seed, rules):
            return seed, broken
    return -1, ""


def test_some_schedules_keep_all_promises() -> None:
    assert search(0, 100) == (-1, "")


@pytest.mark.slow
def test_many_more_schedules_keep_all_promises() -> None:
    assert search(100, 20_100) == (-1, "")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_search_finds_a_rule_that_is_left_out(mutation: str) -> None:
    seed, broken = search(0, 10_000, MUTATIONS[mutation])
    assert broken, f"{mutation} was not found in 10,000 schedules"
    assert failure_of(seed) == ""


def test_all_that_can_happen_happens() -> None:
    """The search has teeth only if it comes everywhere."""
    worlds = [World(seed) for seed in range(150)]
    for world in worlds:
        world.run()
    assert {world.end for world in worlds} == {"done", "lost"}
    assert all(sum(world.counts[what] for world in worlds) > 20 for what in worlds[0].counts)
    assert max(world.views.view.number for world in worlds) > 5
    assert any(world.views.serving is None for world in worlds)
