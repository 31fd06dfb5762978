"""How a worker's process ends, and what it is given, without a process."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.engines.hosts.network import Network
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local import child
from manyhands.engines.local.messages import ProcessPlace
from manyhands.errors import ManyhandsError


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


def test_who_returns_says_goodbye_to_its_server_and_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, lambda worker: "value")
    assert log.run() == 0
    assert log.log == ["server closed", "exit functions", "group closed", "value"]


def test_an_error_is_told_before_the_peers_hear_that_this_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, lambda worker: 1 / 0)
    log.broken = "group"
    assert log.run() == 1
    assert log.log == ["ZeroDivisionError", "group closed"]


def test_a_goodbye_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
    network = Network(
        hosts=[[0], [1, 2]], names=["alpha", "beta"], listen="127.0.0.1", secret=Secret(token=b"t" * 32)
    ).to_json()
    place: Any = SimpleNamespace(
        size=3,
        server={"rule": "add"},
        servers=1,
        survive=0,
        channels={0: here.detach()},
        timeout_s=9.0,
        network=network if far else None,
    )
    checked: ProcessPlace = place
    child._server(checked, None)  # type: ignore[arg-type]
    assert given[1] == (["alpha", "beta", "beta"] if far else ["alpha"] * 3)
    given[0].close()
    there.close()


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [(None, 4, ["0", "1", "2", "3", "0"]), ("2, GPU-5a", 2, ["2", "GPU-5a", "2", "GPU-5a", "2"])],
)
def test_each_worker_has_a_gpu_in_turn(visible: str | None, gpus: int, expected: list[str]) -> None:
    assert [child.visible_gpu(visible, gpus, local_rank) for local_rank in range(5)] == expected
