"""Shared memory swapped between ranks that inherit nothing; here the ranks are threads, each with descriptors of its own."""

import gc
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import forked, values

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.engines.shared_memory import _SOCKET, host_identity, swap_memory
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.threads import together
from manyhands.worker import Worker


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, whose path is longer than a socket's address may be; none is left in it."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def share(group: Group, timeout_s: float = 20.0) -> SharedMemoryGroup:
    memory, lifelines = swap_memory(group.rank, group.size, group.all_gather_json, timeout_s)
    return SharedMemoryGroup(group.rank, group.size, memory, lifelines=lifelines, timeout_s=timeout_s)


def shares(worker: Worker) -> list[float]:
    """A message from each rank to each other. One thread at a time: a process has one group, as a rule."""
    group, heard = share(worker.group), []
    for source in range(group.size):
        for target in range(group.size):
            tensor = torch.tensor([10.0 * source + target])
            if source != target and group.rank == source:
                group.send(tensor, target)
            worker.group.barrier()
            if source != target and group.rank == target:
                group.receive_(tensor.zero_(), source)
                heard.append(tensor.item())
            worker.group.barrier()
    group.close()
    return [group.rank, group.size, *heard]


def one_ends(worker: Worker) -> int:
    """Its lifeline is held by nobody else, rank 0 included, which made all of them."""
    group = share(worker.group)
    worker.group.barrier()
    if worker.rank == 1:
        group.close()
        return -1
    with pytest.raises(PeerLost) as lost:
        group.barrier()
    group.close()
    return lost.value.rank


def one_does_not_come(worker: Worker) -> int:
    """The other's folder is for this user alone."""
    if worker.rank == 1:
        return os.stat(worker.group.all_gather_json(None)[0]).st_mode & 0o777
    with pytest.raises(ManyhandsError, match="did not connect to the shared memory in time"):
        share(worker.group, timeout_s=0.2)
    return 0


def one_comes_late(worker: Worker) -> int:
    """The time for it begins when all have met: whoever comes late to the meeting is waited for there."""

    def exchange(value: Any) -> list[Any]:
        if worker.rank == 1:
            threading.Event().wait(0.5)  # nobody sets it
        return worker.group.all_gather_json(value)

    memory, lifelines = swap_memory(worker.rank, 2, exchange, 0.4)
    group = SharedMemoryGroup(worker.rank, 2, memory, lifelines=lifelines)
    worker.group.barrier()
    group.close()
    return group.size


def one_leaves_early(worker: Worker) -> None:
    if worker.rank == 0:
        with pytest.raises(ManyhandsError, match="ended while it connected to the shared memory"):
            share(worker.group)
        return
    folder = os.open(worker.group.all_gather_json(None)[0], os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"/proc/self/fd/{folder}/{_SOCKET}")
    os.close(folder)


def the_first_leaves_early(worker: Worker) -> None:
    if worker.rank == 0:
        worker.group.all_gather_json(tempfile.gettempdir())  # where nobody listens
        return
    with pytest.raises(ManyhandsError, match="ended while it connected to the shared memory"):
        share(worker.group)


PROGRAMS: list[tuple[Any, int, list[Any]]] = [
    (shares, 3, [[0, 3, 10, 20], [1, 3, 1, 21], [2, 3, 2, 12]]),
    (one_ends, 2, [1, -1]),
    (one_does_not_come, 2, [0, 0o700]),
    (one_comes_late, 2, [2, 2]),
    (one_leaves_early, 2, [None, None]),
    (the_first_leaves_early, 2, [None, None]),
]


@pytest.mark.parametrize(("program", "size", "expected"), PROGRAMS, ids=[one[0].__name__ for one in PROGRAMS])
def test_what_ranks_get_and_that_no_descriptor_is_left(program: Any, size: int, expected: list[Any]) -> None:
    """In a process of their own, where nobody else opens any."""

    def run(_: int) -> tuple[list[Any], list[str]]:
        before = set(os.listdir("/proc/self/fd"))
        found = together(size, program)
        gc.collect()
        return found, sorted(set(os.listdir("/proc/self/fd")) - before)

    assert values(forked(1, run, 60)) == [(expected, [])]


def test_processes_of_one_host_have_one_identity() -> None:
    assert host_identity() == host_identity()
    assert socket.gethostname() in host_identity()
