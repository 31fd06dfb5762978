"""Real processes push and pull as fast as they can: no read is ever torn, no push is lost."""

import torch
from served import client_of, processes

from manyhands.server.base import ServerSpec

N, WORKERS, ROUNDS = 1 << 20, 3, 40


def program(client):
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
        pids = [made.worker(rank, program) for rank in range(WORKERS)]
        assert [made.join(pid) for pid in pids] == [0] * WORKERS
        last = client_of(made.spec, made.pairs[WORKERS], 10)
        into = torch.empty(N)
        last.center(into)
        assert into.eq(WORKERS * ROUNDS).all()
        last.close()
        assert [made.join(pid) for pid in made.shards] == [0, 0]
