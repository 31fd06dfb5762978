from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from host_process import HostProcess


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of hosts and of a launcher's ranks share fork servers, and the process from which theirs are forked."""
    for item in items:
        if item.path.parent.name in ("hosts", "torchrun"):
            item.add_marker(pytest.mark.xdist_group("hosts"))


@pytest.fixture
def process() -> Iterator[Callable[..., HostProcess]]:
    """Start a `HostProcess`; afterwards nothing of it lives."""
    started: list[HostProcess] = []

    def start(*arguments: Any, **options: Any) -> HostProcess:
        started.append(HostProcess(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()
