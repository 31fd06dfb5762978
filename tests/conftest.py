"""Shared by all tests: one warm fork server, so that starting workers costs milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.engines.local import Local


@pytest.fixture(scope="session")
def local() -> Iterator[Local]:
    """Engine `local`, warm for the whole session."""
    with Local() as engine:
        yield engine
