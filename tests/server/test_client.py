"""The served server passes the conformance suite, by shared memory and by the socket; so does the one in process."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from served import channel_to, hosting

from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import PushJournal, ServedServer
from manyhands.server.in_process import InProcessServers
from manyhands.server.protocol import SMALL_BYTES
from manyhands.server.pushes import Applied, Dropped, Held
from manyhands.server.store import InvalidCall
from manyhands.testing.server_suite import SERVER_SUITE, expect_waits, started
from refusals import refused

ADD = ServerSpec(rule="add")
BY_MEMORY_AND_SOCKET = pytest.mark.parametrize("memory_from", [0, -1], ids=["memory", "socket"])


@BY_MEMORY_AND_SOCKET
def test_conformance(memory_from):
    """By the socket: every kind of answer and wait; what else the suite checks comes by shared memory alike."""

    @contextmanager
    def open_servers(spec, workers, shards):
        with hosting(spec, workers, shards, memory_from=memory_from) as host:
            yield host.clients

    by_socket = (
        "first_offer_wins",
        "exactly_once",
        "gate",
        "elastic_in_step",
        "quorum_late",
        "traffic",
        "encoded_pushes",
    )
    for name in SERVER_SUITE if memory_from == 0 else by_socket:
        SERVER_SUITE[name](open_servers)


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
        refused("has 5 elements of torch.float32 on this shard; got 4 of torch.float32", second.pull, torch.empty(4))
        refused("got 4 of", second.pull, torch.empty(5))
        refused("it calls `activate` first", first.push, torch.ones(5), kind=InvalidCall)


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


def test_the_journal_has_lists_since_the_last_time_and_what_changed_nothing_is_none():
    """Dropped, or of weight 0: neither made a version, nor does its staleness count."""
    output = PushJournal()
    assert output.take() == {}
    output.pulled([3, 4])
    output.pushed([Applied(5, 1), Applied(7, 2)], 1.0)
    output.pushed([Held(6, 0)], 2.0)
    assert output.take() == {"pulls": [[3, 4]], "pushes": [[5, 7], [6]], "staleness": [2, 0]}
    assert output.take() == {}
    output.pushed([Dropped(3)], 1.0)
    output.pushed([Applied(3, 9)], 0.0)
    assert output.take() == {"pushes": [None, None], "behind": [0]}


@contextmanager
def in_process(spec, workers, shards):
    yield InProcessServers(spec, workers, shards, timeout_s=10).clients


def test_conformance_in_process():
    for check in SERVER_SUITE.values():
        check(in_process)


def test_nobody_waits_for_ever():
    """Past the deadline, PeerLost names the worker that was waited for, the operation and the tick."""
    servers = InProcessServers(ServerSpec(rule="add", bound=0), 3, timeout_s=0.01)
    first = servers.clients[0]
    refused("server.pull at step 0", first.pull, torch.zeros(1), kind=PeerLost)
    first.initialize(torch.zeros(1))
    for client in (first, servers.clients[2]):
        client.activate()
    refused("worker 2 on localhost .* in server.tick at step 1", first.tick, kind=PeerLost)
    assert first.waited_s >= 0.02


def test_a_parameter_may_be_pushed_and_pulled_into():
    """Leaves that require grad are read and filled without autograd noticing."""
    client = InProcessServers(ServerSpec(rule="add"), 1, 2).clients[0]
    parameter = torch.nn.Parameter(torch.ones(3))
    client.initialize(parameter)
    client.activate()
    client.push(parameter)
    client.pull(parameter)
    assert parameter.tolist() == [2.0] * 3
    assert parameter.requires_grad
