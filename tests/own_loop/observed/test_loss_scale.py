"""Whether a loss is a mean or a sum over rows, from the gradients of a batch and of its parts: with and without noise."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.own_loop import loss_graph
from manyhands.own_loop.observed.loops import Scale
from manyhands.own_loop.observed.loss_scale import LOW_PRECISION, Unclear, loss_scale, predictions

CLASSES = 4
WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 2.0])


def mlp(drop: float) -> nn.Module:
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Dropout(drop), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(drop)]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Scale]] = {
    "mean": (F.cross_entropy, Scale.MEAN),
    "sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), Scale.SUM),
    "sum over a constant": (lambda z, y: F.cross_entropy(z, y, reduction="sum") / 64, Scale.SUM),
    "class weights": (lambda z, y: F.cross_entropy(z, y, WEIGHTS), Scale.MEAN),
    "scaled by AMP": (lambda z, y: F.cross_entropy(z, y) * 65536.0, Scale.MEAN),
}


def measured(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> tuple[Tensor, float, float]:
    """(gradient [D], loss, what the loss counts) of one worker's rows."""
    model.zero_grad()
    value = loss(model(x), y)
    divisor = loss_graph.divisor_of(value) or float(len(y))
    value.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]), float(value.detach()), divisor


def found(model: nn.Module, x: Tensor, y: Tensor, loss: Any, workers: int, augment: float, noisy: bool) -> Any:
    """What workers find that get the batch, its parts, or, if there are two, the batch twice."""
    whole, value, total = measured(model, x + augment * torch.randn_like(x), y, loss)
    halves = [torch.arange(len(x)).repeat(2)] if workers == 2 else list(torch.arange(len(x)).tensor_split(workers - 1))
    parts = [measured(model, x[own] + augment * torch.randn_like(x[own]), y[own], loss) for own in halves]
    gradients, values, counted = zip(*parts, strict=True)
    return loss_scale(whole, *predictions(gradients, counted, total), counted, total, (value, values), noisy)


def test_never_wrong_and_seldom_unclear() -> None:
    """With and without dropout and augmentation, of few rows and many, in parts and twice."""
    unclear, seeds = 0, range(12)
    for seed, (kind, (loss, expected)) in product(seeds, LOSSES.items()):
        drop, augment, rows = (0.0, 0.1, 0.5)[seed % 3], float(seed // 3 % 2), (8, 64)[seed // 6 % 2]
        torch.manual_seed(seed)
        model, x, y = mlp(drop), torch.randn(rows, 20), torch.randint(CLASSES, (rows,))
        scale = found(model, x, y, loss, 2 + (seed + seed // 12) % 2, augment, drop > 0 or augment > 0)
        assert isinstance(scale, Unclear) or scale is expected, (seed, kind)
        unclear += isinstance(scale, Unclear)
    assert unclear <= 0.03 * len(seeds) * len(LOSSES)


@given(
    rows=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    summed=st.booleans(),
    divisor=st.sampled_from([1.0, 64.0]),
    seed=st.integers(0, 1000),
)
def test_exact_gradients_always_decide(rows: list[int], summed: bool, divisor: float, seed: int) -> None:
    """Any parts of any number of rows; a division by a constant is a sum."""
    generator = torch.Generator().manual_seed(seed)
    of_rows = [torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in rows]
    combine: Callable[[Tensor], Tensor] = (lambda g: g.sum(0) / divisor) if summed else (lambda g: g.mean(0))
    whole, parts = combine(torch.cat(of_rows)), [combine(g) for g in of_rows]
    mean, added = predictions(parts, rows, sum(rows))
    expected = Scale.SUM if summed else Scale.MEAN
    losses = float(whole[0]), [float(part[0]) for part in parts]
    assert loss_scale(whole, mean, added, rows, sum(rows), losses, False) is expected


def test_a_gradient_that_shows_nothing_is_unclear() -> None:
    for size in (0.0, float("inf")):
        whole = torch.full((5,), size)
        assert isinstance(loss_scale(whole, whole, whole, [4.0, 4.0], 8.0, (1.0, [1.0, 1.0]), True), Unclear), size
    assert "30% as a mean and by 60% as a sum" in Unclear(0.3, 0.6, None).reason
    assert "0.50" in Unclear(0.3, 0.6, 0.5).reason


def test_low_precision_is_decided_within_its_rounding() -> None:
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    off = whole * 1.01
    assert isinstance(loss_scale(whole, off, off / 2, [16.0], 8.0, (1.0, [1.0]), False), Unclear)
    assert loss_scale(whole, off, off / 2, [16.0], 8.0, (1.0, [1.0]), False, LOW_PRECISION) is Scale.MEAN
