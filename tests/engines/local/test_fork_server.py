"""Descriptors and children of the fork server; how a worker's process ends, and what it is given, without a process."""

import os
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.engines.hosts.network import Network
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local import child
from manyhands.engines.local.fork_server import ForkServerRun
from manyhands.errors import ManyhandsError


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


@pytest.mark.parametrize("process_index", [0, -1, -2])
def test_a_process_keeps_its_own_channels_alone(run: ForkServerRun, process_index: int) -> None:
    ends = {key: dict(zip(("worker", "shard"), pair, strict=True)) for key, pair in run.channels.items()}
    kept = run.keep(process_index)
    assert list(kept) == [0, 1]  # with all shards, or with all workers
    for other, fd in kept.items():
        rank, shard = (process_index, other) if process_index >= 0 else (other, -1 - process_index)
        assert fd == ends[rank, shard]["worker" if process_index >= 0 else "shard"]
    assert {fd for pair in ends.values() for fd in pair.values() if is_open(fd)} == set(kept.values())
    for fd in kept.values():
        os.close(fd)
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


def test_a_worker_keeps_what_the_workers_share_until_the_close(run: ForkServerRun) -> None:
    fds = all_of(run)
    assert len(fds) == 3 + (1 + 2) + 2 * 2 + 2 * 4
    shared = [*run.fds, *run.memory, *(end for pipe in run.lifelines for end in pipe)]
    for fd in run.keep(0).values():
        os.close(fd)
    assert all(map(is_open, shared))
    run.close()
    assert not any(map(is_open, fds))
    alone = ForkServerRun({"size": 3, "process_indices": [2]}, [])  # on its host
    alone.connect()
    assert all_of(alone) == []


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


class Log:
    """Stands for everything that a worker's process uses, and keeps what happens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, program: Any) -> None:
        self.log: list[Any] = []
        self.process_index = 1
        server, group = (SimpleNamespace(close=lambda name=name: self._close(name)) for name in ("server", "group"))
        worker = SimpleNamespace(rank=1, server=server, group=group)
        for name, value in {
            "open_driver_client": lambda place: self,
            "become_the_callers": lambda place: None,
            "prepare_process": lambda stacks, threads: None,
            "_worker": lambda place, line: worker,
            "deserialize": lambda fd, mapped: program,
            "serialize": lambda value, what: -1,
        }.items():
            monkeypatch.setattr(child, name, value)
        monkeypatch.setattr(child.atexit, "_run_exitfuncs", lambda: self.log.append("exit functions"))
        self.broken = ""

    def _close(self, name: str) -> None:
        self.log.append(f"{name} closed")
        if name == self.broken:
            raise ManyhandsError(f"the {name} is broken")

    def where(self) -> tuple[str, int]:
        return "compute", 3

    def last(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self.log.append(message["type"] if message["type"] == "value" else message["error"])

    def run(self) -> int:
        place = SimpleNamespace(process_index=1, program=os.open(os.devnull, os.O_RDONLY), stacks=-1, threads=1)
        return child.run(place)  # type: ignore[arg-type]


def test_who_leaves_says_goodbye_to_its_server_and_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is told before the peers hear that this worker leaves; and a goodbye that fails is one."""
    log = Log(monkeypatch, lambda worker: "value")
    assert log.run() == 0
    assert log.log == ["server closed", "exit functions", "group closed", "value"]
    log = Log(monkeypatch, lambda worker: 1 / 0)
    log.broken = "group"
    assert log.run() == 1
    assert log.log == ["ZeroDivisionError", "group closed"]
    log = Log(monkeypatch, lambda worker: "value")
    log.broken = "group"
    assert log.run() == 1
    assert log.log == ["server closed", "exit functions", "group closed", "ManyhandsError", "group closed"]


@pytest.mark.parametrize("far", [False, True])
def test_the_server_names_every_workers_own_host(monkeypatch: pytest.MonkeyPatch, far: bool) -> None:
    given: list[Any] = []
    monkeypatch.setattr(child, "ServedServer", lambda spec, channels, hosts: given.extend([*channels, hosts]))
    monkeypatch.setattr(socket, "gethostname", lambda: "alpha")
    here, there = socket.socketpair()
    names, secret = ["alpha", "beta"], Secret(token=b"t" * 32)
    network = Network(hosts=[[0], [1, 2]], names=names, listen="127.0.0.1", secret=secret).to_json()
    fields = {"size": 3, "server": {"rule": "add"}, "servers": 1, "survive": 0, "timeout_s": 9.0}
    place: Any = SimpleNamespace(**fields, channels={0: here.detach()}, network=network if far else None)
    child._server(place, None)  # type: ignore[arg-type]
    assert given[1] == (["alpha", "beta", "beta"] if far else ["alpha"] * 3)
    given[0].close()
    there.close()


def test_each_worker_has_a_gpu_in_turn() -> None:
    found = [[child.visible_gpu(visible, gpus, i) for i in range(5)] for visible, gpus in ((None, 4), ("2, GPU-5a", 2))]
    assert found == [["0", "1", "2", "3", "0"], ["2", "GPU-5a", "2", "GPU-5a", "2"]]
