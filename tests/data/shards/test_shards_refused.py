"""What cannot be trained on is refused before a step is made, with exit code 2 and a message of what came and what to do."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

import manyhands as mh
from manyhands.data.open_source import open_source
from manyhands.errors import BadInput
from refusals import refused as refuses

COLUMNS = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)


def write(folder: Path, names: str, **types: str) -> None:
    """Files of 20 rows with these columns each, `ab aby`, of float32 unless `types` says otherwise."""
    folder.mkdir(exist_ok=True)
    for i, columns in enumerate(names.split()):
        rows = {name: COLUMNS["aby".index(name)] for name in columns}
        if i:  # the first file is as it should be
            rows = {name: column.astype(types.get(name, "float32")) for name, column in rows.items()}
        pq.write_table(pa.table(rows), folder / f"{i}.parquet", row_group_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "rows", "aby aby")
    return tmp_path / "rows"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs = torch.stack([batch["a"], batch["b"]], 1)
    return (model(inputs)[:, 0] - batch["y"]).square().mean()


def task(data: Any, **fields: Any) -> mh.Task:
    given = {"model": lambda: nn.Linear(2, 1), "loss": loss, "optimizer": sgd, "train_data": data, "batch_size": 4}
    return mh.Task(**(given | fields))


def refused(given: mh.Task, *parts: str) -> None:
    """Train, which must raise an error that has all these parts."""
    error = refuses("", lambda: mh.train(given, workers=1))
    assert error.exit_code == 2
    assert [part for part in parts if part not in str(error)] == [], error


@pytest.mark.parametrize(
    "names", [("train/0", "test/0"), ("data/train-00000-of-00001", "data/validation-00000-of-00001")]
)
def test_a_folder_of_several_splits(names: tuple[str, str], tmp_path: Path) -> None:
    table = pa.table({name: np.ones(4, np.float32) for name in "aby"})
    for name in names:
        (file := tmp_path / f"{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, file)
    one = names[0].removesuffix("/0").removesuffix("00000-of-00001")
    refused(task(str(tmp_path)), "train", one)
    alone = f"{tmp_path}/{names[0]}*.parquet", f"{tmp_path}/{one}" + ("*" if one.endswith("-") else "")
    for rows, paths in [(4, alone[0]), (4, alone[1]), (8, [f"{tmp_path}/{name}.parquet" for name in names])]:
        assert open_source(mh.shards(paths)).rows == rows


def test_files_of_several_schemas_name_file_and_column(tmp_path: Path) -> None:
    """Those that are not counted when they are read."""
    for number, (names, types) in enumerate([("aby ab", {}), ("aby aby", {"y": "int64"})]):
        write(path := tmp_path / str(number), names, **types)
        refused(task(mh.shards(path)), "'y'", "0.parquet", "1.parquet", "columns=")
        with pytest.raises(BadInput, match=r"(?s)(?=.*'y')(?=.*1.parquet)(?=.*write)"):
            mh.train(task(mh.shards(path, counted=False, shuffle=False)), workers=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    @override
    def forward(self, a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(a[:, None])[:, 0] - y).square().mean()


def test_columns_that_do_not_fit_loss_or_model(folder: Path) -> None:
    refused(task(mh.shards(folder, columns=["a", "z"])), "'z'", "0.parquet", "a, b, y")  # that no file has
    lacks = mh.shards(folder, columns=["a", "y"])
    refused(task(lacks), "'b'", "a, y", "test_shards_refused.py, line")
    refused(task(lacks, micro_batch_size=3), "'b'", "a, y")
    refused(task(lambda: ({"a": COLUMNS[0, i], "y": COLUMNS[2, i]} for i in range(8))), "'b'", "a, y")
    named = {"model": Net, "loss": lambda model, batch: model(**batch)}
    refused(task(mh.shards(folder), **named), "forward() takes no column 'b'", "columns=['a', 'y']")
    refused(task(mh.shards(folder, columns=["a"]), **named), "forward() needs 'y'", "columns a")
    assert mh.train(task(mh.shards(folder, columns=["a", "y"]), **named), workers=1).rows["total"] == 40
    for names in ("ay", "aby"):  # a supervised task takes no columns by name
        data = mh.shards(folder, columns=list(names))
        given = mh.Task.supervised(model=lambda: nn.Linear(1, 1), optimizer=sgd, train_data=data, batch_size=4)
        refused(given, "(inputs, targets)", ", ".join(names), "loss=")


def test_an_error_of_the_program_itself_stays_what_it_is(folder: Path) -> None:
    for own in (lambda model, batch: {}["b"], lambda model, batch: nn.ModuleDict()["head"](batch["a"])):
        with pytest.raises(mh.WorkerFailed) as failed:
            mh.train(task(mh.shards(folder), loss=own), workers=1)
        assert failed.value.error == "KeyError"


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_more_steps_than_a_stream_has_rows_for(strategy: str, folder: Path, tmp_path: Path) -> None:
    """Nobody can know before: the error comes once the rows are out, and the run directory has the steps."""
    data, options = mh.shards(folder, counted=False), {"workers": 1, "strategy": strategy}
    kept = options | {"run_dir": tmp_path / "run"}

    def train(data: Any = data, *, kept: dict[str, Any] = options, resume: bool = False, **fields: Any) -> mh.Run:
        return mh.train(task(data, max_steps=25, **fields), resume=resume, **kept)

    refuses(r"max_steps=25 .* 20 steps in 2 epochs: give epochs=3 .*, or max_steps=20\.", lambda: train(epochs=2))
    refuses(r"10 steps in 1 epoch: .* newest checkpoint holds them", lambda: train(kept=kept))
    refuses("20 steps in 2 epochs", lambda: train(kept=kept, resume=True, epochs=2))
    run, whole = train(kept=kept, resume=True, epochs=3), train(epochs=3)
    assert (run.steps, run.rows["total"]) == (25, 100)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True))
    assert train(mh.shards(folder)).steps == 10  # counted: the epochs end sooner


class Iterated(IterableDataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    @override
    def __iter__(self) -> Any:
        return ({"a": COLUMNS[0, i], "b": COLUMNS[1, i], "y": COLUMNS[2, i]} for i in range(self.rows))


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("survive", [None, "max_losses=1"])
def test_a_stream_that_ends_before_the_place_where_a_run_goes_on(
    loads: bool, survive: str | None, tmp_path: Path
) -> None:
    def until(steps: int, rows: int, **options: Any) -> mh.Run:
        data: Any = DataLoader(Iterated(rows), batch_size=4) if loads else lambda: iter(Iterated(rows))
        given = task(data, max_steps=steps)
        return mh.train(given, workers=1, run_dir=tmp_path / "run", engine="sim", survive=survive, **options)

    until(3, 20)
    words = "goes on after 3 batches of this epoch, and the stream has 2: give the data"
    refuses(words, lambda: until(4, 8, resume=True))
    refuses("max_steps=4 .* 3 steps in 1 epoch", lambda: until(4, 12, resume=True))


def test_a_file_that_has_fewer_rows_than_were_trained(folder: Path, tmp_path: Path) -> None:
    data, options = mh.shards(folder, counted=False, shuffle=False), {"workers": 1, "run_dir": tmp_path / "run"}
    mh.train(task(data, max_steps=2), **options)
    pq.write_table(pq.read_table(folder / "0.parquet")[:5], folder / "0.parquet")
    words = r"after 8 rows of .*0\.parquet, which has 5: give the data that the run began with"
    refuses(words, lambda: mh.train(task(data, max_steps=4), resume=True, **options))
