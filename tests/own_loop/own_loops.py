"""The plain training script of these tests, and its prepared form: the same loop."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
import plain
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.worker import Worker

T = TypeVar("T")
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


def prepared(worker: Worker, strategy: str, *others: Any, session: Session | None = None) -> Any:
    """A model and its optimizer, with what else is given to prepare."""
    model = seeded()
    return prepare_slices(session or Session(worker), model, plain.OPTIMIZERS["sgd"](model), *others, strategy=strategy)


def begun(
    worker: Worker | None,
    make: Callable[[], nn.Module] = plain.mlp,
    optimizer: str = "sgd",
    loader: Any = None,
    **how: Any,
) -> tuple[Session, nn.Module, torch.optim.Optimizer, Any]:
    """(session, model, optimizer, loader), prepared; without a worker as a plain script has them."""
    session, model, loader = Session(worker or Worker()), seeded(make), loader or loader_of()
    rule = plain.OPTIMIZERS[optimizer](model)
    if worker is None:
        return session, model, rule, loader
    return session, *prepare_slices(session, model, rule, loader, **how)


def trained(
    worker: Worker | None,
    optimizer: str = "sgd",
    make: Callable[[], nn.Module] = plain.mlp,
    loader: Any = None,
    schedule: Schedule | None = None,
    strategy: str = "allreduce",
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer after `loop`; without a worker those of a plain script."""
    _, model, rule, loader = begun(worker, make, optimizer, loader, strategy=strategy)
    loop(model, rule, loader, schedule=schedule and schedule(rule), **options)
    return model, rule


def train_shuffled(optimizer: str, prepare: bool, processes: int = 0, accumulate: int = 1) -> Tensor:
    """39 rows in batches of 12, shuffled by the global generator; three epochs; the flat parameters."""
    torch.manual_seed(0)
    model: Any = plain.mlp()
    rule = plain.OPTIMIZERS[optimizer](model)
    loader: Any = loader_of(shuffle=True, num_workers=processes)
    if prepare:
        model, rule, loader = mh.prepare(model, rule, loader)
    loop(model, rule, loader, schedule=COSINE(rule), clip=0.05, accumulate=accumulate)
    return plain.flat(model)


def on(size: int, strategy: str, program: Callable[[Worker], T], shards: int = 1) -> list[T]:
    """`together`, with the server that the strategy needs."""
    spec = strategy_of(strategy).server()
    clients = [] if spec is None else InProcessServers(spec, workers=size, shards=shards, timeout_s=20.0).clients
    return together(size, program, clients)


def assert_all_are(found: Iterable[Tensor], expected: Tensor, within: float = 1e-10) -> None:
    """Each worker's parameters are these."""
    for got in found:
        assert (got - expected).abs().max() < within


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
