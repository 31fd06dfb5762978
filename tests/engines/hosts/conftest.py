"""What tests of several hosts on one machine need: credentials of their own, and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_servers
from driver_script import wait_until
from host_process import HostProcess


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not warm_servers.still_busy(), 10)


@pytest.fixture(scope="session", autouse=True)
def servers_end() -> Iterator[None]:
    yield
    warm_servers.close()


@pytest.fixture
def process() -> Iterator[Callable[..., HostProcess]]:
    """Start a `HostProcess`; afterwards nothing of it may live."""
    started: list[HostProcess] = []

    def start(*arguments: Any) -> HostProcess:
        started.append(HostProcess(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.signal(9)
        one.process.join(10)
        one.process.close()
