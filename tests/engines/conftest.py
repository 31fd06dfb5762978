from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_script import Script

from manyhands.engines.local.engine import Local


@pytest.fixture(scope="session")
def local() -> Iterator[Local]:
    """One warm fork server for all tests that do not kill it."""
    with Local() as engine:
        yield engine


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start a driver script; afterwards nothing of it may live."""
    started: list[Script] = []

    def start(text: str, *arguments: str, stdin: str | None = None) -> Script:
        started.append(Script(tmp_path, text, *arguments, stdin=stdin))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate(timeout=10)
        for pid in one.processes():
            os.kill(pid, 9)
