"""The simulated group passes the conformance suite, has the bits of workers on one host, and never leaves anybody waiting."""

import gc
import weakref

import pytest
import torch
from sim_world import in_group, meeting_of, run

from manyhands.comm.reducing import reduce_everywhere, shares_of
from manyhands.engines.sim import group as group_module
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import FLOATS, GROUP_SUITE, vectors
from residuals import MANY, check_feedback, feedback

LINE = "latency=1,bandwidth=8e6"  # 1 s, and 1 MB a second


def _conformance(group):
    for check in GROUP_SUITE.values():
        check(group)
    return len(GROUP_SUITE)


@pytest.mark.parametrize(("size", "network"), [(1, ""), (3, "lan")])
def test_conformance(size, network):
    assert in_group(size, _conformance, network)[0] == [len(GROUP_SUITE)] * size


def test_with_error_feedback_the_rounding_of_the_mean_waits_too():
    weights = [3.0, 1.0]
    check_feedback(in_group(2, feedback("bf16", weights, MANY))[0], weights, MANY)


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 1000, 200_003])
def test_the_bits_of_workers_on_one_host(dtype, n):
    """Each rank's slice is reduced as SharedMemoryGroup does it: on cache lines, in rank order, a rank of weight 0 left out."""
    size, weights = 3, [1.0, 0.0, 2.5]

    class Place:
        pass

    place = Place()
    place.size = size
    wanted = vectors(place, n, dtype)
    length = -(-n // (size * 64)) * 64
    for rank in range(size):
        pieces = [one[min(n, rank * length) : min(n, (rank + 1) * length)] for one in wanted]
        if len(pieces[0]):
            reduce_everywhere(pieces, shares_of(weights, sum(weights)))

    def program(group):
        mine = vectors(group, n, dtype)[group.rank]
        group.mean_(mine, weights[group.rank])
        return mine

    for mine, other in zip(in_group(size, program)[0], wanted, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_the_same_seed_gives_the_same_bits_and_times():
    def program(group):
        value = torch.randn(100, generator=torch.Generator().manual_seed(group.rank))
        for step in range(5):
            group.mean_(value.mul_(1.1), 1.0 + (group.rank + step) % 3)
        return value, group.waited_s

    first, second = (in_group(4, program, "lan", seed=3) for _ in range(2))
    for (a, waited_a), (b, waited_b) in zip(first[0], second[0], strict=True):
        assert torch.equal(a, b)
        assert waited_a == waited_b
    assert first[1].now == second[1].now


# -- time ------------------------------------------------------------------------------------------------------------


def timed(size, program, network=LINE, **options):
    """The program gets (group, timeline)."""
    timeline = Timeline()
    meeting = meeting_of(timeline, size, network, **options)
    groups = [SimGroup(meeting, rank) for rank in range(size)]
    values = run(timeline, [lambda group=group: program(group, timeline) for group in groups])
    return values, groups, meeting


def test_a_collective_begins_with_the_last_arrival():
    """Who comes first waits for the last; what follows is exchange, and counts as such."""

    def program(group, timeline):
        timeline.sleep(float(group.rank))
        group.mean_(torch.ones(1000))
        return timeline.now

    values, groups, meeting = timed(3, program)
    seconds = meeting.costs.mean(1000, 4).seconds
    assert seconds > 1.0
    assert values == [2.0 + seconds] * 3
    assert [group.waited_s for group in groups] == [2.0, 1.0, 0.0]


def test_a_started_mean_travels_while_its_worker_computes():
    def program(group, timeline):
        handle = group.start_mean_(torch.ones(1000))
        timeline.sleep(0.5)
        before = timeline.now
        handle.wait()
        assert handle.wait().weight == 2.0
        return before, timeline.now

    values, groups, meeting = timed(2, program)
    assert values == [(0.5, meeting.costs.mean(1000, 4).seconds)] * 2
    assert [group.waited_s for group in groups] == [0.0, 0.0]


def test_a_mean_that_is_over_costs_no_more():
    def program(group, timeline):
        handle = group.start_mean_(torch.ones(1000))
        timeline.sleep(100.0)
        handle.wait()
        return timeline.now

    assert timed(2, program)[0] == [100.0, 100.0]


def test_collectives_of_one_group_do_not_overlap():
    def program(group, timeline):
        handles = [group.start_mean_(torch.ones(1000)) for _ in range(3)]
        times = []
        for handle in handles:
            handle.wait()
            times.append(timeline.now)
        return times

    values, _, meeting = timed(2, program)
    seconds = meeting.costs.mean(1000, 4).seconds
    assert values[0] == values[1] == pytest.approx([seconds, 2 * seconds, 3 * seconds])


def test_the_ledger_is_what_the_algorithm_sends():
    def program(group, timeline):
        group.mean_(torch.ones(1000))
        group.broadcast_(torch.ones(10), 1)
        group.barrier()
        group.all_gather_json({"rank": group.rank})
        group.mean_(torch.ones(1000), 0.0)

    _, groups, meeting = timed(3, program)
    mean, broadcast = meeting.costs.mean(1000, 4), meeting.costs.broadcast(10, 4, 1)
    for rank, group in enumerate(groups):
        wanted = {"mean_": {"bytes": mean.bytes[rank], "messages": mean.messages[rank]}}
        if broadcast.messages[rank]:
            wanted["broadcast_"] = {"bytes": broadcast.bytes[rank], "messages": broadcast.messages[rank]}
        assert group.ledger.as_dict() == wanted


def test_a_message_takes_its_time_and_its_sender_none():
    """1 MB at 1 MB/s, and 1 s of latency; the receiver waits only until it was sent."""

    def program(group, timeline):
        if group.rank == 0:
            timeline.sleep(3.0)
            tensor = torch.ones(250_000)
            group.send(tensor, 1)
            tensor.zero_()
            return timeline.now
        got = torch.zeros(250_000)
        group.receive_(got, 0)
        assert bool((got == 1).all())
        return timeline.now

    values, groups, _ = timed(2, program)
    assert values == [3.0, 5.0]
    assert [group.waited_s for group in groups] == [0.0, 3.0]


def test_messages_arrive_in_the_order_in_which_they_were_sent():
    def program(group, timeline):
        got = []
        for turn in range(4):
            if group.rank == 0:
                group.send(torch.full((1 + 1000 * (3 - turn),), float(turn)), 1)
            else:
                tensor = torch.empty(1 + 1000 * (3 - turn))
                timeline.sleep(2.5 if turn == 2 else 0.0)
                group.receive_(tensor, 0)
                got.append(float(tensor[0]))
        return got

    assert timed(2, program)[0][1] == [0.0, 1.0, 2.0, 3.0]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_shared_memory_is_the_same_memory():
    def program(group):
        own = group.allocate(3, torch.float32)
        mine = group.share(own, 1)
        assert (mine.data_ptr() == own.data_ptr()) == (group.rank == 1)
        group.barrier()
        mine[group.rank] = 1.0 + group.rank
        group.barrier()
        return mine.tolist()

    assert in_group(3, program)[0] == [[1.0, 2.0, 3.0]] * 3


def test_what_all_gather_gave_is_each_ranks_own():
    def program(group):
        rows = group.all_gather(torch.tensor([float(group.rank)]))
        seen = rows.reshape(-1).tolist()
        rows.fill_(99.0)
        group.barrier()
        return seen

    assert in_group(3, program)[0] == [[0.0, 1.0, 2.0]] * 3


def test_nobody_keeps_a_tensor_beyond_the_call():
    """1,000 workers have memory for their own tensors only; also a handle that nobody waited for keeps none."""
    kept = []

    def program(group):
        tensor = torch.ones(10)
        references = [weakref.ref(tensor)]
        handle = group.start_mean_(tensor)
        group.barrier()
        del tensor
        gc.collect()
        kept.append(references[0]())
        return handle.wait()

    in_group(3, program)
    assert kept == [None] * 3


# -- what goes wrong -------------------------------------------------------------------------------------------------


def errors_of(size, program, *, kills=(), network="", timeout_s=300.0, notice_s=1.0):
    """(error and when, by rank; the timeline): of programs that end by errors, some of them killed at a time, and lost later."""
    timeline = Timeline()
    meeting = meeting_of(timeline, size, network, timeout_s)
    groups = [SimGroup(meeting, rank) for rank in range(size)]
    ends = {}
    timeline.on_end = lambda one: ends.setdefault(one.name, (one.error, timeline.now))
    programs = [timeline.start(g.rank, lambda group=g: program(group, timeline)) for g in groups]
    for rank, time in kills:
        timeline.at(time, programs[rank].kill)
        timeline.at(time + notice_s, lambda rank=rank: meeting.lose(rank))
    timeline.run()
    return [ends[rank] for rank in range(size)]


def test_who_waits_or_comes_later_hears_of_the_dead():
    def program(group, timeline):
        group.step = 7
        timeline.sleep((0.5, 100.0, 5.0)[group.rank])
        group.mean_(torch.ones(3))

    (first, when), (dead, _), (late, then) = errors_of(3, program, kills=[(1, 2.0)])
    assert isinstance(first, PeerLost)
    assert (first.rank, first.host, first.operation, first.step, first.seconds) == (1, "host1", "mean_", 7, 2.5)
    assert when == 3.0
    assert dead is None
    assert isinstance(late, PeerLost)
    assert (late.rank, late.seconds, then) == (1, 0.0, 5.0)


def test_what_the_dead_had_started_counts():
    """It had come: the collective is complete before anybody hears of its death."""

    def program(group, timeline):
        handle = group.start_mean_(torch.full((2,), float(group.rank)))
        timeline.sleep(1.0)
        handle.wait()
        timeline.sleep(10.0)

    assert [error for error, _ in errors_of(2, program, kills=[(1, 0.5)])] == [None, None]


@pytest.mark.parametrize("goodbye", [False, True])
def test_the_dead_do_not_speak(goodbye):
    """What a killed program calls while it ends reaches nobody."""

    def program(group, timeline):
        try:
            timeline.sleep(10.0 if group.rank == 0 else 0.5)
        finally:
            (group.close if goodbye and group.rank == 0 else group.barrier)()

    (dead, _), (other, when) = errors_of(2, program, kills=[(0, 1.0)], notice_s=2.0)
    assert dead is None
    assert isinstance(other, PeerLost)
    assert when == 3.0


def test_a_receiver_hears_of_the_dead():
    def program(group, timeline):
        if group.rank == 0:
            group.receive_(torch.zeros(1), 1)
        timeline.sleep(50.0)

    (error, when), *_ = errors_of(3, program, kills=[(2, 1.0)])
    assert isinstance(error, PeerLost)
    assert (error.rank, error.operation, when) == (2, "receive_", 2.0)


@pytest.mark.parametrize("operation", ["mean_", "receive_"])
def test_silence_has_an_end(operation):
    """A rank that does not come for timeout_s is lost; time in which the network works does not count."""

    def program(group, timeline):
        group.barrier()
        if group.rank == 1:
            timeline.sleep(1000.0)
        elif operation == "mean_":
            group.mean_(torch.ones(1))
        else:
            group.receive_(torch.zeros(1), 1)

    (error, when), *_ = errors_of(2, program, network="latency=50", timeout_s=20.0)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.operation, error.seconds) == (1, operation, 20.0)
    assert when > 50.0
    assert "did not come for 20 s" in str(error)


def test_who_comes_in_time_again_and_again_is_not_lost():
    def program(group, timeline):
        for _ in range(30):
            timeline.sleep(15.0 if group.rank else 0.0)
            group.barrier()

    assert [error for error, _ in errors_of(2, program, timeout_s=20.0)] == [None, None]


def test_silence_has_an_end_also_after_many_waits():
    """The deadline is that of the wait which lasts, not of the first one."""

    def program(group, timeline):
        for turn in range(30):
            timeline.sleep((1000.0 if turn == 29 else 3.0) if group.rank else 0.0)
            group.barrier()

    (error, when), *_ = errors_of(2, program, timeout_s=20.0)
    assert isinstance(error, PeerLost)
    assert (error.seconds, when) == (20.0, 29 * 3.0 + 20.0)


def test_all_who_did_not_come_are_named():
    def program(group, timeline):
        if group.rank:
            timeline.sleep(1000.0)
        else:
            group.barrier()

    (error, _), *_ = errors_of(4, program, timeout_s=10.0)
    assert "worker 1 on host1 did not come for 10 s (others that did not come: 2, 3)" in str(error)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (lambda g: g.barrier(), lambda g: g.mean_(torch.ones(3)), ("barrier", "mean_ of 3 float32")),
        (lambda g: g.mean_(torch.ones(4)), lambda g: g.mean_(torch.ones(3)), ("mean_ of 4 float32", "mean_ of 3")),
        (lambda g: g.mean_(torch.ones(3).double()), lambda g: g.mean_(torch.ones(3)), ("float64", "float32")),
        (
            lambda g: g.broadcast_(torch.ones(3), 0),
            lambda g: g.broadcast_(torch.ones(3), 1),
            ("broadcast_ from worker 0", "broadcast_ from worker 1"),
        ),
        (
            lambda g: g.share(torch.ones(3), 0),
            lambda g: g.broadcast_(torch.ones(3), 0),
            ("share from worker 0", "broadcast_ from worker 0"),
        ),
    ],
)
def test_different_calls_are_named_to_all(one, other, words):
    def program(group, timeline):
        timeline.sleep(float(group.rank))
        (other if group.rank == 1 else one)(group)

    ends = errors_of(3, program)
    for error, _ in ends:
        assert type(error) is ManyhandsError
        assert "the workers called different operations" in str(error)
        for word in words:
            assert word in str(error)


