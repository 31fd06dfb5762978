import os
from collections.abc import Iterator
from typing import Any

import pytest
from sessions import CLUSTER, need_spark, spark_session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a session waits for its cluster, too."""
    for item in items:
        if item.path.parent.name == "spark_":
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two executors."""
    need_spark()
    with spark_session(CLUSTER, tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture(scope="session")
def keras() -> Any:
    """On torch; imported for the tests that need it."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")
