"""Searches schedules of delay, reorder, duplicate, drop, pauses, restarts and kills for one that breaks a promise.

A failure ends with the line that repeats it; `checked` and the schedules are in sim_chaos.py.
"""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from sim_chaos import (
    GROUP_SCHEDULES,
    SERVER_SCHEDULES,
    GroupSchedule,
    ServerSchedule,
    check_group,
    check_server,
    checked,
    repeated_by,
)

from manyhands.engines.sim import group
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.shard import SimShard
from manyhands.server.gate import Gate
from manyhands.server.merging import TickMerge
from manyhands.server.store import Store

SEARCH = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
BUDGET = settings(SEARCH, max_examples=500, phases=[Phase.generate])


@settings(SEARCH, max_examples=300)
@given(SERVER_SCHEDULES)
def test_the_server_keeps_its_promises(schedule):
    """CASES 10, 11: each push in once, no row twice, the gap at most bound + 1, own updates seen, nobody waits for the dead."""
    checked(check_server, schedule)


@settings(SEARCH, max_examples=200)
@given(GROUP_SCHEDULES)
def test_the_group_keeps_its_promises(schedule):
    """CASE 10: all replicas equal after each call, and whoever lives hears of the dead in time."""
    checked(check_group, schedule)


# -- the search finds planted bugs -----------------------------------------------------------------------------------


def forgets_the_sequence(original, store, worker, sequence, update, weight, bits):
    state = store._states[worker]
    if state.reply is not None and sequence == state.sequence:
        state.sequence, state.reply = sequence - 1, None
    return original(store, worker, sequence, update, weight, bits)


def off_by_one(original, gate, worker, slowest):
    return gate._bound is None or slowest >= gate._finished[worker] - gate._bound - 1


def waits_for_the_lost(original, store, worker):
    store._states[worker].lost = True


def forgets_what_is_held(original, policy, ticks, version):
    return original(policy, ticks, version)[:-1]


def handles_late_copies(original, shard, request):
    shard._newest[request.call.worker] = (-1, 0.0)
    original(shard, request)


def forgets_its_store(original, shard, back):
    shard._newest = [(-1, 0.0)] * len(shard._newest)
    shard._held.clear()
    original(shard, back)


def tells_nobody(original, meeting, rank):
    pass


def misses_one(original, calls, shares):
    last = calls[-1].tensor.clone()
    original(calls, shares)
    calls[-1].tensor.copy_(last)


def loses_a_message(original, meeting, message, source, target, step):
    original(meeting, message, source, target, step)
    box = meeting._mail[source, target]
    if len(box) > 1:
        box.pop()


PLANTED = {
    "forgets the sequence": (Store, "push", forgets_the_sequence),
    "off by one": (Gate, "_may_go", off_by_one),
    "waits for the lost": (Store, "leave", waits_for_the_lost),
    "forgets what is held": (TickMerge, "take_complete", forgets_what_is_held),
    "handles late copies": (SimShard, "_handle", handles_late_copies),
    "forgets its store": (SimShard, "_be_back", forgets_its_store),
    "tells nobody": (SimRendezvous, "lose", tells_nobody),
    "loses a message": (SimRendezvous, "send", loses_a_message),
    "misses one": (group, "_reduce", misses_one),
}
FOUND = {  # by the search below, shrunk
    "forgets the sequence": ServerSchedule(
        seed=0,
        workers=1,
        shards=1,
        bound=None,
        rows=2,
        naps=(),
        fates=(),
        events=(("restart", 0, 0, 2), ("restart_shard", 0, 9, 1)),
    ),
    "off by one": ServerSchedule(seed=0, workers=2, shards=1, bound=0, rows=3, naps=(0, 1), fates=(), events=()),
    "waits for the lost": ServerSchedule(
        seed=0, workers=4, shards=1, bound=0, rows=1, naps=(), fates=(), events=(("kill", 0, 2, 1),)
    ),
    "forgets what is held": ServerSchedule(seed=0, workers=1, shards=1, bound=0, rows=1, naps=(), fates=(), events=()),
    "handles late copies": ServerSchedule(
        seed=0, workers=2, shards=1, bound=0, rows=2, naps=(), fates=(*[(0,)] * 19, (), (0, 0)), events=()
    ),
    "forgets its store": ServerSchedule(
        seed=0,
        workers=2,
        shards=1,
        bound=0,
        rows=2,
        naps=(),
        fates=(),
        events=(("kill", 0, 4, 1), ("restart_shard", 0, 6, 1)),
    ),
    "tells nobody": GroupSchedule(seed=0, workers=2, calls=("mean",), naps=(), events=(("kill", 0, 0, 1),)),
    "loses a message": GroupSchedule(seed=0, workers=2, calls=("ring", "ring"), naps=(), events=()),
    "misses one": GroupSchedule(seed=0, workers=3, calls=("mean",), naps=(), events=()),
}


