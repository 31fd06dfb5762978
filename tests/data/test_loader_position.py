"""A loader that can go on by itself: its state is in checkpoints, and what was read is not read again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

import manyhands as mh
from manyhands.checkpoint import checkpoints
from manyhands.data.feed import Feed
from manyhands.data.loader_position import LoaderPosition
from manyhands.data.open_source import open_source
from manyhands.data.source import Slice
from manyhands.engines.local.engine import Local
from refusals import refused

ROWS, BATCH = 40, 4


class Rows(IterableDataset[Any]):
    """Numbers from `start` on; tells which were read."""

    def __init__(self) -> None:
        self.start, self.read = 0, list[int]()

    @override
    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for i in range(start, ROWS):
            self.read.append(i)
            yield torch.tensor([float(i)]), torch.rand(1)


class Remembering(DataLoader[Any]):
    """Has the two methods of torchdata's StatefulDataLoader. Like it, it gives a state that changes as it goes on."""

    def __init__(self, rows: Rows, extra: Any = None) -> None:
        super().__init__(rows, batch_size=BATCH)
        self.rows, self.asked = rows, 0
        self.state = {"batches": 0, "extra": extra}

    @override
    def __iter__(self) -> Any:
        self.state["batches"] = self.rows.start // BATCH
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.state["batches"] += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.start = BATCH * state["batches"]


def slices(rank: int, size: int, rows: Rows, *, begun: Slice | None = None, loader: Any = None) -> list[Slice]:
    feed = Feed(open_source(Remembering(rows) if loader is None else loader), rank=rank, size=size, states=True)
    if begun is None:
        return list(feed.epoch(0))
    assert begun.loader is not None
    feed.go_on(0, loader=LoaderPosition.read(begun.loader.text()))
    return list(feed.epoch(0, begun.index + 1))


def values(parts: list[Slice]) -> list[list[float]]:
    """What was trained on, with the random numbers."""
    return [torch.cat(part.batch, 1).flatten().tolist() for part in parts if part.batch is not None]


def test_any_number_of_workers_goes_on_where_others_stopped_and_reads_nothing_twice() -> None:
    stopped = slices(1, 2, Rows())[3]  # the loader has given all of its batches by then
    for size in (1, 2, 3):
        for rank in range(size):
            rows = Rows()
            rest = slices(rank, size, rows, begun=stopped)
            assert rows.read == list(range(16, ROWS))
            assert [part.index for part in rest] == list(range(4, 10))
            assert values(rest) == values(slices(rank, size, Rows())[4:]), (rank, size)
    rows = Rows()  # at the end of an epoch nothing is read
    assert slices(0, 1, rows, begun=slices(0, 1, Rows())[-1]) == []
    assert rows.read == []


def test_what_cannot_go_on_by_itself_reads_and_drops() -> None:
    stopped = slices(0, 1, Rows())[3]
    rows = Rows()
    plain: Any = DataLoader(rows, batch_size=BATCH)
    assert values(slices(0, 1, rows, begun=stopped, loader=plain)) == values(slices(0, 1, Rows())[4:])
    assert rows.read == list(range(ROWS))
    assert stopped.loader is not None
    position, more = stopped.loader, Remembering(Rows())
    assert [position.fits(more, *at) for at in ((0, 4), (0, 5), (1, 4))] == [True, False, False]
    more.num_workers = 2  # a state is of as many processes as there were
    assert not position.fits(more, 0, 4)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0].double() / ROWS) - batch[1]).square().mean()


def train(loader: Remembering, **options: Any) -> mh.Run:
    fields = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "epochs": 2, "workers": 1}
    return mh.train(model=lambda: nn.Linear(1, 1).double(), loss=loss, train_data=loader, **fields | options)


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    loader = Remembering(Rows())
    whole = train(loader)
    assert loader.asked == 0  # without a run directory nobody needs it
    train(Remembering(Rows()), max_steps=13, run_dir=tmp_path / "run")
    loader = Remembering(Rows())
    run = train(loader, run_dir=tmp_path / "run", resume=True)
    assert loader.rows.read == list(range(12, ROWS))
    assert run.rows["total"] == 2 * ROWS
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), run.model.parameters(), strict=True))


def test_two_workers_keep_one_state_and_one_goes_on(tmp_path: Path, local: Local) -> None:
    whole = train(Remembering(Rows()))
    train(Remembering(Rows()), workers=2, engine=local, run_dir=tmp_path / "run", max_steps=2)
    saved = checkpoints.newest(tmp_path / "run" / "checkpoints", pytest.fail)
    assert [saved.values(rank)["position"]["loader"] is None for rank in range(2)] == [False, True]
    loader = Remembering(Rows())
    run = train(loader, run_dir=tmp_path / "run", resume=True)
    assert loader.rows.read[: ROWS - 8] == list(range(8, ROWS))
    for a, b in zip(whole.model.parameters(), run.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_a_state_that_no_checkpoint_keeps_is_refused_before_a_step(tmp_path: Path) -> None:
    for extra in (Path("a"), lambda: None):
        words = r"state_dict\(\) of the DataLoader holds .* numbers, texts and tensors"
        refused(words, lambda extra: train(Remembering(Rows(), extra), run_dir=tmp_path / "run"), extra)
        assert not (tmp_path / "run").exists()
    assert train(Remembering(Rows(), {"a": [1, torch.ones(2)], 3: None}), run_dir=tmp_path / "run").steps == 20
