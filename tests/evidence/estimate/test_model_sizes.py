"""What is seen of the real model, optimizer and data, and the lengths of messages that follow from it."""

import pytest
import torch
from both_ways import task as wide
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.comm.codecs import Hints, Matrix, codec_of
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.data.open_source import open_source
from manyhands.errors import Unsupported
from manyhands.evidence.estimate.message_lengths import Lengths, Piece, payload_bytes
from manyhands.evidence.estimate.model_sizes import ReadingPlan, Shape, reading_plan, shape_of
from manyhands.strategies import strategy_of


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


def test_lengths_of_the_flat_vector_its_matrices_and_slices() -> None:
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
    found = shape_of(task(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1200))))
    assert (sum(found.slices), len(found.slices)) == (found.padded, 2)
    with pytest.raises(mh.BadInput, match="no trainable parameters"):
        shape_of(task(lambda: nn.ReLU()))


def test_nothing_of_the_caller_is_changed() -> None:
    """What the optimizer keeps is in the lengths of test_scaled_task.py."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shape_of(task(model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# -- data --------------------------------------------------------------------------------------------------------------


def test_epochs_steps_rows_a_worker_orders_loaders_and_streams() -> None:
    given = task(epochs=3)
    reading = reading_plan(given, open_source(given.train_data), 4)
    assert reading == ReadingPlan(batch_size=8, rows=50, ticks=7)
    assert [reading.rows_of(tick) for tick in (0, 5, 6)] == [8, 8, 2]
    assert reading.steps(given) == 21
    assert reading.steps(given.with_fields(max_steps=5)) == 5
    loader = DataLoader(TensorDataset(torch.zeros(50, 6)), batch_size=10, drop_last=True)
    uneven = DataLoader(TensorDataset(torch.zeros(9, 6)), batch_sampler=[[0, 1, 2, 3], [4], [5], [6, 7, 8]])
    for given, workers, plan in (
        (task(batch_size=None, batch_size_per_worker=5), 4, ReadingPlan(batch_size=20, rows=50, ticks=3)),
        (task(order=lambda epoch: range(20)), 4, ReadingPlan(batch_size=8, rows=20, ticks=3)),
        (task(train_data=loader, batch_size=None), 4, ReadingPlan(batch_size=10, rows=50, ticks=5)),
        (task(train_data=uneven, batch_size=None), 2, ReadingPlan(batch_size=3, rows=9, ticks=3)),  # as if equal
    ):
        assert reading_plan(given, open_source(given.train_data), workers) == plan
    given = task(train_data=lambda: iter(torch.zeros(50, 6)), epochs=2)
    reading = reading_plan(given, open_source(given.train_data), 2)
    assert reading == ReadingPlan(batch_size=8, rows=None, ticks=None)
    assert (reading.steps(given), reading.steps(given.with_fields(max_steps=40))) == (None, 40)
    assert reading.rows_of(10**9) == 8


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(wide())


def lengths(shape: Shape, spec: str, **more: int) -> Lengths:
    return Lengths(shape, strategy_of(spec), **{"workers": 4, **more})


def encoded(shape: Shape, text: str, low: int, high: int) -> int:
    """Bytes of a real payload."""
    codec = codec_of(text)
    matrices = []
    for start, rows, columns in shape.matrices if isinstance(codec, PowerSGD) else ():
        first, last = max(0, -(-(low - start) // columns)), min(rows, (high - start) // columns)
        if first < last:
            guess = torch.randn(columns, int(codec.rank))
            matrices.append(Matrix(start + first * columns - low, last - first, columns, guess))
    return len(codec.encode(torch.randn(high - low), Hints(torch.Generator(), matrices)))


def test_a_payload_is_as_long_as_what_the_codec_makes(shape: Shape) -> None:
    for text in ("topk:0.01", "onebit", "bf16", "int8", "qsgd:4", "powersgd:1", "powersgd:3", "powersgd:50"):
        for number, of in ((0, 1), (0, 3), (1, 3), (2, 3)):
            low, high = number * shape.padded // of, (number + 1) * shape.padded // of
            assert payload_bytes(codec_of(text), shape, low, high) == encoded(shape, text, low, high), (text, number)
    threshold = "allreduce:compress=threshold:0.1"
    with pytest.raises(Unsupported, match=r"compress=threshold .* only training shows them: .* topk:0.01"):
        lengths(shape, threshold)
    alone = Lengths(shape, strategy_of(threshold), workers=1)  # one worker compresses nothing
    assert alone.mean(alone.stand_in_length, shape.item) == [Piece("mean", shape.padded, 4)]
