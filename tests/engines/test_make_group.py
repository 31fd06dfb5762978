"""Groups over whatever workers can meet by; here workers are threads, and the places are two stores of torch's, and a dict."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from manyhands.comm.group import Group
from manyhands.comm.ring.group import RingGroup
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.comm.solo import SoloGroup
from manyhands.engines.driver.driver import Rendezvous
from manyhands.engines.hosts.network import Network
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.make_group import Meet, Topology, make_group, meet_at
from manyhands.errors import ManyhandsError, PeerLost, Unsupported
from refusals import all_refused, refused

Meetings = Callable[[int], Meet]  # by rank


def at_a_hash_store(folder: Path) -> Meetings:
    store = HashStore()
    return lambda rank: meet_at(store, rank, 20)


def at_a_file(folder: Path) -> Meetings:
    return lambda rank: meet_at(FileStore(str(folder / "store"), -1), rank, 20)


def at_a_driver(folder: Path) -> Meetings:
    """The driver's own bookkeeping, asked by threads."""
    rendezvous, arrived, answers = Rendezvous(), threading.Condition(), dict[Any, list[Any]]()

    def meet(name: str, ranks: Sequence[int], value: Any, rank: int) -> list[Any]:
        with arrived:
            values = rendezvous.arrive(rank, name, list(ranks), value)
            for other in ranks if values is not None else ():
                answers.setdefault(other, []).append(values)
            arrived.notify_all()
            assert arrived.wait_for(lambda: answers.get(rank), 20)
            got: list[Any] = answers[rank].pop(0)
            return got

    return lambda rank: lambda name, ranks, value: meet(name, ranks, value, rank)


def network(hosts: list[list[int]]) -> Network:
    names = [f"host{number}" for number in range(len(hosts))]
    return Network(hosts=hosts, names=names, listen="127.0.0.1", secret=Secret(token=b"t" * 32))


def on_threads(
    hosts: list[list[int]], meetings: Meetings, program: Callable[[int, Topology, Meet, Network | None], Any]
) -> list[Any]:
    """What `program` returns on each rank."""
    net = network(hosts)

    def run(rank: int) -> Any:
        topology = Topology(
            rank=rank, hosts=hosts, names=net.names, device=torch.device("cpu"), timeout_s=20, connect_s=20
        )
        return program(rank, topology, meetings(rank), net if len(hosts) > 1 else None)

    ranks = [rank for host in hosts for rank in host]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(30) for future in [pool.submit(run, rank) for rank in ranks]]


def ring_of_messages(group: Group) -> float:
    """What the rank before this one sent."""
    got, value = torch.zeros(1), torch.tensor([10.0 + group.rank])
    group.swap(value, (group.rank + 1) % group.size, got, (group.rank - 1) % group.size)
    return got.item()


KINDS: list[tuple[Callable[[Path], Meetings], list[list[int]], type[Group]]] = [
    (at_a_hash_store, [[0, 1, 2]], SharedMemoryGroup),
    (at_a_driver, [[0, 1, 2]], SharedMemoryGroup),
    (at_a_file, [[0], [1], [2]], RingGroup),
    (at_a_driver, [[0], [1], [2]], RingGroup),
    (at_a_driver, [[0]], SoloGroup),
]


def test_wherever_workers_can_meet_they_get_the_group_of_their_topology(tmp_path: Path) -> None:
    for place, hosts, kind in KINDS:
        size = sum(map(len, hosts))
        turns = threading.Barrier(size)

        def program(
            rank: int, topology: Topology, meet: Meet, net: Network | None, turns: threading.Barrier = turns
        ) -> list[Any]:
            group = make_group(topology, meet, network=net)
            found = [type(group), group.rank, group.size]
            if isinstance(group, RingGroup):  # shared memory is one thread's at a time
                found.append(ring_of_messages(group))
            turns.wait(20)
            group.close()
            return found

        for rank, found in enumerate(on_threads(hosts, place(tmp_path), program)):
            assert found == [kind, rank, size, *([10.0 + (rank - 1) % size] if kind is RingGroup else [])], place


