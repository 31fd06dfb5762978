"""What the connections of a shard share; a live shard: what is attacked, lost or late, while the others go on."""

import gc
import logging
import os
import pickle
import random
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
from driver_script import wait_until
from harness import forked, values
from served import channel_to, hosting
from threads import in_threads

from fuzzing import bounded
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import Kind, hello
from manyhands.server.replication.log import Call
from manyhands.server.shard_host import Shard, WorkersLate, serve
from manyhands.server.store import Go, InvalidCall, WaitForGate
from manyhands.testing.server_suite import expect_waits, started
from manyhands.transport.channel import ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import DTYPES, HEADER_BYTES, Frame, pack, to_json
from manyhands.transport.listener import Listener, connect
from refusals import refused

FEW = 4


def nothing():
    pass


def opened(spec=None, timeout_s=10.0):
    """A shard with a center of zeros, in which two workers take part."""
    shard = Shard(spec or ServerSpec(rule="add", bound=0), 2, timeout_s)
    center = shard.offer(FEW, torch.float32, nothing)
    center.buffers[0].zero_()
    shard.take(center, came=True)
    for worker in range(2):
        shard.call(lambda store, worker=worker: store.activate(worker, 0))
    return shard


def test_what_was_released_for_one_call_answers_no_later_one():
    """As at a new primary: another's tick releases worker 0 before that one has asked there again."""
    shard = opened(ServerSpec(rule="add", bound=1))

    def tick(worker, number):
        return shard.make(Call.TICK, worker, number)[0]

    assert [tick(0, 1), tick(0, 2)] == [Go(0), WaitForGate()]
    assert tick(1, 1) == Go(0)
    assert [tick(0, 2), tick(0, 3)] == [Go(0), WaitForGate()]
    with started(lambda: shard.answer(0, nothing)) as waiting:
        expect_waits(waiting, "an answer before the other worker's tick")
        tick(1, 2)
        assert waiting.result(10) == Go(0)
    shard.close()


def test_the_deadline_counts_from_what_a_worker_did_last():
    shard = opened(timeout_s=0.2)
    shard.call(lambda store: store.tick(0, 0))
    shard._moved = time.monotonic() + 0.2
    with pytest.raises(WorkersLate) as late:
        shard.answer(0, nothing)
    assert late.value.worker == 1
    assert late.value.seconds >= 0.4
    shard.close()


def test_a_second_offer_waits_for_the_first_and_takes_its_place_if_that_fails():
    shard = Shard(ServerSpec(rule="add"), 2, 10.0)
    first = shard.offer(FEW, torch.float32, nothing)
    with started(lambda: shard.offer(FEW, torch.float32, nothing)) as waiting:
        expect_waits(waiting, "an offer during another")
        shard.take(first, came=False)
        second = waiting.result(10)
    assert second is not None
    shard.take(second, came=True)
    assert shard.offer(FEW, torch.float32, nothing) is None
    refused("a center has 4 elements", shard.offer, FEW + 1, torch.float32, nothing)
    shard.close()


def test_before_a_center_there_is_nothing_to_read():
    shard = Shard(ServerSpec(rule="add"), 2, 10.0)
    refused("no center yet", shard.check, FEW, torch.float32, "a push", kind=InvalidCall)
    with pytest.raises(InvalidCall):
        shard.pin(0, pull=True)
    shard.close()


def test_a_worker_that_ends_gives_back_what_it_read_and_holds_nobody_up():
    shard = opened()
    assert shard.pin(1, pull=True)[:2] == (0, 0)
    shard.call(lambda store: store.tick(0, 0))
    shard.end(1, Call.LEAVE)
    assert shard.answer(0, nothing) == Go(0)
    shard.push(0, 1, torch.ones(FEW), 1.0, 0)
    shard.push(0, 2, torch.ones(FEW), 1.0, 0)
    shard.call(lambda store: store.tick(0, 0))
    version, slot, _ = shard.pin(0, pull=False)
    assert shard.published.buffers[slot].eq(2 * version).all()
    shard.close()


N, LARGE = 1000, 1 << 18
FLOAT = DTYPES.index(torch.float32)
ADD, IN_STEP = ServerSpec(rule="add"), ServerSpec(rule="add", bound=0)
WHOLE_PUSH = {"kind": Kind.PUSH, "dtype": torch.float32, "elements": N, "sequence": 1, "weight": 1.0}


