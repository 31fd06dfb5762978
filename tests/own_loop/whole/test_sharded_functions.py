"""Each function that works on a worker's part gives what it gives for the gathered output: value, gradients, no message."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import RowLayout
from manyhands.own_loop.whole.lazy import Lazy, ShardedOutput
from manyhands.own_loop.whole.sharded_functions import parts_of
from manyhands.testing.threads import together

ROWS, WIDE = 7, 5
TOLERANCE = defaultdict(lambda: 1e-12, {torch.float32: 1e-6})


def on_workers(size: int, function: Callable[[Workers], Any]) -> list[Any]:
    return together(size, lambda worker: function(Workers(worker.group)))


BATCH_FIRST = """
F.relu(x); x.exp(); (x - y) ** 2; 1 - 2 * x; 2.0 ** x; x.clamp(-0.5, 0.5); torch.where(x > 0, x, y);
torch.lerp(x, y, 0.3); x * y[:, :1]; x + y[0]; x * y.mean(); x + y[:1]; x > y; (x > 0) & (y > 0);
x.masked_fill(y > 0, -1.0); x.float(); x.type_as(y.float()); x.detach() * 2; F.gelu(x); x.softmax(1);
F.log_softmax(x, dim=-1); F.normalize(x, dim=1); F.normalize(x); x.argmax(1); x.argmax(dim=1, keepdim=True);
x.max(1)[0]; torch.max(x, y); x.amax(-1); x.sum(1); x.mean(dim=-1, keepdim=True); x.logsumexp(1); x.norm(dim=1);
x.sum(); x.mean(); x.sum(0); x.mean(0, keepdim=True); (x.argmax(1) == y.argmax(1)).sum();
(x.argmax(1) == y.argmax(1)).float().mean(); x.view(-1); x.unsqueeze(1); x[None] * 2; x[:, :1].squeeze(1); x.T;
x.t().t(); x[:, 2]; x[:, 1:3]; x[..., -1]; torch.cat([x, y], 1); torch.stack([x, y], 1); F.mse_loss(x, y);
F.mse_loss(x, y, reduction="sum"); F.mse_loss(x, y, reduction="none"); nn.MSELoss()(x, y); F.l1_loss(x, y);
F.smooth_l1_loss(x, y, beta=0.5); F.huber_loss(x, y, delta=0.3); F.binary_cross_entropy(x.sigmoid(), y.sigmoid());
F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].abs());
F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=y[:, :1].abs());
F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean");
F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction="sum", log_target=True); F.cross_entropy(x, y.argmax(1));
F.cross_entropy(x, y.argmax(1), ignore_index=1);
F.cross_entropy(x, y.argmax(1), weight=y[0].abs(), ignore_index=0);
F.cross_entropy(x, y.argmax(1), label_smoothing=0.2);
F.cross_entropy(x, y.argmax(1), label_smoothing=0.2, weight=y[1].abs(), ignore_index=3);
F.cross_entropy(x, y.softmax(1)); F.cross_entropy(x, y.argmax(1), reduction="none");
F.cross_entropy(x, y.argmax(1), reduction="sum"); F.nll_loss(x.log_softmax(1), y.argmax(1));
nn.CrossEntropyLoss(ignore_index=2)(x, y.argmax(1)); F.mse_loss(x, y) + 0.1 * x.abs().mean() - x.sum() / 9;
x.square().mean() + y.square().sum() * 0.01; x.mean() * y.mean()
"""


SEQUENCES = """
x.view(-1, WIDE); x.flatten(0, 1).unflatten(1, (1, WIDE));
F.cross_entropy(x.view(-1, WIDE), y.view(-1, WIDE).argmax(1));
x[:, -1] if x.shape[0] == ROWS else x[-1]; x.permute(1, 0, 2) * 2; x.argmax(-1); x.mean(-1);
x.reshape(-1, WIDE).mean(1); F.mse_loss(x, y); x * y[0, 0]
"""


@pytest.mark.parametrize("size", [2, 3])
def test_on_parts_as_on_the_whole(size: int) -> None:
    check(BATCH_FIRST, (ROWS, WIDE), RowLayout(0, ROWS), size)
    check(SEQUENCES + "; F.cross_entropy(x.transpose(1, 2), y.argmax(2))", (ROWS, 4, WIDE), RowLayout(0, ROWS), size)
    check(SEQUENCES, (4, ROWS, WIDE), RowLayout(1, ROWS), size)


def test_targets_of_which_each_worker_has_its_rows() -> None:
    """A mean divides by what all workers count."""
    x, target = torch.randn(ROWS, WIDE, dtype=torch.float64), torch.arange(ROWS) % WIDE
    target[1] = -100
    weight = torch.linspace(1, 2, WIDE, dtype=torch.float64)
    for named in ({}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}):

        def program(workers: Workers, named: Any = named) -> tuple[float, bool]:
            shard = RowLayout(0, ROWS)
            output, own = (ShardedOutput.of(workers.cut(t, shard), shard, workers) for t in (x, target))
            loss = F.cross_entropy(output, own, **named)
            return float(loss.whole()), bool(workers.gathered)

        expected = pytest.approx(float(F.cross_entropy(x, target, **named)), rel=1e-12)
        assert on_workers(3, program) == [(expected, False)] * 3, named


def check(table: str, shape: tuple[int, ...], shard: RowLayout, size: int) -> None:
    """table: expressions of an output x and a tensor y, of this shape."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    for name in filter(None, map(str.strip, table.replace("\n", " ").split(";"))):
        function = eval(f"lambda x, y: {name}", {"torch": torch, "F": F, "nn": nn, "ROWS": ROWS, "WIDE": WIDE})
        alone = computed(function, x, y)

        def on_part(workers: Workers, function: Any = function) -> Any:
            leaf = x.clone().requires_grad_()
            part = workers.cut(leaf, shard)
            output = ShardedOutput.of(part, shard, workers)
            result = function(output, y)
            assert isinstance(result, Lazy)
            assert not workers.gathered
            gradient = None
            if result.requires_grad:
                seed = weights(result)
                starts, seeds = parts_of([result], [seed])
                torch.autograd.backward(starts, seeds)
                gradient = workers.sum_(leaf.grad) / size
            return result.whole().detach(), gradient

        for value, gradient in on_workers(size, on_part):
            within = TOLERANCE[alone[0].dtype]
            assert (value.shape, value.dtype) == (alone[0].shape, alone[0].dtype), name
            assert torch.allclose(value, alone[0], within, within, equal_nan=True), name
            assert (gradient is None) == (alone[1] is None), name
            assert gradient is None or torch.allclose(gradient, alone[1], within, within, equal_nan=True), name


def computed(function: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    leaf = x.clone().requires_grad_()
    result = function(leaf, y)
    if result.requires_grad:
        result.backward(weights(result))
    return result.detach(), leaf.grad


def weights(result: Tensor) -> Tensor:
    """A gradient in which no two numbers are alike."""
    return torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
