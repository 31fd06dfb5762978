"""A loader's state in the checkpoint of several workers: once, and for any number of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.loader_position import LoaderPosition
from manyhands.data.open_source import open_source
from manyhands.engines.local.engine import Local


class Rows(IterableDataset[Any]):
    def __init__(self, log: Path) -> None:
        self.log, self.start = log, 0

    @override
    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for i in range(start, 24):
            with self.log.open("a") as file:
                file.write(f"{i}\n")
            yield torch.tensor([float(i)]), torch.rand(1)


class Remembering(DataLoader[Any]):
    at = 0

    @override
    def __iter__(self) -> Any:
        self.at = self.dataset.start  # type: ignore[attr-defined]
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.at += len(batch[0])
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.start = state["at"]  # type: ignore[attr-defined]


def test_two_workers_keep_one_state_and_one_goes_on(tmp_path: Path, local: Local) -> None:
    def train(workers: int, name: str, **options: Any) -> tuple[mh.Run, list[int]]:
        log = tmp_path / name
        run = mh.train(
            model=lambda: nn.Linear(1, 1).double(),
            loss=lambda model, batch: (model(batch[0].double() / 24) - batch[1]).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=Remembering(Rows(log), batch_size=4),
            workers=workers,
            engine=local,
            **options,
        )
        return run, sorted(map(int, log.read_text().split()))

    whole, _ = train(1, "whole")
    train(2, "first", run_dir=tmp_path / "run", max_steps=2)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    texts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    kept = [one["position"]["loader"] for one in texts if "position" in one]
    assert [state is None for state in kept] == [False, True]
    run, read = train(1, "then", run_dir=tmp_path / "run", resume=True)
    assert read == list(range(8, 24))
    for a, b in zip(whole.model.parameters(), run.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("processes", [0, 2])
def test_torchdatas_own_loader(processes: int) -> None:
    """Where it is installed: its state is kept, read ahead or not, and names the rows that are left."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def feed() -> Feed:
        rows = TensorDataset(torch.arange(40.0))
        made = stateful.StatefulDataLoader(rows, batch_size=4, shuffle=True, num_workers=processes)
        return Feed(open_source(made), rank=0, size=2, states=True)

    parts = list(feed().epoch(0))
    for stopped in (parts[0], parts[3], parts[9]):
        again = feed()
        assert stopped.loader is not None
        again.go_on(0, loader=LoaderPosition.read(stopped.loader.text()))
        left = list(again.epoch(0, stopped.index + 1))
        assert [part.index for part in left] == list(range(stopped.index + 1, 10))
        wanted = parts[stopped.index + 1 :]
        assert all(torch.equal(a.batch[0], b.batch[0]) for a, b in zip(left, wanted, strict=True))  # type: ignore[index]
