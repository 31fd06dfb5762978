"""Whether a loss is a mean or a sum over rows, from the gradients of a batch and of its parts: with and without noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True)
class Loss:
    """A loss of a script, what it is, and what it counts, where that is not its rows."""

    of: Callable[[Tensor, Tensor], Tensor]
    scale: Scale
    stated: Callable[[Tensor], float] | None = None


LOSSES = {
    "mean": Loss(F.cross_entropy, Scale.MEAN),
    "sum": Loss(lambda z, y: F.cross_entropy(z, y, reduction="sum"), Scale.SUM),
    "sum over a constant": Loss(lambda z, y: F.cross_entropy(z, y, reduction="sum") / 64, Scale.SUM),
    "mean over tokens": Loss(
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
        Scale.MEAN,
        lambda y: float((y > 0).sum()),
    ),
    "class weights": Loss(lambda z, y: F.cross_entropy(z, y, WEIGHTS), Scale.MEAN),
    "scaled by AMP": Loss(lambda z, y: F.cross_entropy(z, y) * 65536.0, Scale.MEAN),
}


def measured(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, float, float]:
    """(gradient [D], loss, what the loss counts) of one worker's rows."""
    model.zero_grad()
    value = loss.of(model(x), y)
    divisor = loss_graph.divisor_of(value)
    value.backward()
    counted = loss.stated(y) if loss.stated else float(len(y)) if divisor is None else divisor
    return (
        torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]),
        float(value.detach()),
        counted,
    )


def found(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, workers: int, augment: float, noisy: bool
) -> Scale | Unclear:
    """What workers find that get the batch, its parts, or, if there are two, the batch twice."""

    def augmented(rows: Tensor) -> Tensor:
        return rows + augment * torch.randn_like(rows)

    whole, value, total = measured(model, augmented(x), y, loss)
    halves = [torch.arange(len(x)).repeat(2)] if workers == 2 else list(torch.arange(len(x)).tensor_split(workers - 1))
    parts = [measured(model, augmented(x[own]), y[own], loss) for own in halves]
    mean, added = predictions([part[0] for part in parts], [part[2] for part in parts], total)
    return loss_scale(
        whole, mean, added, [part[2] for part in parts], total, (value, [part[1] for part in parts]), noisy
    )


def test_never_wrong_and_seldom_unclear() -> None:
    """With and without dropout and augmentation, of few rows and many, in parts and twice."""
    unclear, seeds = 0, range(12)
    for seed, (kind, loss) in product(seeds, LOSSES.items()):
        drop, augment, rows = (0.0, 0.1, 0.5)[seed % 3], float(seed // 3 % 2), (8, 64)[seed // 6 % 2]
        torch.manual_seed(seed)
        model, x, y = mlp(drop), torch.randn(rows, 20), torch.randint(CLASSES, (rows,))
        y[0] = 2  # something counts
        scale = found(model, x, y, loss, 2 + (seed + seed // 12) % 2, augment, drop > 0 or augment > 0)
        assert isinstance(scale, Unclear) or scale is loss.scale, (seed, kind)
        unclear += isinstance(scale, Unclear)
    assert unclear <= 0.03 * len(seeds) * len(LOSSES)


def test_contrast_within_a_batch_is_neither_without_noise() -> None:
    def contrast(z: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(z, dim=1)
        return F.cross_entropy(z @ z.detach().roll(1, 0).T / 0.1, torch.arange(len(z)))

    torch.manual_seed(0)
    model, x, y = mlp(0.0), torch.randn(24, 20), torch.randint(CLASSES, (24,))
    for workers in (2, 3, 4):
        assert isinstance(found(model, x, y, Loss(contrast, Scale.MEAN), workers, 0.0, False), Unclear), workers


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
