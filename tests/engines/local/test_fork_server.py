from __future__ import annotations

import os
import socket

import pytest

from manyhands.engines.local.fork_server import ForkServerRun


@pytest.fixture
def run() -> ForkServerRun:
    """Two workers and two shards of one host, and a third worker elsewhere."""
    run = ForkServerRun(
        {"size": 3, "process_indices": [0, 1, -1, -2]}, [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    )
    run.connect()
    return run


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def all_of(run: ForkServerRun) -> list[int]:
    pairs = [*run.lifelines, *run.channels.values()]
    return [*run.fds, *run.memory, *(end for pair in pairs for end in pair)]


@pytest.mark.parametrize(("process_index", "others"), [(0, [0, 1]), (1, [0, 1]), (-1, [0, 1]), (-2, [0, 1])])
def test_a_process_keeps_its_own_channels_alone(run: ForkServerRun, process_index: int, others: list[int]) -> None:
    ends = {
        rank_and_shard: dict(zip(("worker", "shard"), pair, strict=True))
        for rank_and_shard, pair in run.channels.items()
    }
    kept = run.keep(process_index)
    assert list(kept) == others
    for other, fd in kept.items():
        rank, shard = (process_index, other) if process_index >= 0 else (other, -1 - process_index)
        assert fd == ends[rank, shard]["worker" if process_index >= 0 else "shard"]
    assert {fd for pair in ends.values() for fd in pair.values() if is_open(fd)} == set(kept.values())
    for fd in kept.values():
        os.close(fd)
    run.close()


def test_a_channel_joins_a_worker_and_a_shard_and_ends_with_either(run: ForkServerRun) -> None:
    worker, shard = run.channels[1, 0]
    for key, pair in run.channels.items():
        for fd in pair if key != (1, 0) else ():
            os.close(fd)
    with socket.socket(fileno=worker) as there, socket.socket(fileno=shard) as here:
        there.send(b"push")
        assert here.recv(10) == b"push"
        here.close()
        assert there.recv(10) == b""
    run.channels = {}
    run.close()


def test_a_shard_has_neither_the_program_nor_what_the_workers_share(run: ForkServerRun) -> None:
    """With a worker's lifeline in another process, its death would not be seen."""
    program, *streams = run.fds
    shared = [program, *run.memory, *(end for pipe in run.lifelines for end in pipe)]
    for fd in run.keep(-1).values():
        os.close(fd)
    assert not any(map(is_open, shared))
    assert run.fds == streams
    assert all(map(is_open, streams))
    run.close()


def test_a_worker_keeps_what_the_workers_share(run: ForkServerRun) -> None:
    shared = [*run.fds, *run.memory, *(end for pipe in run.lifelines for end in pipe)]
    for fd in run.keep(0).values():
        os.close(fd)
    assert all(map(is_open, shared))
    run.close()


def test_nothing_is_left_after_close(run: ForkServerRun) -> None:
    fds = all_of(run)
    assert len(fds) == 3 + 2 + 2 * 2 + 2 * 4
    run.close()
    assert not any(map(is_open, fds))


def test_a_worker_that_is_alone_on_its_host_shares_nothing() -> None:
    run = ForkServerRun({"size": 3, "process_indices": [2]}, [])
    run.connect()
    assert all_of(run) == []
