from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sessions import CLUSTER, spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two executors; whoever kills one makes a cluster of their own."""
    pytest.importorskip("pyspark")
    with spark_session(CLUSTER, tmp_path_factory.mktemp("spark")) as session:
        yield session
