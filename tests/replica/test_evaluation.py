"""The one answer's buffers, and its metrics."""

import numpy as np
import pytest
import torch
from torch import nn

import plain
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.source import Reading, Slices, Source
from manyhands.replica import evaluation
from manyhands.task import Metrics, Summed
from manyhands.testing.threads import together
from manyhands.worker import Worker


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("floating", torch.full((2,), float(rank)))
        self.register_buffer("complex", torch.tensor([[1 + 2j, 0j]], dtype=torch.complex128) * (rank + 1))
        self.register_buffer("count", torch.tensor(10 * rank))
        self.register_buffer("seen", torch.tensor([rank == 0, False]))


def test_floating_and_complex_buffers_are_averaged_and_others_take_the_maximum() -> None:
    models = [Buffered(rank) for rank in range(3)]

    def mean(worker: Worker) -> dict[str, torch.Tensor]:
        return evaluation.mean_buffers(models[worker.rank], worker.group)

    for buffers in together(3, mean):
        assert torch.equal(buffers["floating"], torch.ones(2))
        assert torch.allclose(buffers["complex"], torch.tensor([[2 + 4j, 0j]], dtype=torch.complex128), atol=1e-15)
        assert buffers["count"] == 20
        assert buffers["seen"].tolist() == [True, False]
    assert models[0].complex[0, 0] == 1 + 2j


def test_what_is_no_mean_is_a_function_of_the_sums_over_all_ranks() -> None:
    """Rank 2 has no rows, and hears the same."""
    x = torch.arange(10, dtype=torch.float64)
    task = plain.task(train_data=plain.rows(8), evaluate=deviation)

    def evaluated(worker: Worker) -> dict[str, float]:
        own = Feed(open_source(x), batch_size=3, rank=worker.rank, size=3, shuffle=False)
        feed = own if worker.rank < 2 else Feed(NoRows(), rank=2, size=3, batch_size=3)
        return evaluation.evaluate(
            evaluation.of_model(task, nn.Identity(), feed.device), feed, worker.group, lambda batch: None
        )

    seen = [i for i in range(10) if i % 3 < 2 and i < 9]  # rank 2 would have had the others
    for metrics in together(3, evaluated):
        assert metrics == {"mean": pytest.approx(np.mean(seen)), "deviation": pytest.approx(np.std(seen))}


def deviation(model: nn.Module, x: torch.Tensor) -> Metrics:
    sums = torch.stack([torch.tensor(float(len(x))), x.sum(), x.square().sum()])

    def of(total: torch.Tensor) -> dict[str, float]:
        n, first, second = total.tolist()
        return {"deviation": (second / n - (first / n) ** 2) ** 0.5}

    return {"mean": x.mean(), "": Summed(sums, of)}


class NoRows(Source):
    def epoch_rows(self, reading: Reading) -> int | None:
        return 0

    def ticks(self, reading: Reading) -> int | None:
        return 0

    def slices(self, reading: Reading) -> Slices:
        yield from ()
