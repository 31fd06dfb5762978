"""What a FunctionMode records, computes in float64 and replaces; the first operation in which two passes differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.evidence.check.copies import storages_of
from manyhands.evidence.check.interventions import (
    BATCH_NORM,
    DROPOUT,
    IN_PLACE,
    RANDOMNESS,
    FunctionMode,
    OperationLog,
    first_mixing,
)


def kinds(mode: FunctionMode) -> set[str]:
    return {call.kind for call in mode.recorded}


def test_float32_means_float64_within() -> None:
    single, double = torch.ones(3), torch.ones(3, 3, dtype=torch.float64)
    with FunctionMode(double=True):
        assert (double @ single).dtype == torch.float64
        assert double.float().dtype == torch.float64
        assert double.to(torch.float32).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float16).dtype == torch.float64
        assert torch.tensor(0.5).dtype == torch.float64
        assert torch.stack([single, single]).dtype == torch.float64
        assert torch.arange(3).dtype == torch.int64
        assert {single: 1}[single] == 1  # it is still the same tensor
    assert torch.tensor(0.5).dtype == torch.float32
    assert (single + single).dtype == torch.float32
    total = torch.zeros(2)  # what is written to stays what it is
    with FunctionMode(double=True):
        total.add_(torch.ones(2, dtype=torch.float64))
        total[0] = 5.0
    assert (total.tolist(), total.dtype) == ([5.0, 1.0], torch.float32)
    with pytest.raises(RuntimeError), FunctionMode(double=True):
        torch.ones(2) @ torch.ones(3)
    assert torch.get_default_dtype() == torch.float32


INPUT = torch.ones(4, 6)
LAYERS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "dropout": (nn.Dropout(0.5), (INPUT,)),
    "dropout2d": (nn.Dropout2d(0.5), (torch.ones(4, 6, 2, 2),)),
    "alpha dropout": (nn.AlphaDropout(0.5), (INPUT,)),
    "attention": (nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True), (INPUT[None],) * 3),
    "lstm": (nn.LSTM(6, 6, 2, dropout=0.5), (INPUT[:, None],)),
    "gru": (nn.GRU(6, 6, 2, dropout=0.5), (INPUT[:, None],)),
    "encoder": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True), (INPUT[None],)),
}


def output(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    result: Any = layer(*inputs)
    return (result[0] if isinstance(result, tuple) else result).detach()


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_is_seen_and_taken_away(name: str) -> None:
    layer, inputs = LAYERS[name]
    with FunctionMode(record=True) as mode:
        torch.manual_seed(1)
        one, other = output(layer, inputs), output(layer, inputs)
    assert not torch.equal(one, other)
    assert kinds(mode) == {DROPOUT}
    with FunctionMode(without=frozenset([DROPOUT])):
        assert torch.equal(output(layer, inputs), output(layer, inputs))
    layer.eval()
    with FunctionMode(record=True) as mode:
        plain = output(layer, inputs)
    layer.train()
    assert mode.recorded == []
    with FunctionMode(without=frozenset([DROPOUT])):
        assert torch.allclose(output(layer, inputs), plain)


def test_packed_sequences_have_their_arguments_elsewhere() -> None:
    layer = nn.LSTM(6, 6, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(2, 6)])
    with FunctionMode(without=frozenset([DROPOUT]), record=True) as mode:
        one, other = (layer(packed)[0].data for _ in range(2))
    assert torch.equal(one, other)
    assert kinds(mode) == {DROPOUT}


def test_batch_norm_without_the_batch_treats_rows_apart() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for layer in (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)):
        with FunctionMode(record=True) as mode:
            whole = layer(x)[:2]
            assert not torch.allclose(whole, layer(x[:2]))
        assert kinds(mode) == {BATCH_NORM}
        assert mode.recorded[0].module is layer
        with FunctionMode(without=frozenset([BATCH_NORM])):
            assert torch.allclose(layer(x)[:2], layer(x[:2]))
        layer.eval()
        with FunctionMode(record=True) as mode:
            layer(x)
        assert kinds(mode) == ({BATCH_NORM} if layer.running_mean is None else set())
    mean = torch.zeros(3)
    with FunctionMode(record=True, without=frozenset([BATCH_NORM])) as mode:
        out = torch.batch_norm(x, None, None, mean, torch.ones(3), True, 0.1, 0.0, False)
    assert kinds(mode) == {BATCH_NORM}
    assert torch.allclose(out, x)
    assert mean.tolist() == [0.0] * 3


DRAWS = {
    "rand": (lambda x: torch.rand(2, 3), 0.5),
    "rand_like": (torch.rand_like, 0.5),
    "randn_like": (torch.randn_like, 0.0),
    "normal_": (lambda x: torch.empty(4).normal_(3.0, 2.0), 3.0),
    "normal": (lambda x: torch.normal(torch.full((2,), 7.0), 1.0), 7.0),
    "uniform_": (lambda x: torch.empty(4).uniform_(2.0, 4.0), 3.0),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((5,), 0.7)), 1.0),
    "bernoulli_": (lambda x: torch.ones(5).bernoulli_(0.2), 0.0),
    "exponential_": (lambda x: torch.empty(3).exponential_(2.0), 0.5),
    "randint": (lambda x: torch.randint(3, 9, (4,)).float(), 3.0),
    "randint from 0": (lambda x: torch.randint(9, (4,)).float(), 0.0),
}


def test_instead_of_a_draw_comes_its_middle_and_draws_of_rows_keep_their_order() -> None:
    for name, (draw, middle) in DRAWS.items():
        with FunctionMode(record=True, without=frozenset([RANDOMNESS])) as mode:
            drawn = draw(torch.ones(4))
        assert kinds(mode) == {RANDOMNESS}, name
        assert drawn.unique().tolist() == [middle], name
    with FunctionMode(without=frozenset([RANDOMNESS])):
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]
        assert torch.multinomial(torch.tensor([0.2, 0.5, 0.3]), 2).tolist() == [1, 2]
        likely = F.gumbel_softmax(torch.tensor([[0.0, 1.0]]), tau=0.5)
    assert torch.allclose(likely, torch.softmax(torch.tensor([[0.0, 2.0]]), 1))


def test_writes_to_parameters_are_seen_and_left_out() -> None:
    layer = nn.Linear(2, 2)

    def write() -> None:
        with torch.no_grad():
            layer.weight.mul_(2)
            layer.weight[0] = 1.0
        layer.weight.data = torch.zeros(2, 2)
        layer.bias.data += 1
        torch._foreach_add_([layer.bias.data], 1.0)

    before = [p.detach().clone() for p in layer.parameters()]
    with FunctionMode(record=True, guarded=storages_of(layer), without=frozenset([IN_PLACE])) as mode:
        write()
        layer(torch.ones(1, 2)).sum().backward()  # gradients may be written
        layer.requires_grad_(True)
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
    assert [call.function for call in mode.recorded if call.kind == IN_PLACE].count("mul_") == 1
    with FunctionMode(record=True, guarded=storages_of(layer)) as mode:
        write()
    assert not any(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
    functions = [call.function for call in mode.recorded]
    assert functions == ["mul_", "__setitem__", "__set__", "add_", "__set__", "_foreach_add_"]


# -- operations ------------------------------------------------------------------------------------------------------

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WEIGHTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def log(function: object, rows: Tensor, of: int) -> OperationLog:
    found = OperationLog(of)
    with FunctionMode(after=found.after):
        function(rows)  # type: ignore[operator]
    return found


def mixing(function: object) -> str | None:
    found = first_mixing(log(function, ROWS[:6], 6), log(function, ROWS[3:], 6))
    return None if found is None else found.function


def apart(x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ WEIGHTS)  # [6, 6]: as many columns as rows
    return torch.softmax(hidden, 1).log().mean()


def test_what_mixes_rows_is_found() -> None:
    assert mixing(apart) is None
    assert mixing(lambda x: torch.softmax(torch.tanh(x), 0)) == "softmax"
    assert mixing(lambda x: (x * 2) @ (x * 2).T) in ("matmul", "__matmul__")
    assert mixing(lambda x: x - x.mean(0)) == "sub"
    assert mixing(lambda x: torch.cumsum(x, 0)) == "cumsum"
