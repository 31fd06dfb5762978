"""What a worker does for its replica."""

from dataclasses import replace

import pytest
from driver_script import wait_until

from manyhands.comm.solo import SoloGroup
from manyhands.server.base import ServerSpec
from manyhands.server.in_process import InProcessServers
from manyhands.testing.threads import together
from manyhands.worker import Mesh, Worker


def in_replicas(worker: Worker, servers: list[InProcessServers]) -> Worker:
    """One of four: replicas (0, 1) and (2, 3). Each member has a server of its own, which counts two clients."""
    replica, member = divmod(worker.rank, 2)
    mesh = Mesh(
        world=worker.group,
        data=worker.make_group([member, member + 2]),
        model=worker.make_group([2 * replica, 2 * replica + 1]),
        rows=(replica, 2),
    )
    return replace(worker, mesh=mesh, server=servers[member].clients[replica])


def two_servers(bound: int) -> list[InProcessServers]:
    return [InProcessServers(ServerSpec(rule="add", bound=bound), 2, timeout_s=20) for _ in range(2)]


def test_at_bound_0_every_member_gets_all_bits_of_all_replicas() -> None:
    servers = two_servers(0)

    def program(worker: Worker) -> list[int]:
        worker = in_replicas(worker, servers)
        assert worker.server is not None
        worker.server.activate()
        worker.group.barrier()
        return [worker.tick(1 << worker.rank), worker.tick(0)]

    assert together(4, program) == [[0b1111, 0]] * 4


def test_a_replica_passes_the_gate_as_one() -> None:
    """Replica 1 finishes nothing: replica 0 may finish two ticks, and both of its members wait in the second."""
    servers, passed, seen = two_servers(1), [0, 0], list[list[int]]()

    def program(worker: Worker) -> None:
        worker = in_replicas(worker, servers)
        server = worker.server
        assert server is not None
        server.activate()
        worker.group.barrier()
        if worker.rank < 2:
            for _ in range(2):
                worker.tick(0)
                passed[worker.rank] += 1
        if worker.rank == 2:
            wait_until(lambda: passed[1] == 1 and servers[0].stores[0]._gate.is_waiting(0))
            seen.append(list(passed))
        worker.mesh.model.barrier()
        server.deactivate()

    together(4, program)
    assert seen == [[1, 1]]
    assert passed == [2, 2]


def test_the_mesh_and_the_group_are_of_one_world_and_a_group_of_oneself_needs_nobody() -> None:
    with pytest.raises(ValueError, match="another group than the worker's"):
        replace(Worker(), group=SoloGroup())
    assert isinstance(Worker(rank=1, size=3).make_group([1]), SoloGroup)
