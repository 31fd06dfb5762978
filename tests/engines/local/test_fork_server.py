from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

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
    assert len(fds) == 3 + (1 + 2) + 2 * 2 + 2 * 4
    run.close()
    assert not any(map(is_open, fds))


def test_a_worker_that_is_alone_on_its_host_shares_nothing() -> None:
    run = ForkServerRun({"size": 3, "process_indices": [2]}, [])
    run.connect()
    assert all_of(run) == []


# A zombie whose other threads live, as a killed worker is for a moment: its children are adopted when the last thread ends
LEADERLESS = """
    import ctypes, os, subprocess, threading, time
    from pathlib import Path
    from manyhands.engines.local import fork_server

    def state(pid):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    ctypes.CDLL(None).prctl(fork_server._PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(subprocess.Popen(["sleep", "60"], start_new_session=True).pid).encode())
        threading.Thread(target=time.sleep, args=(60,)).start()
        ctypes.CDLL(None).pthread_exit(None)
    left = int(os.read(reading, 20))
    while state(child) != "Z":
        time.sleep(0.01)
    print(sorted(os.listdir(f"/proc/{child}/task")) != [str(child)], fork_server.kill_children())
    os.waitpid(child, 0)
    print(fork_server.kill_children(), os.waitpid(-1, 0)[0] == left, fork_server.kill_children())
"""


def test_what_a_zombie_with_living_threads_left_is_found_and_killed() -> None:
    command = [sys.executable, "-c", textwrap.dedent(LEADERLESS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert run.stdout.split() == ["True", "True", "True", "True", "False"]
