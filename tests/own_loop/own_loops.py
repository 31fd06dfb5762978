"""The plain training script of these tests, and its prepared form: the same loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plain
from manyhands.own_loop.prepare import prepare_on
from manyhands.own_loop.session import Session
from manyhands.worker import Worker

_BUILDING = threading.Lock()
Schedule = Callable[[torch.optim.Optimizer], Any]
COSINE: Schedule = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)  # noqa: E731


def loader_of(n: int = 39, batch_size: int = 12, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*plain.rows(n)), batch_size=batch_size, **options)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    *,
    schedule: Any = None,
    epochs: int = 3,
    clip: float | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    loss: Callable[[nn.Module, Any], Tensor] = plain.cross_entropy,
) -> None:
    """What anybody would write."""
    for _ in range(epochs):
        for i, batch in enumerate(loader):
            if i % accumulate == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss(model, batch).backward()
            if (i + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()


def seeded(make: Callable[[], nn.Module] = plain.mlp) -> nn.Module:
    """The same model for everybody; workers that are threads share one random state, so one builds at a time."""
    with _BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def train_plain(
    optimizer: str = "sgd",
    make: Callable[[], nn.Module] = plain.mlp,
    loader: Any = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(make)
    rule = plain.OPTIMIZERS[optimizer](model)
    loop(model, rule, loader or loader_of(), schedule=schedule and schedule(rule), **options)
    return model, rule


def train_prepared(
    worker: Worker,
    optimizer: str = "sgd",
    make: Callable[[], nn.Module] = plain.mlp,
    loader: Any = None,
    schedule: Schedule | None = None,
    *,
    strategy: str = "allreduce",
    schedule_first: bool = False,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(make)
    rule = plain.OPTIMIZERS[optimizer](model)
    early = schedule(rule) if schedule and schedule_first else None
    model, rule, shares = prepare_on(Session(worker), model, rule, loader or loader_of(), strategy=strategy)
    loop(model, rule, shares, schedule=early or (schedule and schedule(rule)), **options)
    return model, rule


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, Tensor)
    ]
