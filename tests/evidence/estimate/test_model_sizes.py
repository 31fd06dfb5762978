"""What is seen of the real model, optimizer and data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import manyhands as mh
from manyhands.data.open_source import open_source
from manyhands.evidence.estimate.model_sizes import ReadingPlan, Shape, reading_plan, shape_of


class Net(nn.Module):
    """4·6 + 6, a 2x3x2x2 convolution whose memory is channels-last, 3; and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.convolution = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(1000), requires_grad=False)


def task(model: object = Net, optimizer: object = None, **fields: object) -> mh.Task:
    values = {"train_data": torch.zeros(50, 6), "batch_size": 8, **fields}
    return mh.Task(
        model=model,
        loss=lambda model, batch: model.first(batch).mean(),
        optimizer=optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        **values,
    )


def test_lengths_of_the_flat_vector_and_its_matrices() -> None:
    """Each parameter begins at a multiple of 32 float32."""
    found = shape_of(task())
    assert found == Shape(
        numbers=3 + 24 + 4 + 24 + 2,
        padded=5 * 32,
        dtype=torch.float32,
        parameters=5,
        matrices=((32, 4, 6), (96, 2, 12)),
        slices=(160,),
        state={},
        largest=torch.Size([4, 6]),
    )
    assert found.item == 4


def test_what_the_optimizer_keeps() -> None:
    def state(make: type[torch.optim.Optimizer], **options: float) -> dict[str, tuple[int, ...]]:
        found = shape_of(task(optimizer=lambda model: make(model.parameters(), lr=0.1, **options)))
        return {name: tuple(value.shape) for name, value in found.state.items() if value is not None}

    assert state(torch.optim.SGD) == {}
    assert state(torch.optim.SGD, momentum=0.9) == {"momentum_buffer": (4, 6)}
    assert state(torch.optim.AdamW) == {"step": (), "exp_avg": (4, 6), "exp_avg_sq": (4, 6)}


def test_a_large_model_has_slices_of_some_mebibytes_and_one_without_parameters_is_refused() -> None:
    found = shape_of(task(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1200))))
    assert (sum(found.slices), len(found.slices)) == (found.padded, 2)
    with pytest.raises(mh.BadInput, match="no trainable parameters"):
        shape_of(task(lambda: nn.ReLU()))


def test_the_module_that_is_given_and_the_random_state_stay_as_they_are() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shape_of(task(model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# -- data --------------------------------------------------------------------------------------------------------------


def test_epochs_and_steps() -> None:
    given = task(epochs=3)
    reading = reading_plan(given, open_source(given.train_data), 4)
    assert reading == ReadingPlan(batch_size=8, rows=50, ticks=7)
    assert [reading.rows_of(tick) for tick in (0, 5, 6)] == [8, 8, 2]
    assert reading.steps(given) == 21
    assert reading.steps(given.with_fields(max_steps=5)) == 5


def test_rows_a_worker_orders_and_loaders() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(50, 6)), batch_size=10, drop_last=True)
    uneven = DataLoader(TensorDataset(torch.zeros(9, 6)), batch_sampler=[[0, 1, 2, 3], [4], [5], [6, 7, 8]])
    for given, workers, plan in (
        (task(batch_size=None, batch_size_per_worker=5), 4, ReadingPlan(batch_size=20, rows=50, ticks=3)),
        (task(order=lambda epoch: range(20)), 4, ReadingPlan(batch_size=8, rows=20, ticks=3)),
        (task(train_data=loader, batch_size=None), 4, ReadingPlan(batch_size=10, rows=50, ticks=5)),
        (
            task(train_data=uneven, batch_size=None),
            2,
            ReadingPlan(batch_size=3, rows=9, ticks=3),
        ),  # as if equally large
    ):
        assert reading_plan(given, open_source(given.train_data), workers) == plan


def test_nobody_knows_where_a_stream_ends() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> object:
            return iter(torch.zeros(50, 6))

    given = task(train_data=Stream(), epochs=2)
    reading = reading_plan(given, open_source(given.train_data), 2)
    assert reading == ReadingPlan(batch_size=8, rows=None, ticks=None)
    assert reading.steps(given) is None
    assert reading.steps(given.with_fields(max_steps=40)) == 40
    assert reading.rows_of(10**9) == 8
