"""Shards and workers in processes of their own, some of them killed."""

import os
import pickle
import random
import signal
import socket
from functools import partial

import torch
from served import client_of, processes

from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import Kind, hello
from manyhands.server.shard_host import serve
from manyhands.testing.server_suite import expect_waits, started
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import Frame
from manyhands.transport.listener import Listener, connect
from refusals import refused

N = 1 << 18
IN_STEP = ServerSpec(rule="add", bound=0)


def opened(made, rank):
    return client_of(made.spec, made.pairs[rank], made.timeout_s)


def test_a_worker_killed_in_the_middle_of_a_push_changes_nothing_and_frees_the_others():
    """CASE 11: the others wait for it until it is known to be dead. Its half push, in shared memory, is not applied."""
    told, tell = os.pipe()

    def half_a_push(client):
        into = torch.empty(N)
        client.activate()
        client.pull(into)
        os.write(tell, b".")
        client._connections[0]._outbox[: N // 2] = 7.0
        os.write(tell, b".")
        signal.pause()

    with processes(IN_STEP, 2) as made:
        mine, into = opened(made, 0), torch.empty(N)
        mine.initialize(torch.zeros(N))
        mine.activate()
        pid = made.worker(1, half_a_push)
        assert os.read(told, 1)  # it takes part
        mine.push(torch.ones(N))
        with started(mine.tick) as waiting:
            assert os.read(told, 1)
            expect_waits(waiting, "a tick at bound 0")
            made.kill(pid)
            waiting.result(10)
        mine.pull(into)
        assert into.eq(1).all()
        mine.close()
        assert made.join(made.shards[0]) == 0
    os.close(told)
    os.close(tell)


def test_when_a_shard_is_killed_every_worker_learns_at_once_which():
    with processes(IN_STEP, 2, 2, timeout_s=300) as made:
        waiting_one, busy_one = opened(made, 0), opened(made, 1)
        waiting_one.initialize(torch.zeros(N))
        waiting_one.activate()
        busy_one.activate()
        with started(waiting_one.tick) as waiting:
            expect_waits(waiting, "a tick at bound 0")
            made.kill(made.shards[1])
            words = r"server shard 1 is gone\. This worker waited .* in server\.%s at step %d"
            lost = refused(words % ("tick", 1), waiting.result, 30, kind=PeerLost)  # though it waits for shard 0
        refused(words % ("pull", 0), busy_one.pull, torch.empty(N), kind=PeerLost)
        again = pickle.loads(pickle.dumps(lost))
        assert (str(again), again.rank, again.shard) == (str(lost), -2, 1)
        waiting_one.close()
        busy_one.close()
        assert made.join(made.shards[0]) == 0


def test_over_tls_unauthenticated_peers_are_turned_away_and_the_server_goes_on():
    ours, theirs = Credentials.create(), Credentials.create()
    listener = Listener(credentials=ours, generation=3, timeout_s=10)
    spec = ServerSpec(rule="elastic", options={"alpha": 0.5})

    def come(rank, shard=0, shards=1, credentials=ours, generation=3, timeout_s=10.0):
        place = hello(rank, shard, shards, "localhost")
        at = {"peer": "server shard 0", "generation": generation, "timeout_s": timeout_s}
        return connect(listener.address, place, credentials=credentials, **at)

    def run():
        serve(spec, shard=0, shards=1, workers=2, channels={}, listener=listener, generation=3, timeout_s=10)

    with processes(spec, 0, 0) as made:
        pid = made.fork(run)
        good = ServedServer(spec, [come(0)])
        good.initialize(torch.zeros(N))
        good.activate()
        wrong = [(1, 0, 1, theirs), (1, 0, 1, ours, 2), (0,), (2,), (1, 1), (1, 0, 2)]  # worker 0 is there
        for place in wrong:
            refused("", come, *place, kind=ChannelClosed)
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(random.Random(1).randbytes(1000))
            replayer = come(1)
            replayer.generation = 0  # frames, as they were recorded in an older generation
            replayer.send(Frame(kind=Kind.ACTIVATE))
            refused("", replayer.receive, kind=ChannelClosed)
            refused("", partial(come, 1, timeout_s=0.5), kind=(ChannelClosed, OSError))  # all have come
            pushed = good.push(torch.ones(N), 2.0, 5)
        assert torch.equal(pushed.answer, torch.ones(N))
        assert (pushed.weight, pushed.bits) == (2.0, 5)
        good.close()
        assert made.join(pid) == 0
    listener.close()


def test_nothing_of_a_worker_is_left_open():
    def program():
        before = os.listdir("/proc/self/fd")
        client = opened(made, 0)
        client.initialize(torch.zeros(N))
        client.activate()
        client.push(torch.ones(N))
        client.pull(torch.empty(N))
        assert len(os.listdir("/proc/self/fd")) > len(before)
        client.close()
        assert len(os.listdir("/proc/self/fd")) == len(before) - 2  # of its two sockets

    with processes(ServerSpec(rule="add"), 1, 2) as made:
        pid = made.fork(program)
        for _, mine in made.pairs[0]:
            mine.close()
        assert made.join(pid) == 0
        assert [made.join(pid) for pid in made.shards] == [0, 0]


WORKERS, ROUNDS = 3, 20


def adds_ones(client):
    """Each push adds one to every element, so a version is one number everywhere, and the pull says which."""
    into, one = torch.empty(N), torch.ones(N)
    client.initialize(torch.zeros(N))
    client.activate()
    for _ in range(ROUNDS):
        client.pull(into)
        (versions,) = client.drain_journal()["pulls"]
        for version, part in zip(versions, into.chunk(2), strict=True):
            lowest, highest = part.aminmax()
            assert lowest == highest == version, (version, lowest, highest)
        client.push(one)


def test_no_read_is_torn_and_no_push_is_lost():
    with processes(ServerSpec(rule="add"), WORKERS + 1, 2) as made:
        pids = [made.worker(rank, adds_ones) for rank in range(WORKERS)]
        assert [made.join(pid) for pid in pids] == [0] * WORKERS
        last, into = opened(made, WORKERS), torch.empty(N)
        last.center(into)
        assert into.eq(WORKERS * ROUNDS).all()
        last.close()
        assert [made.join(pid) for pid in made.shards] == [0, 0]
