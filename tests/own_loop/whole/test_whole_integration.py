"""Workers that see whole batches: a prepared loop is one process's, and workers that differ are named with their lines."""

from collections.abc import Callable
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


def steps(before: Callable[[nn.Module, int], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    mh.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches="whole")
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


SAYS = {
    looks_in_a_thread: "a thread of the script looks at an output of a call that workers have cut",
    lambda *_: torch.full((8, 6), float(mh.worker().rank)): "other values: argument 0 of this call is .* on worker 1",
    lambda _, step: torch.full((8, 6), float(step == 2 and mh.worker().rank)): r"of Linear in test_whole.*py:\d+ is",
    branches: r"worker 0 calls backward in test.*py:\d+, worker 1 in test_whole_integration.py:\d+",
    lambda model, step: mh.worker().rank == step == 1 and bool(model(ONES).mean()): r"different operat.* in line \d+",
    lambda model, _: model.bias.data.add_(mh.worker().rank) is None: "at backward 1, bias of a Linear of worker 1 is",
}


@pytest.mark.parametrize("before", SAYS)
def test_workers_that_differ_are_named(before: Callable[..., Any]) -> None:
    with pytest.raises(ManyhandsError, match=SAYS[before]):
        mh.launch(steps, before, workers=2, engine="local")
