"""Predictions in one process and on simulated workers: row by row what a plain loop gives."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import manyhands as mh
import plain
from manyhands.engines.driver.row_collector import RowCollector
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import BadInput, ManyhandsError, Unsupported, WorkerFailed
from manyhands.inference.deal import Deal
from manyhands.inference.program import on_cpu, placed
from manyhands.worker import Worker
from sharded_streams import Sharded

BATCH = 16


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(plain.mlp(), nn.Dropout(0.5))


def inputs(rows: int) -> Tensor:
    return plain.rows(rows)[0]


def outputs(module: nn.Module, x: Tensor, batch_size: int = BATCH) -> Tensor:
    """The plain loop."""
    module.eval()
    with torch.no_grad():
        return torch.cat([module(batch) for batch in x.split(batch_size)])


def test_rows_come_in_order_with_the_bits_of_a_plain_loop() -> None:
    """Rows that do not divide, fewer batches than workers, a last batch that is short."""
    for workers in (1, 2, 5):
        for rows in (1, 5, 16, 17, 100):
            found = mh.predict(model(), inputs(rows), workers=workers, engine="sim", batch_size=BATCH)
            assert torch.equal(found, outputs(model(), inputs(rows))), (workers, rows)
    x, y = plain.rows(30)
    assert torch.equal(mh.predict(model(), (x, y, y), batch_size=BATCH), outputs(model(), x))
    rows = [x[i].tolist() for i in range(30)]
    found = mh.predict(model(), rows, collate=lambda own: torch.tensor(own, dtype=torch.float64), batch_size=BATCH)
    assert torch.equal(found, outputs(model(), x))


def test_the_callers_model_stays_as_it_is_and_predicts_in_evaluation_mode() -> None:
    given = model()
    given[0].eval()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    for workers, engine in ((1, "local"), (2, "sim")):
        found = mh.predict(given, inputs(20), workers=workers, engine=engine)
        assert not found.requires_grad
    assert [module.training for module in (given, given[0], given[1])] == [True, False, True]
    assert all(torch.equal(value, given.state_dict()[name]) for name, value in before.items())
    given = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(5).double()))
    given.norm.running_mean.copy_(torch.arange(5.0))
    found = mh.predict(given, inputs(40), workers=2, engine="sim", batch_size=8)
    assert torch.allclose(found, (inputs(40) - torch.arange(5.0)) / (1 + 1e-5) ** 0.5)
    assert given.norm.running_mean.tolist() == list(range(5))


class Words(Dataset[str]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, i: int) -> str:
        return "ab" * (i % 5) + str(i)


def doubled(module: nn.Module, batch: Any) -> Any:
    return torch.as_tensor(batch) * 2


def test_streams_and_shards_come_in_the_order_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some workers end early."""
    for workers in (1, 3):
        stream = Sharded([range(101)])
        for data in (lambda: iter(range(101)), stream, DataLoader(stream, batch_size=10)):
            found = mh.predict(nn.Identity(), data, function=doubled, workers=workers, engine="sim", batch_size=8)
            assert found.tolist() == list(range(0, 202, 2)), (data, workers)
        shards = Sharded([range(100 * i, 100 * i + 10 * i * i + 3) for i in range(4)])
        found = mh.predict(nn.Identity(), shards, function=doubled, workers=workers, engine="sim", batch_size=8)
        assert sorted(found.tolist()) == sorted(2 * number for number in shards), workers
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    for i, part in enumerate(np.split(np.arange(500), [7, 7, 300, 301])):
        (tmp_path / "rows" / f"{i}.csv").write_text("x\n" + "".join(f"{number}\n" for number in part))
    for options in ({}, {"shuffle": True}, {"counted": False}):
        for workers in (1, 3):
            rows = mh.shards(tmp_path / "rows", **options)
            of: dict[str, Any] = {"workers": workers, "engine": mh.Sim(), "batch_size": 13}
            found = mh.predict(nn.Linear(1, 1), rows, function=lambda model, batch: 2 * batch["x"], **of)
            assert found.tolist() == [2 * number for number in range(500)], (options, workers)


def test_a_loader_texts_tuples_dicts_and_kept_columns() -> None:
    def measured(module: nn.Module, batch: list[str]) -> dict[str, Any]:
        return {"text": [word.upper() for word in batch], "length": torch.tensor([len(word) for word in batch])}

    x, y = plain.rows(50)
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7, shuffle=True, drop_last=True)
    words = [Words()[i] for i in range(37)]
    for workers in (1, 3):
        found = mh.predict(model(), loader, workers=workers, engine="sim", batch_size=BATCH)
        assert torch.equal(found, outputs(model(), x))
        texts = mh.predict(nn.Identity(), Words(), function=measured, workers=workers, engine="sim", batch_size=4)
        assert texts["text"] == [word.upper() for word in words]
        assert texts["length"].tolist() == list(map(len, words))
    x = inputs(40)
    wanted, options = outputs(model(), x), {"workers": 2, "engine": "sim", "batch_size": BATCH}
    table = {"id": np.array([f"row {i}" for i in range(40)]), "x": x, "other": torch.arange(40)}
    pair = mh.predict(model(), x, function=lambda m, b: (m(b), b.sum(1)), **options)
    assert torch.equal(pair[0], wanted)
    assert torch.equal(pair[1], x.sum(1))
    found = mh.predict(model(), table, function=lambda m, b: m(b["x"]), keep=("id", "other"), **options)
    assert list(found) == ["id", "other", "prediction"]
    assert found["id"].tolist() == table["id"].tolist()
    assert torch.equal(found["other"], table["other"])
    assert torch.equal(found["prediction"], wanted)


