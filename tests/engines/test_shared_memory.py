"""Shared memory swapped between ranks that inherit nothing; here the ranks are threads, each with descriptors of its own."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.engines.shared_memory import _SOCKET, host_identity, swap_memory
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.threads import together
from manyhands.worker import Worker
from open_files import open_files


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No file in the folder for temporary ones, whose path is longer than a socket's address may be, and no descriptor."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = open_files()
    yield folder
    assert list(folder.iterdir()) == []
    assert open_files() <= before


def share(group: Group, timeout_s: float = 20.0) -> SharedMemoryGroup:
    memory, lifelines = swap_memory(group.rank, group.size, group.all_gather_json, timeout_s)
    return SharedMemoryGroup(group.rank, group.size, memory, lifelines=lifelines, timeout_s=timeout_s)


def test_all_ranks_share_memory() -> None:
    """A message from each rank to each other. One thread at a time: a process has one group, as a rule."""

    def program(worker: Worker) -> list[float]:
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

    assert together(3, program) == [[0, 3, 10, 20], [1, 3, 1, 21], [2, 3, 2, 12]]


def test_the_end_of_a_rank_is_noticed() -> None:
    """Its lifeline is held by nobody else, rank 0 included, which made all of them."""

    def program(worker: Worker) -> int:
        group = share(worker.group)
        worker.group.barrier()
        if worker.rank == 1:
            group.close()
            return -1
        with pytest.raises(PeerLost) as lost:
            group.barrier()
        group.close()
        return lost.value.rank

    assert together(2, program) == [1, -1]


def test_a_rank_that_does_not_come_is_not_waited_for_longer() -> None:
    def program(worker: Worker) -> None:
        if worker.rank == 1:
            worker.group.all_gather_json(None)
            return
        with pytest.raises(ManyhandsError, match="did not connect to the shared memory in time"):
            share(worker.group, timeout_s=0.1)

    together(2, program)


def test_the_time_for_it_begins_when_all_have_met() -> None:
    """Whoever comes late to the meeting is waited for there."""

    def program(worker: Worker) -> int:
        met = threading.Event()

        def exchange(value: Any) -> list[Any]:
            if worker.rank == 1:
                met.wait(0.5)  # nobody sets it
            return worker.group.all_gather_json(value)

        memory, lifelines = swap_memory(worker.rank, 2, exchange, 0.4)
        group = SharedMemoryGroup(worker.rank, 2, memory, lifelines=lifelines)
        worker.group.barrier()
        group.close()
        return group.size

    assert together(2, program) == [2, 2]


def test_a_rank_that_leaves_early_is_named_as_the_reason() -> None:
    def program(worker: Worker) -> None:
        if worker.rank == 0:
            with pytest.raises(ManyhandsError, match="ended while it connected to the shared memory"):
                share(worker.group)
            return
        folder = os.open(worker.group.all_gather_json(None)[0], os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(f"/proc/self/fd/{folder}/{_SOCKET}")
        os.close(folder)

    together(2, program)


def test_a_first_rank_that_left_early_is_named_as_the_reason(nothing_is_left: Path) -> None:
    def program(worker: Worker) -> None:
        if worker.rank == 0:
            worker.group.all_gather_json(str(nothing_is_left))  # where nobody listens
            return
        with pytest.raises(ManyhandsError, match="ended while it connected to the shared memory"):
            share(worker.group)

    together(2, program)


def test_only_this_user_may_enter_the_folder() -> None:
    def program(worker: Worker) -> int:
        if worker.rank == 1:
            (folder, _) = worker.group.all_gather_json(None)
            return os.stat(folder).st_mode & 0o777
        with pytest.raises(ManyhandsError):
            share(worker.group, timeout_s=0.2)
        return 0

    assert together(2, program)[1] == 0o700


def test_processes_of_one_host_have_one_identity() -> None:
    assert host_identity() == host_identity()
    assert socket.gethostname() in host_identity()
