"""The simulated group passes the conformance suite, has the bits of workers on one host, and never leaves anybody waiting."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sim_world import in_group, meeting_of

from manyhands.comm.reducing import reduce_everywhere, shares_of
from manyhands.engines.sim import group as group_module
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import FLOATS, GROUP_SUITE, vectors
from residuals import check_feedback, feedback

LINE = "latency=1,bandwidth=8e6"  # 1 s, and 1 MB a second


@pytest.mark.parametrize(("size", "network"), [(1, ""), (3, "lan")])
def test_conformance(size: int, network: str) -> None:
    def program(group: SimGroup, _: Timeline) -> None:
        for check in GROUP_SUITE.values():
            check(group)

    in_group(size, program, network)


def test_with_error_feedback_the_rounding_of_the_mean_waits_too() -> None:
    weights = [3.0, 1.0]
    program = feedback("bf16", weights, 200)
    check_feedback(in_group(2, lambda group, _: program(group))[0], weights, 200)


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 1000, 200_003])
def test_the_bits_of_workers_on_one_host(n: int) -> None:
    """Each rank's slice is reduced as SharedMemoryGroup does it: on cache lines, in rank order, a rank of weight 0 left out."""
    size, weights = 3, [1.0, 0.0, 2.5]
    length = -(-n // (size * 64)) * 64
    wanted = {dtype: vectors(SimpleNamespace(size=size), n, dtype) for dtype in FLOATS}  # type: ignore[arg-type]
    for parts in wanted.values():
        for rank in range(size):
            pieces = [one[min(n, rank * length) : min(n, (rank + 1) * length)] for one in parts]
            if len(pieces[0]):
                reduce_everywhere(pieces, shares_of(weights, sum(weights)))

    def program(group: SimGroup, _: Timeline) -> None:
        for dtype, parts in wanted.items():
            mine = vectors(group, n, dtype)[group.rank]
            group.mean_(mine, weights[group.rank])
            assert torch.equal(mine.view(torch.uint8), parts[group.rank].view(torch.uint8)), dtype

    in_group(size, program)


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_collective_begins_with_the_last_arrival() -> None:
    """Who comes first waits for the last; what follows is exchange, and counts as such."""

    def program(group: SimGroup, timeline: Timeline) -> float:
        timeline.sleep(float(group.rank))
        group.mean_(torch.ones(1000))
        return timeline.now

    values, groups, meeting = in_group(3, program, LINE)
    seconds = meeting.costs.mean(1000, 4).seconds
    assert seconds > 1.0
    assert values == [2.0 + seconds] * 3
    assert [group.waited_s for group in groups] == [2.0, 1.0, 0.0]


def test_a_started_mean_travels_while_its_worker_computes() -> None:
    """One that is over costs no more; those of one group do not overlap."""

    def program(group: SimGroup, timeline: Timeline) -> list[float]:
        handle = group.start_mean_(torch.ones(1000))
        timeline.sleep(0.5)
        times = [timeline.now]
        handle.wait()
        assert handle.wait().weight == 2.0
        times.append(timeline.now)
        handle = group.start_mean_(torch.ones(1000))
        timeline.sleep(100.0)
        handle.wait()
        times.append(timeline.now)
        for handle in [group.start_mean_(torch.ones(1000)) for _ in range(3)]:
            handle.wait()
            times.append(timeline.now)
        return times

    values, groups, meeting = in_group(2, program, LINE)
    seconds = meeting.costs.mean(1000, 4).seconds
    over = seconds + 100.0
    assert values == [pytest.approx([0.5, seconds, over, over + seconds, over + 2 * seconds, over + 3 * seconds])] * 2
    assert [group.waited_s for group in groups] == [0.0, 0.0]


def test_the_ledger_is_what_the_algorithm_sends() -> None:
    def program(group: SimGroup, timeline: Timeline) -> None:
        group.mean_(torch.ones(1000))
        group.broadcast_(torch.ones(10), 1)
        group.barrier()
        group.all_gather_json({"rank": group.rank})
        group.mean_(torch.ones(1000), 0.0)

    _, groups, meeting = in_group(3, program, LINE)
    costs = {"mean_": meeting.costs.mean(1000, 4), "broadcast_": meeting.costs.broadcast(10, 4, 1)}
    for rank, group in enumerate(groups):
        assert group.ledger.as_dict() == {
            name: {"bytes": cost.bytes[rank], "messages": cost.messages[rank]}
            for name, cost in costs.items()
            if cost.messages[rank]
        }


def test_a_message_takes_its_time_and_its_sender_none() -> None:
    """1 MB at 1 MB/s, and 1 s of latency; the receiver waits only until it was sent. They arrive in the order of sending."""

    def program(group: SimGroup, timeline: Timeline) -> tuple[float, list[float]]:
        got = []
        if group.rank == 0:
            timeline.sleep(3.0)
            for turn in range(4):
                tensor = torch.full((250_000 if turn == 0 else 1 + 1000 * (3 - turn),), float(turn))
                group.send(tensor, 1)
                tensor.fill_(9.0)
            return timeline.now, got
        for turn in range(4):
            tensor = torch.zeros(250_000 if turn == 0 else 1 + 1000 * (3 - turn))
            timeline.sleep(2.5 if turn == 2 else 0.0)
            group.receive_(tensor, 0)
            assert bool((tensor == tensor[0]).all())
            got.append(float(tensor[0]))
            if turn == 0:
                assert (timeline.now, group.waited_s) == (5.0, 3.0)
        return timeline.now, got

    values, groups, _ = in_group(2, program, LINE)
    assert values[0] == (3.0, [])
    assert values[1][1] == [0.0, 1.0, 2.0, 3.0]
    assert groups[0].waited_s == 0.0


# -- memory ----------------------------------------------------------------------------------------------------------


def test_what_is_shared_and_what_is_each_ranks_own() -> None:
    """1,000 workers have memory for their own tensors only: nobody keeps one beyond the call, also not for a handle that waits."""

    def program(group: SimGroup, _: Timeline) -> list[float]:
        own = group.allocate(3, torch.float32)
        mine = group.share(own, 1)
        assert (mine.data_ptr() == own.data_ptr()) == (group.rank == 1)
        group.barrier()
        mine[group.rank] = 1.0 + group.rank
        tensor = torch.ones(10)
        kept = weakref.ref(tensor)
        handle = group.start_mean_(tensor)
        group.barrier()
        del tensor
        gc.collect()
        assert kept() is None
        handle.wait()
        result: list[float] = mine.tolist()
        return result

    assert in_group(3, program)[0] == [[1.0, 2.0, 3.0]] * 3


# -- what goes wrong -------------------------------------------------------------------------------------------------


def errors_of(
    size: int,
    program: Callable[[SimGroup, Timeline], Any],
    *,
    kills: Sequence[tuple[int, float]] = (),
    network: str = "",
    timeout_s: float = 300.0,
    notice_s: float = 1.0,
) -> list[tuple[Any, float]]:
    """(error and when, by rank): of programs that end by errors, some of them killed at a time, and lost later."""
    timeline = Timeline()
    meeting = meeting_of(timeline, size, network, timeout_s)
    ends: dict[int, tuple[Any, float]] = {}
    timeline.on_end = lambda one: ends.setdefault(one.name, (one.error, timeline.now))
    groups = [SimGroup(meeting, rank) for rank in range(size)]
    programs = [timeline.start(g.rank, lambda group=g: program(group, timeline)) for g in groups]  # type: ignore[misc]
    for rank, time in kills:
        timeline.at(time, programs[rank].kill)
        timeline.at(time + notice_s, lambda rank=rank: meeting.lose(rank))  # type: ignore[misc]
    timeline.run()
    return [ends[rank] for rank in range(size)]


def test_who_waits_or_comes_later_hears_of_the_dead() -> None:
    def program(group: SimGroup, timeline: Timeline) -> None:
        group.step = 7
        timeline.sleep((0.5, 100.0, 5.0, 0.0)[group.rank])
        if group.rank == 3:
            group.receive_(torch.zeros(1), 1)
        group.mean_(torch.ones(3))

    (first, when), (dead, _), (late, then), (receiver, at) = errors_of(4, program, kills=[(1, 2.0)])
    assert isinstance(first, PeerLost)
    assert (first.rank, first.host, first.operation, first.step, first.seconds) == (1, "host1", "mean_", 7, 2.5)
    assert dead is None
    assert isinstance(late, PeerLost)
    assert (late.rank, late.seconds) == (1, 0.0)
    assert isinstance(receiver, PeerLost)
    assert (receiver.rank, receiver.operation) == (1, "receive_")
    assert (when, then, at) == (3.0, 5.0, 3.0)


def test_what_the_dead_had_started_counts() -> None:
    """It had come: the collective is complete before anybody hears of its death."""

    def program(group: SimGroup, timeline: Timeline) -> None:
        handle = group.start_mean_(torch.full((2,), float(group.rank)))
        timeline.sleep(1.0)
        handle.wait()
        timeline.sleep(10.0)

    assert [error for error, _ in errors_of(2, program, kills=[(1, 0.5)])] == [None, None]


def test_the_dead_do_not_speak() -> None:
    """What a killed program calls while it ends reaches nobody."""

    def program(goodbye: bool, group: SimGroup, timeline: Timeline) -> None:
        try:
            timeline.sleep(10.0 if group.rank == 0 else 0.5)
        finally:
            (group.close if goodbye and group.rank == 0 else group.barrier)()

    for goodbye in (False, True):
        (dead, _), (other, when) = errors_of(2, partial(program, goodbye), kills=[(0, 1.0)], notice_s=2.0)
        assert dead is None
        assert isinstance(other, PeerLost)
        assert when == 3.0


@pytest.mark.parametrize("operation", ["mean_", "receive_"])
def test_silence_has_an_end(operation: str) -> None:
    """A rank that does not come for timeout_s is lost, whoever has come in time before; the network's own time does not count."""

    def program(group: SimGroup, timeline: Timeline) -> None:
        for _ in range(9):
            timeline.sleep(15.0 if group.rank else 0.0)
            group.barrier()
        if group.rank:
            timeline.sleep(1000.0)
        elif operation == "mean_":
            group.mean_(torch.ones(1))
        else:
            group.receive_(torch.zeros(1), 1)

    (error, when), *_ = errors_of(4 if operation == "mean_" else 2, program, network="latency=50", timeout_s=20.0)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.operation, error.seconds) == (1, operation, 20.0)
    assert when == 9 * 65.0 + 20.0
    assert "worker 1 on host1 did not come for 20 s" in str(error)
    assert ("(others that did not come: 2, 3)" in str(error)) == (operation == "mean_")