def test_a_letter_of_another_shape_is_refused():
    def program(group, timeline):
        if group.rank == 0:
            group.send(torch.ones(3), 1)
        elif group.rank == 1:
            group.receive_(torch.ones(4), 0)
        else:
            group.barrier()

    (_, _), (error, _), (bystander, _) = errors_of(3, program)
    for one in (error, bystander):
        assert "worker 1 expected send of 4 float32 from worker 0 at step 0; send of 3 float32 came" in str(one)


@pytest.mark.parametrize("first", [0.0, 2.0])
def test_who_left_is_not_waited_for(first):
    """Before others come to wait for it, or while they do."""

    def program(group, timeline):
        group.barrier()
        timeline.sleep(first if group.rank else 1.0)
        if group.rank == 0:
            group.close()
            group.close()
            with pytest.raises(ManyhandsError, match="was closed"):
                group.barrier()
        else:
            group.barrier()

    (_, _), (error, when) = errors_of(2, program)
    assert isinstance(error, PeerLost)
    assert (error.rank, when) == (0, max(1.0, first))
    assert "left the group" in str(error)


def test_leaving_after_the_last_call_harms_nobody():
    def program(group, timeline):
        for _ in range(3):
            group.mean_(torch.ones(2))
        group.close()

    assert [error for error, _ in errors_of(3, program, network="lan")] == [None] * 3


def test_what_fails_while_all_are_there_is_told_to_all(monkeypatch):
    """Whose turn it is gets the error itself, and the others are not left to wait."""

    def fails(calls, shares):
        raise MemoryError("no room")

    monkeypatch.setattr(group_module, "_reduce", fails)
    heard = []

    def program(group):
        try:
            group.mean_(torch.ones(3))
        except (MemoryError, ManyhandsError) as error:
            heard.append(str(error))

    in_group(3, program, timeout_s=10.0)
    assert sorted(heard)[-1] == "no room"
    assert all("failed at step 0: MemoryError: no room" in one for one in sorted(heard)[:2])