@pytest.mark.parametrize("place", [at_a_hash_store, at_a_driver])
def test_meetings_by_the_same_name_do_not_mix(tmp_path: Path, place: Callable[[Path], Meetings]) -> None:
    """Groups that form at once, of which worker 4 is in two; and values of the same ranks earlier, of others, and of those
    whose ranks met more often."""
    groups_of, parts = [[0, 1], [2, 3, 4], [0, 4]], [[0, 1], [2, 3, 4], [0, 1], [0, 4], [1, 4], [1, 4]]

    def program(rank: int, topology: Topology, meet: Meet, net: Network | None) -> list[Any]:
        groups = [make_group(topology.of(part), meet, network=net) for part in groups_of if rank in part]
        got = [[group.rank, group.size, ring_of_messages(group)] for group in groups]
        for group in groups:
            group.close()
        return [got, [meet("tea", part, [number, rank]) for number, part in enumerate(parts) if rank in part]]

    found = on_threads([[0], [1], [2], [3], [4]], place(tmp_path), program)
    in_groups = [[[0, 2, 11], [0, 2, 11]], [[1, 2, 10]], [[0, 3, 12]], [[1, 3, 10]], [[2, 3, 11], [1, 2, 10]]]
    assert [groups for groups, _ in found] == in_groups
    expected = [[[number, rank] for rank in part] for number, part in enumerate(parts)]
    for rank, (_, values) in enumerate(found):
        assert values == [one for one, part in zip(expected, parts, strict=True) if rank in part]


@pytest.mark.parametrize("hosts", [[[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]]])
def test_the_lost_one_of_a_part_has_its_name_in_the_run(tmp_path: Path, hosts: list[list[int]]) -> None:
    part, lost = [1, 2, 3, 4], 2

    def program(rank: int, topology: Topology, meet: Meet, net: Network | None) -> int | None:
        if rank not in part:
            return None
        group = make_group(topology.of(part), meet, network=net)
        if rank == lost:
            group.close()
            return None
        with pytest.raises(PeerLost) as raised:
            group.barrier()
        group.close()
        return raised.value.rank

    assert on_threads(hosts, at_a_hash_store(tmp_path), program) == [None, lost, None, lost, lost]


def topology_of(rank: int, hosts: list[list[int]], **fields: Any) -> Topology:
    return Topology(rank=rank, hosts=hosts, names=list("abc")[: len(hosts)], device=torch.device("cpu"), **fields)


def test_a_part_keeps_its_hosts_and_ranks_that_a_launcher_deals_in_turn_their_order() -> None:
    part = topology_of(1, [[0, 1], [2], [3, 4]]).of([1, 3, 4])
    assert (part.hosts, part.names, part.host_names) == ([[1], [3, 4]], ["a", "c"], ["a", "c", "c"])
    in_turn = topology_of(2, [[0, 2], [1, 3]])  # as `mpirun --map-by node` does
    assert (in_turn.members, in_turn.host_names) == ([0, 1, 2, 3], ["a", "b", "a", "b"])
    part = in_turn.of([1, 2])
    assert (part.members, part.hosts, part.host_names) == ([1, 2], [[2], [1]], ["b", "a"])
    refused("in that order", in_turn.of, [2, 1])
    members = [([0, 2], ""), ([1, 0], ""), ([1, 1], ""), ([1, 7], ""), ([], "made by worker 1 must list this worker")]
    all_refused(topology_of(1, [[0, 1], [2]]).of, members)


def test_groups_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)

    def meet(name: str, ranks: Sequence[int], value: Any) -> list[Any]:
        return [value]

    part = topology_of(0, [[0], [1]], over_torch=True)  # of what torch links
    refused("must have all workers of the run", make_group, part, meet, kind=Unsupported)
    refused("needs a network between them", make_group, topology_of(0, [[0], [1]]), meet)
    words = r"worker 0 waited for the workers \[0, 1\] to set up 'tea'"
    refused(words, meet_at(HashStore(), 0, 0.1), "tea", [0, 1], None, kind=ManyhandsError)