def push(**other):
    return pack(Frame(**WHOLE_PUSH | other)) + bytes(4 * N)


def restore(output):
    return pack(Frame(kind=Kind.RESTORE, blob=to_json(output), generation=1)) + to_json(output)


BEGIN = pack(Frame(kind=Kind.ACTIVATE, generation=1))
ATTACKS = {
    "noise": random.Random(1).randbytes(500),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(HEADER_BYTES),
    "an unknown request": pack(Frame(kind=200, generation=1)),
    "an answer": pack(Frame(kind=Kind.DONE, generation=1)),
    "a vector where none belongs": pack(Frame(kind=Kind.TICK, elements=8, generation=1)) + bytes(8),
    "a push of more than all memory": BEGIN + pack(Frame(**WHOLE_PUSH | {"elements": 1 << 37, "generation": 1})),
    "a push of one element too many": BEGIN + push(elements=N + 1, generation=1) + bytes(4),
    "a push of one element too few": BEGIN + push(elements=N - 1, generation=1),
    "a push of another dtype": BEGIN + push(dtype=torch.int32, generation=1),
    "a push of an older generation": BEGIN + push(generation=0),
    "a push out of order": BEGIN + push(sequence=7, generation=1),
    "a push with a negative weight": BEGIN + push(weight=-1.0, generation=1),
    "a push without begin": push(generation=1),
    "a center of another length": pack(Frame(kind=Kind.OFFER, a=N + 1, b=FLOAT, generation=1)),
    "a center of negative length": pack(Frame(kind=Kind.OFFER, a=-1, b=FLOAT, generation=1)),
    "a center of no dtype": pack(Frame(kind=Kind.OFFER, a=N, b=99, generation=1)),
    "a center of whole numbers": pack(Frame(kind=Kind.OFFER, a=N, b=DTYPES.index(torch.int64), generation=1)),
    "a pull of another length": pack(Frame(kind=Kind.PULL, a=N + 1, b=FLOAT, generation=1)),
    "a snapshot that is no JSON": pack(Frame(kind=Kind.RESTORE, blob=b"{", generation=1)) + b"{",
    "a snapshot without names": restore({}),
    "a snapshot without a center": restore({"names": [], "numbers": {"version": 1}}),
    "a snapshot with names twice": restore({"names": ["center", "center"], "numbers": {"version": 1}}),
    "a snapshot with a thousand names": restore(
        {"names": ["center", *map(str, range(1000))], "numbers": {"version": 1}}
    ),
    "a snapshot with names that are none": restore({"names": [7, "center"], "numbers": {"version": 1}}),
    "a snapshot without numbers": restore({"names": ["center"], "numbers": []}),
    "a snapshot without a version": restore({"names": ["center"], "numbers": {}}),
    "a snapshot of another rule": restore({"names": ["center"], "numbers": {"version": 1}})
    + pack(Frame(kind=Kind.VECTOR, dtype=torch.float32, elements=N, generation=1))
    + bytes(4 * N),
}


def test_whoever_talks_nonsense_is_closed_and_named_once_and_the_server_goes_on(caplog):
    """Of what was only announced, no memory is taken."""
    adagrad = ServerSpec(rule="adagrad")
    for case, attack in ATTACKS.items():
        caplog.clear()
        with hosting(adagrad, 2, memory_from=-1, generation=1) as host, caplog.at_level(logging.WARNING, "manyhands"):
            good, bad = host.client(0), host.pairs[1][0][1]
            for connection in good._connections:
                connection.channel.generation = 1
            good.initialize(torch.zeros(N))
            good.activate()
            with bounded(512):
                bad.settimeout(10)
                bad.sendall(attack)
                with suppress(ConnectionResetError):
                    while bad.recv(1 << 16):  # what the server still says until it closes the connection
                        pass
                good.push(torch.ones(N))
                good.pull(torch.empty(N))
        (record,) = caplog.records
        assert "server shard 0 closed the connection to worker 1: " in record.getMessage(), case
        assert (host.output[0]["lost"], host.output[0]["pushes"]) == ([1], 1), case


