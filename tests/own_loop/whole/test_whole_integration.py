"""Workers that see whole batches: a prepared loop is one process's, and workers that differ are named with their lines."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.errors import ManyhandsError

ONES = torch.ones(8, 6)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("whole batches")]


class Gate(nn.Module):
    """Rows meet in it, as soon as its weight has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * x.sum(0)


def trained(prepare: Callable[..., Any]) -> list[float]:
    """Losses and parameters of a loop whose rows meet, in batch normalisation and in the loss."""
    torch.manual_seed(0)
    data = TensorDataset(*torch.randn(50, 10, dtype=torch.float64).split([6, 4], 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD([*model.parameters(), *(gate := Gate().double()).parameters()], 0.1, momentum=0.9)
    (model, gate), optimizer, loader = prepare([model, gate], optimizer, DataLoader(data, 12, shuffle=True))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        output = gate(model(x))
        loss = F.cross_entropy(output @ y.T, torch.arange(len(x))) + output.var(0).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    tensors = *model.state_dict().values(), gate.weight.detach()
    return [*losses, *nn.utils.parameters_to_vector(tensors).tolist()]


def test_a_prepared_loop_is_one_process() -> None:
    alone = trained(lambda *given: given)
    for strategy in ("allreduce", "allreduce:overlap=true"):
        found = mh.launch(trained, mh.prepare, workers=3, strategy=strategy, batches="whole", engine="local")
        assert all(one == pytest.approx(alone, rel=1e-10, abs=1e-12) for one in found), strategy


class Sequences(nn.Module):
    """[T, B] -> [T · B, 5]; its mask is made at the first call and for another T."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.mask = nn.Embedding(5, 4), nn.LSTM(4, 4), torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.mask) != len(x):
            self.mask = torch.linspace(0, 1, len(x), dtype=torch.float64)[:, None, None]
        outputs, _ = self.layer(self.words(x) * self.mask)
        return outputs.flatten(0, 1)


def of_other_lengths() -> Iterator[float]:
    model = Sequences().double()
    _, optimizer = mh.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    for length in (6, 6, 4, 1):
        optimizer.zero_grad()
        x = torch.randint(5, (length, 7))
        F.cross_entropy(model(x), x.flatten() % 4).backward()
        optimizer.step()
        yield from (p.square().sum().item() for p in model.parameters())


def sparse() -> Iterator[float]:
    model = nn.EmbeddingBag(9, 3, sparse=True).double()
    _, optimizer = mh.prepare(model, torch.optim.SparseAdam(model.parameters(), 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(9, (7, 2))).square().mean().backward()
        optimizer.step()
    yield from model.weight.flatten().tolist()


def differentiated_again() -> Iterator[float]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    mh.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.randn(7, 3, dtype=torch.float64)).square().mean().backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    yield from (g.norm().item() for g in torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)[:3])


def two_passes_at_once() -> Iterator[float]:
    """Over one loader, whose process reads ahead; an iterator was left before."""
    model = nn.Linear(3, 1).double()
    _, optimizer = mh.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = DataLoader(TensorDataset(torch.randn(17, 3, dtype=torch.float64)), 5, shuffle=True, num_workers=1)
    next(iter(loader))
    for (x,), (u,) in zip(loader, loader, strict=True):
        optimizer.zero_grad()
        (model(x).square().mean() + model(u).mean()).backward()
        optimizer.step()
        yield from model.weight.flatten().tolist()


def all_kinds() -> list[float]:
    torch.manual_seed(0)
    return [value for kind in (of_other_lengths, sparse, differentiated_again, two_passes_at_once) for value in kind()]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_other_kinds_of_calls_and_gradients() -> None:
    alone = all_kinds()
    for found in mh.launch(all_kinds, workers=3, engine="local"):
        assert found == pytest.approx(alone, rel=1e-9, abs=1e-12)


def steps(before: Any) -> None:
    torch.manual_seed(0)
    model, rate = nn.Linear(6, 1), 0.1 + (before == "rates") * mh.worker().rank
    mh.prepare(model, torch.optim.SGD(model.parameters(), rate), batches="whole")
    for step in range(12):
        x = before(model, step)
        model(x if isinstance(x, torch.Tensor) else ONES).mean().backward()


def branches(model: nn.Module, step: int) -> None:
    if (step % 2 == 0) != (mh.worker().rank == 1 and step == 4):
        model(ONES).mean().backward()
    else:
        model(ONES).mean().backward()


def looks_in_a_thread(model: nn.Module, step: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model(ONES).tolist).result()


SAYS: dict[Any, str] = {
    "rates": "worker 1 on .* differs from worker 0: the optimizer's lr is 1.1",
    looks_in_a_thread: "a thread of the script looks at an output of a call that workers have cut",
    lambda *_: torch.full((8, 6), float(mh.worker().rank)): "other values: argument 0 of this call is .* on worker 1",
    lambda _, step: torch.full((8, 6), float(step == 2 and mh.worker().rank)): r"of Linear in test_whole.*py:\d+ is",
    branches: r"worker 0 calls backward in test.*py:\d+, worker 1 in test_whole_integration.py:\d+",
    lambda model, step: mh.worker().rank == step == 1 and bool(model(ONES).mean()): r"different operat.* in line \d+",
    lambda model, _: model.bias.data.add_(mh.worker().rank) is None: "at backward 1, bias of a Linear of worker 1 is",
}


@pytest.mark.parametrize("before", SAYS)
def test_workers_that_differ_are_named(before: Any) -> None:
    with pytest.raises(ManyhandsError, match=SAYS[before]):
        mh.launch(steps, before, workers=2, engine="local")
