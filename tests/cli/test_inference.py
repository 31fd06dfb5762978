"""`manyhands predict` and `manyhands evaluate`: what they write, print and end with."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command_line import invoke, refused

import manyhands as mh
import plain

GIVEN = ("--task", "my_rows.py:task")
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of my_rows.py:task in run, and its rows in rows.npy and table.parquet."""
    folder = tmp_path_factory.mktemp("inference")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "my_rows.py").write_text(TASK)
        mh.train(GIVEN[1], run_dir=folder / "run")
        x = plain.rows(60)[0].numpy()
        np.save("rows.npy", x)
        features = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 5)
        pq.write_table(pa.table({"id": [f"row {i}" for i in range(60)], "features": features}), "table.parquet")
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_a_file_of_outputs_and_metrics_of_the_tasks_own_rows(tmp_path: Path) -> None:
    out = str(tmp_path / "out.parquet")
    done = invoke("predict", "run", "rows.npy", "-o", out, *GIVEN, "-n", "2", "--batch-size", "8")
    assert done.exit_code == 0, done.output
    assert "out.parquet: 60 rows in" in done.stdout
    assert "by worker" in done.stdout
    wanted = mh.predict("run", plain.rows(60)[0], task=GIVEN[1], batch_size=8)
    found = pq.read_table(out)["prediction"].to_pylist()
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-12)
    done = invoke("evaluate", "run", *GIVEN, "-n", "2")
    assert done.exit_code == 0, done.output
    lines = dict(line.split() for line in done.stdout.splitlines())
    saved = json.loads(Path("run/result.json").read_text())["metrics"]
    assert set(lines) == {"loss", "accuracy"}
    assert float(lines["loss"]) == pytest.approx(saved["test_loss"], rel=1e-3)
    as_json = invoke("evaluate", "run", *GIVEN, "--json")
    assert json.loads(as_json.stdout)["loss"] == pytest.approx(saved["test_loss"], rel=1e-9)


def test_columns_of_a_table_rows_of_a_file_of_python_and_other_metrics(tmp_path: Path) -> None:
    words = ["--function", "my_rows.py:outputs", "--keep", "id"]
    done = invoke("predict", "run", "table.parquet", "-o", str(tmp_path / "out.arrow"), *GIVEN, *words)
    assert done.exit_code == 0, done.output
    with pa.ipc.open_file(tmp_path / "out.arrow") as file:
        found = file.read_all()
    assert found.column_names == ["id", "class"]
    assert found["id"].to_pylist() == [f"row {i}" for i in range(60)]
    done = invoke("predict", "run", "my_rows.py:rows", "-o", str(tmp_path / "out.parquet"), *GIVEN)
    assert done.exit_code == 0, done.output
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 60
    np.savez("pairs.npz", x=np.zeros(3), y=np.zeros(3))
    done = invoke("evaluate", "run", *GIVEN, "--metrics", "my_rows.py:metrics", "--json")
    assert list(json.loads(done.stdout)) == ["mean"]
    refused("the data has columns x, y", "evaluate", "run", "pairs.npz", *GIVEN)


def test_bad_input_ends_with_2_and_a_message_and_a_function_that_raises_with_1() -> None:
    rows = ("predict", "run", "rows.npy", "-o", "out.parquet")
    for words, says in (
        (rows, "code that a run directory names is not imported"),
        (("predict", "none", "rows.npy", "-o", "out.parquet"), "none does not exist"),
        (("predict", "run", "rows.npy", "-o", "out.csv", *GIVEN), "must end in .parquet or .arrow"),
        ((*rows, *GIVEN, "--function", "outputs"), "a function is named by its file"),
        ((*rows, *GIVEN, "--function", "my_rows.py:none"), "my_rows.py has no 'none'"),
        ((*rows, *GIVEN, "--engine", "none"), "no engine 'none'"),
        (("predict", "run", "table.parquet", "-o", "out.parquet", *GIVEN), "function="),
    ):
        refused(says, *words)
    done = invoke(*rows, *GIVEN, "--function", "my_rows.py:fails")
    assert done.exit_code == 1
    assert "KeyError: 'of the user'" in done.output
    assert not [path for path in os.listdir() if path.startswith("out") or path.endswith(".partial")]
