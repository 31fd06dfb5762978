"""One warm engine for all comparisons, as compare() itself keeps one."""

from collections.abc import Iterator

import pytest

from manyhands.engines.local.engine import Local


@pytest.fixture(scope="session")
def apart() -> Iterator[Local]:
    """Engine `local`, warm, whose single workers have a process of their own."""
    with Local(apart=True) as engine:
        yield engine