@contextmanager
def planted(monkeypatch, bug):
    owner, name, broken = PLANTED[bug]
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments: broken(original, *arguments))
        yield


def check_of(schedule):
    return check_server if isinstance(schedule, ServerSchedule) else check_group


@pytest.mark.parametrize("bug", PLANTED)
def test_a_schedule_that_the_search_found_shows_the_bug_again(monkeypatch, bug):
    """And the line that repeats it does: with the bug it fails, without it passes."""
    line = repeated_by(check_of(FOUND[bug]), FOUND[bug])
    with planted(monkeypatch, bug):
        with pytest.raises(Exception) as failure:
            checked(check_of(FOUND[bug]), FOUND[bug])
        assert failure.value.__notes__ == [f"repeat with: {line}"]
        with pytest.raises(type(failure.value)):
            repeat(line)
    repeat(line)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_the_search_finds_a_planted_bug(monkeypatch, bug):
    check = check_of(FOUND[bug])
    schedules = SERVER_SCHEDULES if check is check_server else GROUP_SCHEDULES
    with planted(monkeypatch, bug):
        found = find(schedules, lambda schedule: fails(check, schedule), settings=BUDGET)
        assert fails(check, found)
    check(found)


def fails(check, schedule):
    try:
        check(schedule)
    except Exception:  # noqa: BLE001 - any: what breaks depends on the bug
        return True
    return False


def repeat(line):
    names = (check_server, check_group, ServerSchedule, GroupSchedule)
    eval(line, {one.__name__: one for one in names})


def test_without_a_bug_nothing_is_found():
    """The search itself cries no wolf."""
    with pytest.raises(NoSuchExample):
        find(
            SERVER_SCHEDULES, lambda schedule: fails(check_server, schedule), settings=settings(BUDGET, max_examples=20)
        )


# -- the search has teeth only if things happen ------------------------------------------------------------------------


def test_what_a_schedule_says_happens():
    """Messages get lost and are sent again, workers and shards come back, and all rows are in all the same."""
    from sim_chaos import ServerWorld

    schedule = ServerSchedule(
        workers=3,
        shards=2,
        rows=12,
        fates=((0,), (), (0, 25), (15,)) * 15,
        events=(("restart", 1, 15, 10), ("restart_shard", 0, 20, 10), ("pause", 2, 10, 20), ("pause_shard", 1, 12, 5)),
    )
    world = ServerWorld(schedule)
    world.run()
    assert world.servers.stores[0]._states[1].generation == 1
    assert world.programs[1].ended
    assert not world.programs[1].killed
    assert (
        sum(client.ledger.as_dict().get("resent", {"messages": 0})["messages"] for client in world.servers.clients) > 5
    )
    assert torch.equal(world.servers.stores[0].center, world.servers.stores[1].center)


def test_a_kill_is_heard_by_all_who_live():
    from sim_chaos import GroupWorld

    world = GroupWorld(GroupSchedule(workers=4, calls=("mean",) * 30, events=(("kill", 2, 10, 1),)))
    world.run()
    errors = {program.name: program.error for program in world.programs}
    assert [rank for rank, error in errors.items() if error is None] == [2]
    assert {error.rank for error in errors.values() if error is not None} == {2}


@pytest.mark.parametrize("seed", range(3))
def test_the_same_schedule_gives_the_same_run(seed):
    """The order in which rows are handed out shows all that happened before."""
    from sim_chaos import ServerWorld

    schedule = ServerSchedule(seed=seed, workers=4, bound=2, rows=12, fates=((0, 25), (), (3,)) * 10)
    runs = [ServerWorld(schedule) for _ in range(2)]
    for world in runs:
        world.run()
    assert runs[0].timeline.now == runs[1].timeline.now
    assert [world.servers.stores[0].version for world in runs] == [12, 12]
    assert runs[0].seen == runs[1].seen
