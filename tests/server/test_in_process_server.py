"""The server in the workers' own process passes the conformance suite, and says whom it waited for."""

from contextlib import contextmanager

import pytest
import torch

from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.in_process import InProcessServers
from manyhands.testing.server_suite import SERVER_SUITE, expect_waits, started


@contextmanager
def in_process(spec, workers, shards):
    yield InProcessServers(spec, workers, shards, timeout_s=10).clients


@pytest.mark.parametrize("check", SERVER_SUITE.values(), ids=SERVER_SUITE)
def test_conformance(check):
    check(in_process)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_lost_worker_holds_nobody_up(bound):
    """CASE 11: it blocks the others at the bound until it is declared lost, and then no longer."""
    servers = InProcessServers(ServerSpec(rule="add", bound=bound), 2, 2, timeout_s=10)
    servers.clients[0].initialize(torch.zeros(4))
    for client in servers.clients:
        client.activate()
    servers.clients[1].push(torch.ones(4))
    for _ in range(bound):
        servers.clients[0].tick()
    with started(servers.clients[0].tick) as waiting:
        expect_waits(waiting, "a tick ahead of a dead worker")
        servers.lose(1)
        waiting.result(10)
    servers.clients[0].tick()
    center = torch.zeros(4)
    servers.clients[0].center(center)
    assert center.tolist() == [1.0] * 4, "what a worker pushed before it died counts"


def test_nobody_waits_for_ever():
    """Past the deadline, PeerLost names the worker that was waited for, the operation and the tick."""
    servers = InProcessServers(ServerSpec(rule="add", bound=0), 3, timeout_s=0.01)
    first = servers.clients[0]
    with pytest.raises(PeerLost, match="server.pull at step 0"):
        first.pull(torch.zeros(1))
    first.initialize(torch.zeros(1))
    for client in (first, servers.clients[2]):
        client.activate()
    with pytest.raises(PeerLost, match="worker 2 on localhost .* in server.tick at step 1"):
        first.tick()
    assert first.waited_s >= 0.02


def test_an_answer_is_the_workers_own():
    """What a worker does with the quorum's mean is not seen by the others."""
    servers = InProcessServers(ServerSpec(rule="quorum", bound=16, one_shard=True), 2, timeout_s=10)
    servers.clients[0].initialize(torch.zeros(2))
    for client in servers.clients:
        client.activate()
    with started(lambda: servers.clients[0].push(torch.ones(2))) as waiting:
        mine = servers.clients[1].push(torch.ones(2)).answer
        theirs = waiting.result(10).answer
    mine.zero_()
    assert theirs.tolist() == [1.0, 1.0]


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
