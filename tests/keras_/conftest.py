from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import manyhands as mh

os.environ.setdefault("KERAS_BACKEND", "torch")


@pytest.fixture(scope="session")
def local() -> Iterator[mh.Local]:
    """One warm fork server for all launches."""
    with mh.Local() as engine:
        yield engine