def test_different_calls_are_named_to_all() -> None:
    one, ones = torch.ones(3), torch.ones(4)

    def program(*calls: Callable[[Any], Any], group: SimGroup, timeline: Timeline) -> None:
        timeline.sleep(float(group.rank))
        calls[group.rank](group)

    for first, other, words in (
        (lambda g: g.barrier(), lambda g: g.mean_(one), ("barrier", "mean_ of 3 float32")),
        (lambda g: g.mean_(ones), lambda g: g.mean_(one), ("mean_ of 4 float32", "mean_ of 3")),
        (lambda g: g.mean_(one.double()), lambda g: g.mean_(one), ("float64", "float32")),
        (lambda g: g.broadcast_(one, 0), lambda g: g.broadcast_(one, 1), ("from worker 0", "from worker 1")),
        (lambda g: g.share(one, 0), lambda g: g.broadcast_(one, 0), ("share from worker 0", "broadcast_ from")),
    ):
        for error, _ in errors_of(3, lambda g, t, calls=(first, other, first): program(*calls, group=g, timeline=t)):  # type: ignore[misc]
            assert type(error) is ManyhandsError
            assert "the workers called different operations" in str(error)
            assert all(word in str(error) for word in words), (words, error)
    letters: Any = lambda g: g.send(one, 1), lambda g: g.receive_(ones, 0), lambda g: g.barrier()
    for error, _ in errors_of(3, lambda g, t: program(*letters, group=g, timeline=t))[1:]:
        assert "worker 1 expected send of 4 float32 from worker 0 at step 0; send of 3 float32 came" in str(error)


def test_who_left_is_not_waited_for() -> None:
    """Before others come to wait for it, or while they do."""

    def program(first: float, group: SimGroup, timeline: Timeline) -> None:
        group.barrier()
        timeline.sleep(first if group.rank else 1.0)
        if group.rank == 0:
            group.close()
            group.close()
            with pytest.raises(ManyhandsError, match="was closed"):
                group.barrier()
        else:
            group.barrier()

    for first in (0.0, 2.0):
        (_, _), (error, when) = errors_of(2, partial(program, first))
        assert isinstance(error, PeerLost)
        assert (error.rank, when) == (0, max(1.0, first))
        assert "left the group" in str(error)


def test_what_fails_while_all_are_there_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose turn it is gets the error itself, and the others are not left to wait."""

    def fails(calls: Any, shares: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(group_module, "_reduce", fails)
    errors = sorted(str(error) for error, _ in errors_of(3, lambda group, _: group.mean_(torch.ones(3))))
    assert errors[-1] == "no room"
    assert all("failed at step 0: MemoryError: no room" in one for one in errors[:2])
