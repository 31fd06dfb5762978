"""Shards and workers in processes of their own, some of them killed."""

import os
import pickle
import random
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from driver_script import wait_until
from served import client_of, processes

from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import Kind, hello
from manyhands.server.shard_host import serve
from manyhands.testing.server_suite import expect_waits, started
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import Frame, pack
from manyhands.transport.listener import Listener, connect
from open_files import open_files

N = 1 << 20
IN_STEP = ServerSpec(rule="add", bound=0)


def opened(made, rank, memory_from=0):
    return client_of(made.spec, made.pairs[rank], made.timeout_s, memory_from)


@pytest.mark.parametrize("memory_from", [0, -1], ids=["memory", "socket"])
def test_a_worker_killed_in_the_middle_of_a_push_changes_nothing_and_frees_the_others(memory_from):
    """CASE 11: the others wait for it until it is known to be dead. Its half push is not applied."""
    before = sorted(os.listdir("/dev/shm"))
    told, tell = os.pipe()

    def half_a_push(client):
        into = torch.empty(N)
        client.activate()
        client.pull(into)
        os.write(tell, b".")
        (connection,) = client._connections
        if connection._outbox is None:
            header = pack(Frame(kind=Kind.PUSH, dtype=torch.float32, elements=N, sequence=1, weight=1.0))
            connection.channel._sock.sendall(header + bytes(2 * N))
        else:
            connection._outbox[: N // 2] = 7.0
        os.write(tell, b".")
        signal.pause()

    with processes(IN_STEP, 2) as made:
        mine, into = opened(made, 0, memory_from), torch.empty(N)
        mine.initialize(torch.zeros(N))
        mine.activate()
        pid = made.worker(1, half_a_push, memory_from)
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
    assert sorted(os.listdir("/dev/shm")) == before


def test_when_a_shard_is_killed_every_worker_learns_at_once_which():
    with processes(IN_STEP, 2, 2) as made:
        waiting_one, busy_one = opened(made, 0), opened(made, 1)
        waiting_one.initialize(torch.zeros(N))
        waiting_one.activate()
        busy_one.activate()
        with started(waiting_one.tick) as waiting:
            expect_waits(waiting, "a tick at bound 0")
            made.kill(made.shards[1])
            killed = time.monotonic()
            with pytest.raises(
                PeerLost, match=r"server shard 1 is gone\. This worker waited .* in server\.tick at step 1"
            ) as lost:
                waiting.result(10)  # though it is shard 0 that it waits for
            assert time.monotonic() - killed < 5  # not by the deadline
        with pytest.raises(PeerLost, match=r"server shard 1 is gone\. This worker waited .* in server\.pull at step 0"):
            busy_one.pull(torch.empty(N))
        again = pickle.loads(pickle.dumps(lost.value))
        assert (str(again), again.rank, again.shard) == (str(lost.value), -2, 1)
        waiting_one.close()
        busy_one.close()
        assert made.join(made.shards[0]) == 0


def test_a_shard_that_says_nothing_for_too_long_is_lost():
    with processes(ServerSpec(rule="add"), 1, timeout_s=0.3) as made:
        client = opened(made, 0)
        client.initialize(torch.zeros(N))
        os.kill(made.shards[0], signal.SIGSTOP)
        stat = Path(f"/proc/{made.shards[0]}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")  # until then it may still answer
        with pytest.raises(PeerLost, match=r"server shard 0 did not answer for 0.3 s\. This worker waited 0"):
            client.pull(torch.empty(N))
        client.close()


def test_over_tls_unauthenticated_peers_are_turned_away_and_the_server_goes_on():
    ours, theirs = Credentials.create(), Credentials.create()
    listener = Listener(credentials=ours, generation=3, timeout_s=10)
    spec = ServerSpec(rule="elastic", options={"alpha": 0.5})

    def come(rank, credentials=ours, generation=3):
        place = hello(rank, 0, 1, "localhost")
        return connect(
            listener.address, place, credentials=credentials, peer="server shard 0", generation=generation, timeout_s=10
        )

    def run():
        serve(spec, shard=0, shards=1, workers=2, channels={}, listener=listener, generation=3, timeout_s=10)

    with processes(spec, 0, 0) as made:
        pid = made.fork(run)
        good = ServedServer(spec, [come(0)])
        good.initialize(torch.zeros(N))
        good.activate()
        for attack in (lambda: come(1, theirs), lambda: come(1, generation=2), lambda: come(0)):
            with pytest.raises(ChannelClosed):
                attack()
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(random.Random(1).randbytes(1000))
            replayer = come(1)
            replayer.generation = 0  # frames, as they were recorded in an older generation
            replayer.send(Frame(kind=Kind.ACTIVATE))
            with pytest.raises(ChannelClosed):
                replayer.receive()
            pushed = good.push(torch.ones(N), 2.0, 5)
        assert torch.equal(pushed.answer, torch.ones(N))
        assert (pushed.weight, pushed.bits) == (2.0, 5)
        good.close()
        assert made.join(pid) == 0
    listener.close()


def test_nothing_of_a_worker_is_left_open():
    fds = open_files()
    with processes(ServerSpec(rule="add"), 1, 2) as made:
        client = opened(made, 0)
        client.initialize(torch.zeros(N))
        client.activate()
        client.push(torch.ones(N))
        client.pull(torch.empty(N))
        client.close()
        assert [made.join(pid) for pid in made.shards] == [0, 0]
    assert open_files() <= fds
