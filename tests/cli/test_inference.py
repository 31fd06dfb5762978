"""`manyhands predict` and `manyhands evaluate`: what they write, print and end with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_commands import command, invoke

import manyhands as mh
import plain

TASK = """
import numpy as np
import manyhands as mh
import plain

x, y = plain.rows(60)
task = mh.Task.supervised(
    model=plain.mlp, optimizer=plain.OPTIMIZERS["sgd"], train_data=(x, y), test_data=(x, y), batch_size=8, epochs=1
)
rows = x


def outputs(model, batch):
    return {"class": model(batch["features"]).argmax(1)}


def metrics(model, batch):
    return {"mean": model(batch[0]).mean()}


def fails(model, batch):
    raise KeyError("of the user")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a run of my_rows.py:task in run, and its rows in rows.npy and table.parquet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rows.py").write_text(TASK)
    mh.train("my_rows.py:task", run_dir=tmp_path / "run")
    x = plain.rows(60)[0].numpy()
    np.save("rows.npy", x)
    features = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 5)
    pq.write_table(pa.table({"id": [f"row {i}" for i in range(60)], "features": features}), "table.parquet")
    return tmp_path


@pytest.mark.usefixtures("folder", "warm")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_file_of_outputs(workers: str) -> None:
    arguments = ["predict", "run", "rows.npy", "-o", "out.parquet", "--task", "my_rows.py:task", "-n", workers]
    done = invoke(*arguments, "--batch-size", "8")
    assert done.exit_code == 0, done.output
    assert "out.parquet: 60 rows in" in done.stdout
    assert ("by worker" in done.stdout) == (workers == "2")
    wanted = mh.predict("run", plain.rows(60)[0], task="my_rows.py:task", batch_size=8)
    found = pq.read_table("out.parquet")["prediction"].to_pylist()
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-12)


@pytest.mark.usefixtures("folder")
def test_columns_of_a_table_go_along() -> None:
    done = invoke(
        *("predict", "run", "table.parquet", "-o", "out.arrow", "--task", "my_rows.py:task"),
        *("--function", "my_rows.py:outputs", "--keep", "id"),
    )
    assert done.exit_code == 0, done.output
    with pa.ipc.open_file("out.arrow") as file:
        found = file.read_all()
    assert found.column_names == ["id", "class"]
    assert found["id"].to_pylist() == [f"row {i}" for i in range(60)]


@pytest.mark.usefixtures("folder")
def test_rows_that_a_file_of_python_names() -> None:
    done = invoke("predict", "run", "my_rows.py:rows", "-o", "out.parquet", "--task", "my_rows.py:task")
    assert done.exit_code == 0, done.output
    assert pq.read_table("out.parquet").num_rows == 60


@pytest.mark.usefixtures("folder", "warm")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_metrics_of_the_tasks_own_rows(workers: str) -> None:
    done = invoke("evaluate", "run", "--task", "my_rows.py:task", "-n", workers)
    assert done.exit_code == 0, done.output
    lines = dict(line.split() for line in done.stdout.splitlines())
    saved = json.loads(Path("run/result.json").read_text())["metrics"]
    assert set(lines) == {"loss", "accuracy"}
    assert float(lines["loss"]) == pytest.approx(saved["test_loss"], rel=1e-3)
    as_json = invoke("evaluate", "run", "--task", "my_rows.py:task", "--json")
    assert json.loads(as_json.stdout)["loss"] == pytest.approx(saved["test_loss"], rel=1e-9)


@pytest.mark.usefixtures("folder")
def test_other_metrics_on_other_rows() -> None:
    np.savez("pairs.npz", x=np.zeros(3), y=np.zeros(3))
    done = invoke("evaluate", "run", "--task", "my_rows.py:task", "--metrics", "my_rows.py:metrics", "--json")
    assert list(json.loads(done.stdout)) == ["mean"]
    done = invoke("evaluate", "run", "pairs.npz", "--task", "my_rows.py:task")
    assert done.exit_code == 2
    assert "the data has columns x, y" in done.output


@pytest.mark.usefixtures("folder")
def test_bad_input_ends_with_2_and_a_message() -> None:
    given = ("predict", "run", "rows.npy", "-o", "out.parquet")
    for arguments, words in (
        (given, "code that a run directory names is not imported"),
        (("predict", "none", "rows.npy", "-o", "out.parquet"), "none does not exist"),
        (
            ("predict", "run", "rows.npy", "-o", "out.csv", "--task", "my_rows.py:task"),
            "must end in .parquet or .arrow",
        ),
        ((*given, "--task", "my_rows.py:task", "--function", "outputs"), "a function is named by its file"),
        ((*given, "--task", "my_rows.py:task", "--function", "my_rows.py:none"), "my_rows.py has no 'none'"),
        ((*given, "--task", "my_rows.py:task", "--engine", "none"), "no engine 'none'"),
        (("predict", "run", "table.parquet", "-o", "out.parquet", "--task", "my_rows.py:task"), "function="),
    ):
        done = invoke(*arguments)
        assert (done.exit_code, words in done.output) == (2, True), done.output
    assert not Path("out.parquet").exists()


@pytest.mark.usefixtures("folder")
def test_a_function_that_raises_ends_with_1() -> None:
    done = invoke(
        "predict", "run", "rows.npy", "-o", "out.parquet", "--task", "my_rows.py:task", "--function", "my_rows.py:fails"
    )
    assert done.exit_code == 1
    assert "KeyError: 'of the user'" in done.output
    assert not [path for path in os.listdir() if path.endswith((".parquet", ".partial")) and path != "table.parquet"]


def test_help_teaches_by_example_and_does_not_import_torch() -> None:
    for name in ("predict", "evaluate"):
        done = command(name, "--help")
        assert done.returncode == 0
        assert f"manyhands {name} runs/mine" in done.stdout
        assert "75 asked to end" in done.stdout
