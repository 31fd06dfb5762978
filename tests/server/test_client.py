"""The served server passes the conformance suite, through shared memory and through the socket alone."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from served import channel_to, hosting

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import SMALL_BYTES
from manyhands.server.store import InvalidCall
from manyhands.testing.server_suite import SERVER_SUITE, expect_waits, started

ADD = ServerSpec(rule="add")
BY_MEMORY_AND_SOCKET = pytest.mark.parametrize("memory_from", [0, -1], ids=["memory", "socket"])


@BY_MEMORY_AND_SOCKET
@pytest.mark.parametrize("check", SERVER_SUITE.values(), ids=SERVER_SUITE)
def test_conformance(check, memory_from):
    @contextmanager
    def open_servers(spec, workers, shards):
        with hosting(spec, workers, shards, memory_from=memory_from) as host:
            yield host.clients

    check(open_servers)


@BY_MEMORY_AND_SOCKET
def test_vectors_that_no_socket_takes_are_copied_first(memory_from):
    spec = ServerSpec(rule="elastic", options={"alpha": 0.5})
    with hosting(spec, 1, 2, memory_from=memory_from) as host:
        (client,) = host.clients
        wide = torch.arange(20.0)
        client.initialize(wide[::2])
        client.activate()
        into = torch.zeros(20)
        client.pull(into[1::2])
        assert torch.equal(into[1::2], wide[::2])
        pushed = client.push(wide[1::2])
        assert torch.equal(pushed.answer, torch.full((10,), 0.5))
        assert client.ledger.as_dict() == {
            name: {"bytes": 40, "messages": 2} for name in ("answer", "initialize", "pull", "push")
        }


def test_parts_of_two_first_centers_are_never_mixed():
    """CASE 25."""
    for _ in range(10):
        with hosting(ADD, 3, 4) as host, ThreadPoolExecutor(3) as pool:
            clients, into = host.clients, torch.empty(9)
            offers = [pool.submit(client.initialize, torch.full((9,), float(r))) for r, client in enumerate(clients)]
            for offer in offers:
                offer.result(20)
            clients[0].center(into)
            assert len(into.unique()) == 1


def test_small_vectors_and_other_hosts_do_not_use_memory():
    def lines_with_memory(client, n):
        client.initialize(torch.zeros(n))
        client.pull(torch.empty(n))
        return [connection._outbox is not None for connection in client._connections]

    for n, expected in [(SMALL_BYTES // 4, True), (SMALL_BYTES // 4 - 1, False)]:
        with hosting(ADD, 1, memory_from=SMALL_BYTES) as host:
            assert lines_with_memory(host.client(0), n) == [expected]
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as its:
        mine, _ = listening.accept()
        client = ServedServer(ADD, [channel_to(0, mine, 10)], memory_from=0)
        assert not client._connections[0]._reaches
        client.close()
        its.close()


def test_what_the_server_refuses_is_raised_here_and_ever_after():
    with hosting(ADD, 2) as host:
        first, second = host.clients
        first.initialize(torch.zeros(5))
        with pytest.raises(BadInput, match=r"has 5 elements of torch.float32 on this shard; got 4 of torch.float32"):
            second.pull(torch.empty(4))
        with pytest.raises(BadInput, match="got 4 of"):
            second.pull(torch.empty(5))
        with pytest.raises(InvalidCall, match="it calls `activate` first"):
            first.push(torch.ones(5))


def test_time_that_others_take_is_waited_time_and_the_servers_own_is_not():
    with hosting(ServerSpec(rule="elastic", bound=0, options={"alpha": 0.5}), 2) as host:
        fast, slow = host.clients
        fast.initialize(torch.zeros(5))
        fast.activate()
        fast.push(torch.ones(5))
        assert fast.waited_s == 0
        fast.tick()
        slow.activate()
        with started(lambda: fast.push(torch.ones(5))) as waiting:
            expect_waits(waiting, "an answer at bound 0")
            slow.push(torch.ones(5))
            waiting.result(20)
        assert fast.waited_s > 0
        assert slow.waited_s == 0