def test_a_push_that_was_cut_short_is_not_applied():
    with hosting(ADD, 2, memory_from=-1) as host:
        good, bad = host.client(0), host.pairs[1][0][1]
        good.initialize(torch.zeros(N))
        good.activate()
        bad.sendall(pack(Frame(kind=Kind.ACTIVATE)) + push()[:-1])
        bad.close()
        good.push(torch.ones(N))
        assert good.drain_journal()["pushes"] == [[1]]
    assert host.output[0] == {"shard": 0, "version": 1, "pulls": 0, "pushes": 1, "dropped": 0, "lost": [1]}


def test_who_waits_for_a_worker_that_does_nothing_learns_which():
    with hosting(IN_STEP, 2, timeout_s=0.4) as host:
        fast, slow = host.clients
        fast.initialize(torch.zeros(N))
        fast.activate()
        slow.activate()
        words = r"worker 1 on host-b made no progress .* in server.tick at step 1"
        assert refused(words, fast.tick, kind=PeerLost).rank == 1
        refused("worker 1", fast.pull, torch.empty(N), kind=PeerLost)  # and so does everything from then on


def test_each_part_of_a_replica_has_a_center_of_its_own():
    """Of two replicas of two workers: lengths differ, staleness is that of the replica's push on this part."""
    with hosting(ServerSpec(rule="staleness", coordinates=2), 4, shards=2) as host:
        lengths = {0: 4, 1: 6}
        for rank, client in enumerate(host.clients):
            part = rank % 2
            client.initialize(torch.full((lengths[part],), float(rank)))
            client.activate()
            client.pull(torch.empty(lengths[part]))
        for rank in (0, 1, 2):
            host.client(rank).push(torch.ones(lengths[rank % 2]))
        for rank, expected in ((0, 0 + 1 + 1 / 2), (1, 1 + 1)):
            center = torch.empty(lengths[rank % 2])
            host.client(rank).center(center)
            assert center.eq(expected).all(), rank
        assert [client.drain_journal().get("staleness") for client in host.clients] == [[0], [0], [1], None]
    assert [one["pushes"] for one in host.output] == [3, 3]


def test_the_first_part_has_the_gate_and_where_all_are_in_step_each_has():
    for bound, rank, waits_for in [(0, 0, 2), (0, 1, 3), (1, 0, 2), (1, 1, None)]:
        with hosting(ServerSpec(rule="add", bound=bound, coordinates=2), 4, timeout_s=0.4) as host:
            for client in host.clients:
                client.initialize(torch.zeros(N))
                client.activate()
            tick = host.client(rank).tick
            for _ in range(bound):
                tick()
            if waits_for is None:
                tick()
            else:
                assert refused(f"worker {waits_for} on", tick, kind=PeerLost).rank == waits_for


def test_who_waits_for_a_first_center_that_nobody_offers_is_told_so():
    with (
        hosting(ADD, 1, timeout_s=0.3) as host,
        pytest.raises(ManyhandsError, match="in server.pull for its first parameters"),
    ):
        host.client(0).pull(torch.empty(N))


def test_workers_that_do_not_come_are_an_error():
    with pytest.raises(ChannelTimeout, match=r"waited 0\.1 s for the workers \[0, 1\]"):
        serve(ADD, shard=0, shards=1, workers=2, channels={}, timeout_s=0.1)