def test_rows_go_into_a_file_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, columns = inputs(250), {"x": inputs(250), "id": torch.arange(250)}
    for workers in (1, 3):
        told, path = list[tuple[int, int]](), tmp_path / f"{workers}.parquet"
        options: dict[str, Any] = {"workers": workers, "engine": "sim", "batch_size": BATCH}
        options |= {"progress": lambda done, total, told=told: told.append((done, total)), "keep": ("id",)}
        found = mh.predict(model(), columns, function=lambda m, b: m(b["x"]), output=path, **options)
        assert (found.path, found.rows, len(found.rows_of_workers)) == (path, 250, workers)
        assert (sum(found.rows_of_workers), told[-1]) == (250, (250, 250))
        assert "250 rows in" in repr(found)
        table = pq.read_table(found.path)
        assert table["id"].to_pylist() == list(range(250))
        assert table["prediction"].to_pylist() == outputs(model(), x).tolist()
    monkeypatch.setattr("manyhands.inference.program.PIECE_BYTES", 150)  # a long piece is sent in parts
    found = mh.predict(model(), x, workers=2, engine="sim", batch_size=4)
    assert torch.equal(found, outputs(model(), x, 4))


def refused(words: str, *given: Any, error: type[Exception] = BadInput, **options: Any) -> None:
    with pytest.raises(error, match=words):
        mh.predict(*given, **options)


def test_what_cannot_be_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    x = inputs(20)
    refused(r"a batch of the data is a dict \(x, y\).*function=", model(), {"x": x, "y": x})
    refused("the function gave 1 rows for a batch of 20", model(), x, function=lambda m, b: m(b)[:1])
    refused("first dimension counts rows", model(), x, function=lambda m, b: m(b).sum())
    refused("a batch of it is no dict but Tensor", model(), x, keep=("id",))
    refused("keep: the data has no column 'id'; it has x", model(), {"x": x}, keep=("id",))
    refused("keep must be a tuple of columns' names", model(), {"x": x}, keep="id")
    refused("needs an nn.Module, a manyhands.Run or the directory", 3, x)
    refused("function must be a function", model(), x, function=3)
    refused("batch_size must be a whole number", model(), x, batch_size=0)
    refused("workers must be a whole number", model(), x, workers=0)
    refused("must end in .parquet", model(), x, output="out.csv")
    refused("KeyError", model(), x, function=lambda m, b: {}["x"], error=WorkerFailed)

    def fails(module: nn.Module, batch: Tensor) -> Tensor:
        if batch[0] >= 64:
            raise KeyError("of the user")
        return batch

    out: dict[str, Any] = {"output": tmp_path / "out.parquet", "batch_size": 8, "function": fails}
    for workers, engine in ((1, "local"), (3, "sim")):
        out |= {"workers": workers, "engine": engine}
        refused("of the user", nn.Identity(), torch.arange(100), error=WorkerFailed, **out)
        assert list(tmp_path.iterdir()) == []


def test_engines_that_bring_no_rows_and_rows_of_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.data.dataframe_rows import HostRows, SharedRows

    with monkeypatch.context() as patch:
        patch.setattr(RowCollector, "take_rows", lambda *_: None)
        lost = "worker 0 delivered 3 rows, and 0 came: engine local lost rows"
        refused(lost, model(), inputs(3), engine="local", error=ManyhandsError)
        patch.delattr(InProcessDriverClient, "deliver")
        refused("this engine brings no rows to the driver", model(), inputs(3), engine="local", error=Unsupported)
    rows = SharedRows(HostRows.__new__(HostRows), [2, 2], [1, 1], 0)
    monkeypatch.setattr("manyhands.inference.deal.open_source", lambda *_, **__: rows)
    deal = Deal(data=None, batch_size=4)
    with pytest.raises(Unsupported, match="lie on several hosts"):
        deal.open()
    assert deal.unordered().open() is rows


def test_a_model_on_another_device_is_copied_and_the_callers_stays_there() -> None:
    given, cpu = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)  # torch's meta device stands for a GPU
    assert on_cpu(cpu) is cpu
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # it has no data to copy
        on_cpu(given)
    assert placed(cpu, Worker()) is cpu
    there = placed(cpu, Worker(device=torch.device("meta")))
    assert (there.weight.device.type, cpu.weight.device.type) == ("meta", "cpu")
    assert placed(cpu, Worker(shares_process=True)) is not cpu
