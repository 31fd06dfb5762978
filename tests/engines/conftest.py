from collections.abc import Callable, Iterator
from typing import Any

import pytest
from host_process import HostProcess


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