def test_a_worker_that_dies_in_the_middle_of_a_push_changes_nothing_and_frees_the_others():
    """CASE 11: the others wait for it until it is known to be dead. Its half push, in shared memory, is not applied."""
    with hosting(IN_STEP, 2) as host:
        mine, dying = host.clients
        into = torch.empty(N)
        mine.initialize(torch.zeros(N))
        for client in host.clients:
            client.activate()
            client.pull(into)
        mine.push(torch.ones(N))
        with started(mine.tick) as waiting:
            dying._connections[0]._outbox[: N // 2] = 7.0
            expect_waits(waiting, "a tick at bound 0")
            dying._connections[0].channel.close()
            waiting.result(10)
        mine.pull(into)
        assert into.eq(1).all()
    assert host.output[0]["lost"] == [1]


def test_when_a_shard_is_gone_every_worker_learns_at_once_which():
    with hosting(IN_STEP, 2, 2, timeout_s=300) as host:
        waiting_one, busy_one = host.clients
        waiting_one.initialize(torch.zeros(N))
        waiting_one.activate()
        busy_one.activate()
        with started(waiting_one.tick) as waiting:
            expect_waits(waiting, "a tick at bound 0")
            for row in host.pairs:
                row[1][0].shutdown(socket.SHUT_RDWR)
            words = r"server shard 1 is gone\. This worker waited .* in server\.%s at step %d"
            lost = refused(words % ("tick", 1), waiting.result, 30, kind=PeerLost)  # though it waits for shard 0
        refused(words % ("pull", 0), busy_one.pull, torch.empty(N), kind=PeerLost)
    again = pickle.loads(pickle.dumps(lost))
    assert (str(again), again.rank, again.shard) == (str(lost), -2, 1)


def test_over_tls_strangers_are_turned_away_and_the_port_is_closed_once_all_workers_have_come():
    ours, theirs = Credentials.create(), Credentials.create()
    listener = Listener(credentials=ours, generation=3, timeout_s=10)
    spec = ServerSpec(rule="elastic", options={"alpha": 0.5})

    def come(rank, shard=0, shards=1, credentials=ours, generation=3):
        given = {"credentials": credentials, "peer": "server shard 0", "generation": generation, "timeout_s": 10}
        return connect(listener.address, hello(rank, shard, shards, "localhost"), **given)

    def listens():
        try:
            socket.create_connection(listener.address, 1.0).close()
        except ConnectionError:  # refused, or reset where it closed meanwhile
            return False
        return True

    where = {"shard": 0, "shards": 1, "workers": 2, "channels": {}, "generation": 3, "timeout_s": 10}
    with started(lambda: serve(spec, listener=listener, **where)) as serving:
        good = ServedServer(spec, [come(0)])
        good.initialize(torch.zeros(N))
        good.activate()
        for place in [(1, 0, 1, theirs), (1, 0, 1, ours, 2), (0,), (2,), (1, 1), (1, 0, 2)]:  # worker 0 is there
            refused("", come, *place, kind=ChannelClosed)
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(random.Random(1).randbytes(1000))
            assert listens()
            replayer = come(1)
            replayer.generation = 0  # frames, as they were recorded in an older generation
            replayer.send(Frame(kind=Kind.ACTIVATE))
            refused("", replayer.receive, kind=ChannelClosed)
            wait_until(lambda: not listens())
            pushed = good.push(torch.ones(N), 2.0, 5)
        assert torch.equal(pushed.answer, torch.ones(N))
        assert (pushed.weight, pushed.bits) == (2.0, 5)
        good.close()
        assert serving.result(10) == {"shard": 0, "version": 1, "pulls": 0, "pushes": 1, "dropped": 0, "lost": [1]}


def adds_ones(client):
    """Each push adds one to every element, so a version is one number everywhere, and the pull says which."""
    into, one = torch.empty(LARGE), torch.ones(LARGE)
    client.initialize(torch.zeros(LARGE))
    client.activate()
    for _ in range(20):
        client.pull(into)
        (versions,) = client.drain_journal()["pulls"]
        for version, part in zip(versions, into.chunk(2), strict=True):
            lowest, highest = part.aminmax()
            assert lowest == highest == version, (version, lowest, highest)
        client.push(one)


def in_a_process(_):
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with hosting(ADD, 3, 2) as host:
        in_threads(3, lambda rank: adds_ones(host.client(rank)))
        into = torch.empty(LARGE)
        host.client(0).center(into)
        assert into.eq(3 * 20).all()
        assert len(os.listdir("/proc/self/fd")) > len(before)
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - len(before)


def test_no_read_is_torn_no_push_is_lost_and_nothing_is_left_open():
    assert values(forked(1, in_a_process, 60)) == [0]


def test_what_is_wrong_with_the_server_itself_ends_it():
    class Broken(Exception):
        pass

    def fail(phase, step):
        raise Broken

    mine, its = socket.socketpair()
    with mine, pytest.raises(Broken):
        serve(ADD, shard=0, shards=1, workers=1, channels={0: channel_to(0, its, 10)}, progress=fail)
    threads = [thread.name for thread in threading.enumerate()]
    assert "manyhands-worker-0" not in threads
