"""The served server passes the conformance suite with every shard in a process of its own, as the engines start them."""

from contextlib import contextmanager

import pytest
import torch
from served import client_of, processes

from manyhands.server.shard_ranges import shards_of
from manyhands.testing.server_suite import SERVER_SUITE


@pytest.fixture(scope="module", autouse=True)
def imported():
    """A process's first optimizer imports for seconds what forked processes then have."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()


@contextmanager
def open_servers(spec, workers, shards):
    with processes(spec, workers, shards_of(spec, shards)) as made:
        clients = [client_of(spec, row, made.timeout_s) for row in made.pairs]
        yield clients
        for client in clients:
            client.close()
        assert [made.join(pid) for pid in made.shards] == [0] * len(made.shards)


@pytest.mark.parametrize("check", SERVER_SUITE.values(), ids=SERVER_SUITE)
def test_conformance(check):
    check(open_servers)
