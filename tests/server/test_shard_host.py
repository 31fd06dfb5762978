"""A live shard: what is attacked, lost or late, while the others go on."""

import logging
import random
import secrets
import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from served import channel_to, hosting

from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import Kind, hello
from manyhands.server.shard_host import serve
from manyhands.testing.server_suite import expect_waits, started
from manyhands.transport.channel import ChannelClosed, ChannelTimeout
from manyhands.transport.frame import DTYPES, HEADER_BYTES, Frame, pack, to_json
from manyhands.transport.listener import Listener, connect

N = 1000
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
    "a snapshot without a version": restore({"names": ["center"], "numbers": {}}),
}


def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0])


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_whoever_talks_nonsense_is_closed_and_named_once_and_the_server_goes_on(attack, caplog):
    into, one = torch.empty(N), torch.ones(N)
    with hosting(ADD, 2, memory_from=-1, generation=1) as host, caplog.at_level(logging.WARNING, "manyhands"):
        good, bad = host.client(0), host.pairs[1][0][1]
        for connection in good._connections:
            connection.channel.generation = 1
        good.initialize(torch.zeros(N))
        good.activate()
        before = address_space()
        bad.settimeout(10)
        bad.sendall(attack)
        assert until_the_end(bad)
        assert address_space() - before < 1 << 16  # pages: of what was only announced, nothing was taken
        good.push(one)
        good.pull(into)
        assert torch.equal(into, one)
    (record,) = caplog.records
    assert "server shard 0 closed the connection to worker 1: " in record.getMessage()
    assert host.output[0]["lost"] == [1]


def until_the_end(sock):
    """Read what the server still says; True once it closed the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_snapshot_of_another_rule_ends_its_senders_connection_and_not_the_shard(caplog):
    center = pack(Frame(kind=Kind.VECTOR, dtype=torch.float32, elements=N, generation=1)) + bytes(4 * N)
    with hosting(ServerSpec(rule="adagrad"), 2, memory_from=-1) as host, caplog.at_level(logging.WARNING, "manyhands"):
        good, bad = host.client(0), host.pairs[1][0][1]
        good.initialize(torch.zeros(N))
        bad.settimeout(10)
        bad.sendall(restore({"names": ["center"], "numbers": {"version": 1}}) + center)
        assert until_the_end(bad)
        good.pull(torch.empty(N))
    (record,) = caplog.records
    assert "worker 1" in record.getMessage()
    assert host.output[0]["lost"] == [1]


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


def test_a_worker_that_dies_holds_the_others_up_until_its_connection_ends():
    """CASE 11: no longer than until it is known to be lost."""
    with hosting(IN_STEP, 2) as host:
        alive, dead = host.client(0), host.client(1)
        alive.initialize(torch.zeros(N))
        alive.activate()
        dead.activate()
        alive.push(torch.ones(N))
        dead.push(torch.ones(N))  # it came before the worker died: it counts
        with started(alive.tick) as waiting:
            expect_waits(waiting, "a tick at bound 0")
            dead._connections[0].channel.close()
            waiting.result(10)
        into = torch.empty(N)
        alive.pull(into)
        assert into.eq(2).all()
        assert alive.waited_s > 0


def test_who_waits_for_a_worker_that_does_nothing_learns_which():
    with hosting(IN_STEP, 2, timeout_s=0.4) as host:
        fast, slow = host.clients
        fast.initialize(torch.zeros(N))
        fast.activate()
        slow.activate()
        with pytest.raises(PeerLost, match=r"worker 1 on host-b made no progress .* in server.tick at step 1") as lost:
            fast.tick()
        assert lost.value.rank == 1
        with pytest.raises(PeerLost, match="worker 1"):  # and so does everything from then on
            fast.pull(torch.empty(N))


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


@pytest.mark.parametrize(("bound", "rank", "waits_for"), [(0, 0, 2), (0, 1, 3), (1, 0, 2), (1, 1, None)])
def test_the_first_part_has_the_gate_and_where_all_are_in_step_each_has(bound, rank, waits_for):
    with hosting(ServerSpec(rule="add", bound=bound, coordinates=2), 4, timeout_s=0.4) as host:
        for client in host.clients:
            client.initialize(torch.zeros(N))
            client.activate()
        for _ in range(bound):
            host.client(rank).tick()
        with nullcontext() if waits_for is None else pytest.raises(PeerLost, match=f"worker {waits_for} on") as lost:
            host.client(rank).tick()
        assert waits_for is None or lost.value.rank == waits_for


def test_who_waits_for_a_first_center_that_nobody_offers_is_told_so():
    with (
        hosting(ADD, 1, timeout_s=0.3) as host,
        pytest.raises(ManyhandsError, match="in server.pull for its first parameters"),
    ):
        host.client(0).pull(torch.empty(N))


def test_a_center_half_offered_leaves_room_for_the_next():
    with hosting(ADD, 2) as host:
        good, bad = host.client(0), host.pairs[1][0][1]
        bad.sendall(pack(Frame(kind=Kind.OFFER, a=N, b=FLOAT)))
        assert bad.recv(HEADER_BYTES, socket.MSG_WAITALL)[5] == Kind.WANTED
        bad.sendall(pack(Frame(kind=Kind.GIVE, elements=N, dtype=torch.float32)) + bytes(N))
        with started(lambda: good.initialize(torch.ones(N))) as waiting:
            expect_waits(waiting, "an offer while another one is on its way")
            bad.close()
            waiting.result(10)
        into = torch.empty(N)
        good.center(into)
        assert into.eq(1).all()


def test_workers_that_do_not_come_are_an_error():
    with pytest.raises(ChannelTimeout, match=r"waited 0\.1 s for the workers \[0, 1\]"):
        serve(ADD, shard=0, shards=1, workers=2, channels={}, timeout_s=0.1)


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


def test_workers_come_to_a_listener_each_once():
    token = secrets.token_bytes(32)
    listener = Listener(credentials=None, token=token, timeout_s=10)
    output = {}

    def run():
        output.update(serve(ADD, shard=1, shards=2, workers=2, channels={}, listener=listener, timeout_s=10))

    def come(*place):
        return connect(
            listener.address, hello(*place), credentials=None, token=token, peer="server shard 1", timeout_s=10
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        first = come(0, 1, 2, "host-a")
        for wrong in [(0, 1, 2, "host-a"), (2, 1, 2, "host-a"), (1, 0, 2, "host-a"), (1, 1, 3, "host-a")]:
            with pytest.raises(ChannelClosed, match="refused this connection"):
                come(*wrong)
        clients = [ServedServer(ADD, [channel]) for channel in (first, come(1, 1, 2, "host-b"))]
        for _ in range(2000):  # all are in: nobody else can come
            try:
                socket.create_connection(listener.address, 1.0).close()
            except ConnectionError:  # refused, or reset where it closed meanwhile
                break
            threading.Event().wait(0.01)
        else:
            pytest.fail("the shard still listens")
        clients[0].initialize(torch.zeros(N))
        for client in clients:
            client.activate()
            client.push(torch.ones(N))
            client.close()
    finally:
        thread.join(20)
    assert output == {"shard": 1, "version": 2, "pulls": 0, "pushes": 2, "dropped": 0, "lost": []}
