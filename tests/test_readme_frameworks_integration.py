"""The blocks of the docs that are another library's programs, with the real library: where it is installed; slow.

What the blocks take for granted (a session, DataFrames, a model) is given to them here. A TensorFlow for these tests, beside the
environment of the others: `python -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu jax -e '.[spark,tensorboard]' pytest pytest-timeout`.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sessions import need_spark, spark_session

import manyhands as mh
from manyhands.engines.local.engine import Local
from pages import FRAMEWORKS, PAGES, Snippet, snippets

MODELS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, features: int = 6) -> None:
        super().__init__(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 2))
"""

marked = [part for page in PAGES for part in snippets(page) if part.libraries]


def of_page(name: str, *libraries: str) -> list[Snippet]:
    """Its blocks that run with these, none left out."""
    parts = [part for part in marked if part.page.name == name and part.libraries == list(libraries)]
    assert parts, f"{name} has no block that is run with {libraries}"
    return parts


def follow(part: Snippet, namespace: dict[str, Any]) -> None:
    padded = "\n" * (part.line - 1) + part.text  # a traceback then points into the page
    exec(compile(padded, str(part.page), "exec", dont_inherit=True), namespace)


def need(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the blocks write, and from where executors import."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return tmp_path


@pytest.fixture
def session(folder: Path) -> Iterator[Callable[[int], Any]]:
    """`session(n)`: Spark with so many cores, in this process."""
    need_spark()
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:  # of the tests in spark_, which come first
        active.stop()
    opened: list[Any] = []

    def start(cores: int) -> Any:
        context = spark_session(f"local[{cores}]", folder / "spark")
        opened.append(context)
        return context.__enter__()

    yield start
    for context in opened:
        context.__exit__(None, None, None)


def test_every_marked_block_is_run_here() -> None:
    known = {("clusters.md", "tensorflow"), ("clusters.md", "jax"), ("clusters.md", "spark, tensorflow")}
    known |= {("spark.md", "spark"), ("migrate.md", "spark")}
    assert {(part.page.name, part.how.removeprefix(FRAMEWORKS)) for part in marked} == known


@pytest.mark.timeout(1200)
@pytest.mark.nightly
@pytest.mark.parametrize("library", ["tensorflow", "jax"])
def test_another_frameworks_cluster(library: str, local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    need(library)
    monkeypatch.setattr(mh, "Local", lambda: local)
    for part in of_page("clusters.md", library):
        follow(part, {"__name__": "__main__", "mh": mh})


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_tensorflow_fed_from_spark(session: Callable[[int], Any]) -> None:
    need("tensorflow")
    spark = session(4)
    df = spark.createDataFrame([(i / 1000, -i / 1000, float(i % 2)) for i in range(1000)], ["a", "b", "y"])
    for part in of_page("clusters.md", "spark", "tensorflow"):
        follow(part, {"__name__": "__main__", "mh": mh, "df": df})


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_on_spark(session: Callable[[int], Any]) -> None:
    from pyspark.ml.linalg import Vectors

    spark = session(8)
    rows = [(i, 20.0 + i % 50, float(i), Vectors.dense([i % 3, 1, 0, i % 5]), i % 2) for i in range(200)]
    df = spark.createDataFrame(rows, ["id", "age", "income", "vector", "churned"])
    namespace = {"__name__": "__main__", "df": df, "new": df.limit(10)}
    for part in of_page("spark.md", "spark"):
        follow(part, namespace)


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_programs_of_older_systems(session: Callable[[int], Any]) -> None:
    """Whose names the blocks use: the compiled Keras model, a PyTorch class, a function of a program, and one of TensorFlowOnSpark's kind."""
    import keras
    import numpy as np
    from pyspark.ml.linalg import Vectors

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    from my_models import Net  # type: ignore[import-not-found]

    def train(*arguments: Any) -> float:
        return float(arguments[-1])

    def main(cluster: Any, args: str) -> str:
        return f"{cluster.role} {args}"

    spark = session(20)
    numbers = np.random.default_rng(0).random((200, 6))
    df = spark.createDataFrame([(Vectors.dense(row), int(row[0] > 0.5)) for row in numbers], ["features", "label"])
    given = {"mh": mh, "model": model, "Net": Net, "df": df, "train": train, "main": main, "args": "--epochs 3"}
    for part in of_page("migrate.md", "spark"):
        follow(part, {"__name__": "__main__", **given})
