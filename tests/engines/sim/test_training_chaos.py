"""Searches random schedules of what befalls trainings for one in which a row is lost or counted twice, or that does not end.

The world and its promises are in training_chaos.py. `failure_of(seed)` repeats what a failure names. What needs messages
that this world does not have, as a broken connection between two copies, membership_chaos.py and replication_chaos.py have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_chaos import Schedule, failure_of, schedule_of, server_schedule_of

from manyhands.data.slice_ledger import SliceLedger
from manyhands.engines.driver.membership import Membership
from manyhands.engines.sim.copies import LoggedStore
from manyhands.engines.sim.driver_client import SimDriverClient
from manyhands.engines.sim.server import SimServer, SimServers
from manyhands.engines.sim.shard import SimShard
from manyhands.worker import LastPushes

Patch = pytest.MonkeyPatch


def blanks_only(patch: Patch) -> None:
    """Rule 1 out: starts anew at step 0 with whoever is there."""
    patch.setattr(Membership, "_may_form_of", lambda membership, waiting: True)


def before_all_asked(patch: Patch) -> None:
    """Rule 1 out: does not wait until all live members of the last generation have requested."""
    plain = Membership._form

    def form(membership: Membership, now: float) -> None:
        members, generation = membership._members, membership.generation
        if membership.phase == "gathering" and membership._waiting():
            membership._members = set()
        plain(membership, now)
        if membership.generation == generation:
            membership._members = members

    patch.setattr(Membership, "_form", form)


def loses_who_has_not_asked(patch: Patch) -> None:
    """Rule 2 out: whoever has not requested when others have is lost."""
    plain = Membership._must_request_by

    def must_request_by(membership: Membership, worker: Any) -> float:
        return membership._since if membership.phase == "gathering" else plain(membership, worker)

    patch.setattr(Membership, "_must_request_by", must_request_by)


def interrupts_of_any_generation(patch: Patch) -> None:
    patch.setattr(SimDriverClient, "interrupted", lambda driver, generation: driver.interrupt >= 0)


def without_fence(patch: Patch) -> None:
    """What still comes of a lost worker enters."""

    def fence(shard: SimShard, worker: int, generation: int) -> tuple[int, int]:
        state = shard.store._states[worker]
        sequence = state.sequence if state.generation == generation else 0
        return sequence, shard.store.pushed_in(worker, generation)

    patch.setattr(SimShard, "fence", fence)


def own_count(patch: Patch) -> None:
    """What a lost worker has answers of stands for what the shard has of it."""
    plain = SimServers.fence

    def fence(servers: SimServers, worker: int, closed: Callable[[LastPushes], None]) -> None:
        client = servers.clients[worker]
        assert isinstance(client, SimServer)
        plain(servers, worker, lambda has: closed(LastPushes([client.pushes] * len(has.numbers), has.ticks)))

    patch.setattr(SimServers, "fence", fence)


def orphans_left_out(patch: Patch) -> None:
    """What a lost worker had of a round is nobody's."""
    plain = SliceLedger.reassign

    def reassign(ledger: SliceLedger, until: int, survivors: Any) -> Any:
        made, orphaned = plain(ledger, until, survivors)
        return (ledger, []) if orphaned else (made, orphaned)

    patch.setattr(SliceLedger, "reassign", reassign)


def ticks_without_numbers(patch: Patch) -> None:
    """A tick that comes again, to a shard's next primary, counts again."""
    plain = LoggedStore.tick
    patch.setattr(LoggedStore, "tick", lambda store, worker, bits, number=0: plain(store, worker, bits))


MUTATIONS = (
    blanks_only,
    before_all_asked,
    loses_who_has_not_asked,
    interrupts_of_any_generation,
    without_fence,
    own_count,
    orphans_left_out,
    ticks_without_numbers,
)

FOUND_SOON = (before_all_asked, without_fence, orphans_left_out)


def search(first: int, until: int, of: Callable[[int], Schedule] = schedule_of) -> tuple[int, str]:
    """(The first seed at which something breaks, what), (-1, "") where nothing does."""
    for seed in range(first, until):
        if broken := failure_of(seed, of):
            return seed, broken
    return -1, ""


def test_some_schedules_keep_all_promises() -> None:
    assert search(0, 16) == (-1, "")
    assert search(0, 16, server_schedule_of) == (-1, "")


@pytest.mark.parametrize("seed", [622, 733])
def test_what_the_search_has_found_stays_mended(seed: int) -> None:
    """622: all lost before the first generation was no error. 733: one that waited for the next generation held up another
    at the server's gate, which nobody interrupts there."""
    assert failure_of(seed) == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(8))
def test_many_more_schedules_keep_all_promises(block: int, pytestconfig: pytest.Config) -> None:
    """--schedules=N: so many together. and as many at servers. 20,000 take more than an hour of a core."""
    each = int(pytestconfig.getoption("--schedules")) // 8
    assert search(16 + each * block, 16 + each * (block + 1)) == (-1, "")
    assert search(16 + each * block, 16 + each * (block + 1), server_schedule_of) == (-1, "")


def test_the_search_at_servers_finds_an_open_fence(monkeypatch: Patch) -> None:
    without_fence(monkeypatch)
    seed, broken = search(0, 10_000, server_schedule_of)
    assert broken
    monkeypatch.undo()
    assert failure_of(seed, server_schedule_of) == ""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "mutation", [pytest.param(one, marks=[] if one in FOUND_SOON else pytest.mark.slow) for one in MUTATIONS]
)
def test_the_search_finds_a_rule_that_is_left_out(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    seed, broken = search(0, 10_000)
    assert broken, f"{mutation.__name__} was not found in 10,000 schedules"
    monkeypatch.undo()
    assert failure_of(seed) == "", schedule_of(seed)
