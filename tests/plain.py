"""The naive reference: a plain PyTorch loop, small models and data for it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.data.sharding import epoch_order
from manyhands.replica.replica import Replica
from manyhands.strategies.base import Change, Strategy
from manyhands.worker import Worker

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
}


class Branches(nn.Module):
    """Tied weights, a frozen layer, and a branch whose parameters get a gradient only on batches with a positive first row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.sometimes = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.sometimes.weight
        self.last = nn.Linear(7, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        if x[0, 0] > 0:
            h = h + self.sometimes(h) + self.tied(h)
        return self.last(h)


def started(strategy: Strategy, replica: Replica, worker: Worker) -> Any:
    """The strategy's state, once all workers agree; a collective."""
    state = strategy.start(replica, worker)
    strategy.synchronize(replica, worker, state, Change())
    return state


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def rows(n: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g, dtype=dtype)
    return x, torch.randint(0, 3, (n,), generator=g)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def class_weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean whose denominator is not the number of rows."""
    mean = F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)
    return mean, CLASS_WEIGHTS[batch[1]].sum()


def task(**fields: Any) -> mh.Task:
    """Two epochs of four steps, the last on three rows."""
    common = {"model": mlp, "loss": cross_entropy, "optimizer": OPTIMIZERS["adamw"]}
    return mh.Task(**{**common, "train_data": rows(39), "batch_size": 12, "epochs": 2, **fields})


def batches(data: tuple[Tensor, Tensor], batch_size: int, seed: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in range(epochs):
        order = epoch_order(len(data[0]), seed, epoch)
        for start in range(0, len(order), batch_size):
            index = torch.as_tensor(order[start : start + batch_size])
            yield data[0][index], data[1][index]


def plain_loop(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    data: tuple[Tensor, Tensor],
    *,
    batch_size: int,
    epochs: int,
    seed: int = 0,
    loss: Callable[[nn.Module, Any], Any] = cross_entropy,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What anybody would write."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = schedule(optimizer) if schedule else None
    for batch in batches(data, batch_size, seed, epochs):
        optimizer.zero_grad()
        value = loss(model, batch)
        (value[0] if isinstance(value, tuple) else value).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
