"""What a Lens sees, computes in float64, and takes away."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.evidence.check.function_mode import SUM, FunctionMode
from manyhands.evidence.check.interventions import BATCH_NORM, DROPOUT, IN_PLACE, RANDOMNESS
from manyhands.evidence.check.trial_config import memory_of


def kinds(lens: FunctionMode) -> set[str]:
    return {seen.kind for seen in lens.seen}


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


def test_what_is_written_to_stays_what_it_is() -> None:
    total = torch.zeros(2)
    with FunctionMode(double=True):
        total.add_(torch.ones(2, dtype=torch.float64))
        total[0] = 5.0
    assert total.tolist() == [5.0, 1.0]
    assert total.dtype == torch.float32


def test_the_default_dtype_comes_back_after_an_error() -> None:
    with pytest.raises(RuntimeError), FunctionMode(double=True):
        torch.ones(2) @ torch.ones(3)
    assert torch.get_default_dtype() == torch.float32


LAYERS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "dropout": (nn.Dropout(0.5), (torch.ones(4, 6),)),
    "dropout2d": (nn.Dropout2d(0.5), (torch.ones(4, 6, 2, 2),)),
    "alpha dropout": (nn.AlphaDropout(0.5), (torch.ones(4, 6),)),
    "attention": (nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True), (torch.ones(2, 4, 6),) * 3),
    "lstm": (nn.LSTM(6, 6, 2, dropout=0.5), (torch.ones(4, 2, 6),)),
    "gru": (nn.GRU(6, 6, 2, dropout=0.5), (torch.ones(4, 2, 6),)),
    "encoder": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True), (torch.ones(2, 4, 6),)),
}


def output(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    result: Any = layer(*inputs)
    return (result[0] if isinstance(result, tuple) else result).detach()


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_is_seen_and_taken_away(name: str) -> None:
    layer, inputs = LAYERS[name]
    with FunctionMode(look=True) as lens:
        torch.manual_seed(1)
        one, other = output(layer, inputs), output(layer, inputs)
    assert not torch.equal(one, other)
    assert kinds(lens) == {DROPOUT}
    with FunctionMode(without=frozenset([DROPOUT])):
        assert torch.equal(output(layer, inputs), output(layer, inputs))
    layer.eval()
    with FunctionMode(look=True) as lens:
        plain = output(layer, inputs)
    layer.train()
    assert lens.seen == []
    with FunctionMode(without=frozenset([DROPOUT])):
        assert torch.allclose(output(layer, inputs), plain)


def test_packed_sequences_have_their_arguments_elsewhere() -> None:
    layer = nn.LSTM(6, 6, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(2, 6)])
    with FunctionMode(without=frozenset([DROPOUT]), look=True) as lens:
        one, other = (layer(packed)[0].data for _ in range(2))
    assert torch.equal(one, other)
    assert kinds(lens) == {DROPOUT}


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)])
def test_batch_norm_without_the_batch_treats_rows_apart(layer: nn.Module) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with FunctionMode(look=True) as lens:
        whole = layer(x)[:2]
        assert not torch.allclose(whole, layer(x[:2]))
    assert kinds(lens) == {BATCH_NORM}
    assert lens.seen[0].module is layer
    with FunctionMode(without=frozenset([BATCH_NORM])):
        assert torch.allclose(layer(x)[:2], layer(x[:2]))
    layer.eval()
    with FunctionMode(look=True) as lens:
        layer(x)
    assert kinds(lens) == ({BATCH_NORM} if layer.running_mean is None else set())


def test_low_level_batch_norm_is_known_too() -> None:
    x, mean, var = torch.randn(6, 3), torch.zeros(3), torch.ones(3)
    with FunctionMode(look=True, without=frozenset([BATCH_NORM])) as lens:
        out = torch.batch_norm(x, None, None, mean, var, True, 0.1, 0.0, False)
    assert kinds(lens) == {BATCH_NORM}
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


@pytest.mark.parametrize("name", DRAWS)
def test_instead_of_a_draw_comes_its_middle(name: str) -> None:
    draw, middle = DRAWS[name]
    with FunctionMode(look=True, without=frozenset([RANDOMNESS])) as lens:
        drawn = draw(torch.ones(4))
    assert kinds(lens) == {RANDOMNESS}
    assert drawn.unique().tolist() == [middle]


def test_draws_of_rows_keep_their_order() -> None:
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
    with FunctionMode(look=True, guarded=memory_of(layer), without=frozenset([IN_PLACE])) as lens:
        write()
        layer(torch.ones(1, 2)).sum().backward()  # gradients may be written
        layer.requires_grad_(True)
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
    assert [seen.function for seen in lens.seen if seen.kind == IN_PLACE].count("mul_") == 1
    with FunctionMode(look=True, guarded=memory_of(layer)) as lens:
        write()
    assert not any(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
    assert [seen.function for seen in lens.seen] == [
        "mul_",
        "__setitem__",
        "__set__",
        "add_",
        "__set__",
        "_foreach_add_",
    ]


def test_sums_over_everything_are_seen_with_their_line() -> None:
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    with FunctionMode(look=True) as lens:
        x.sum(1).mean()
        F.cross_entropy(x, y, reduction="sum")
        nn.MSELoss(reduction="sum")(x, x)
        x.sum()
    assert [seen.kind for seen in lens.seen] == [SUM] * 3
    lines = [seen.place.line for seen in lens.seen if seen.place is not None and seen.place.file == __file__]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 2]
