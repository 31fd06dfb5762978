"""Batch normalization over all workers' rows is that of one process, in values, statistics and gradients of gradients."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.replica.sync_batch_norm import Rows, synchronize

ROWS = 11
LAYERS: tuple[dict[str, Any], ...] = ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False})


def layer(options: dict[str, Any]) -> nn.BatchNorm2d:
    torch.manual_seed(1)
    made = nn.BatchNorm2d(5, **options).double()
    for p in made.parameters():
        nn.init.uniform_(p)
    return made


def measured(norm: nn.Module, x: Tensor, targets: Tensor, again: Tensor, share: float) -> tuple[list[Tensor], ...]:
    """Of two steps, by row: an output, gradients of a mean over rows, and of what these are multiplied with; of parameters
    the same gradients; statistics. share: of the rows, by which gradients of their mean are multiplied."""
    x = x.clone().requires_grad_()
    output = norm(x)
    loss = (norm(x) * targets).tanh().sum((1, 2, 3)).mean()
    wanted = [x, *norm.parameters()]
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    second = torch.autograd.grad((first[0] * again).sum(), wanted, allow_unused=True)
    by_row = [output, first[0] * share, second[0] * share]
    of_parameters = [one * share for one in (*first[1:], *second[1:]) if one is not None]
    return by_row, of_parameters, list(norm.buffers())


def on_each_worker() -> None:
    worker, draws = mh.worker(), torch.Generator().manual_seed(0)
    given = [torch.randn(ROWS, 5, 3, 2, generator=draws, dtype=torch.float64) for _ in range(3)]
    start, stop = worker.rank * ROWS // worker.size, (worker.rank + 1) * ROWS // worker.size
    for options in LAYERS:
        several, one = layer(options), layer(options)
        synchronize(several, Rows(worker.group, lambda: float(stop - start)))
        found = measured(several, *(tensor[start:stop] for tensor in given), (stop - start) / ROWS)
        by_row, of_parameters, statistics = measured(one, *given, 1.0)
        for sum_ in found[1]:
            worker.group.all_reduce_(sum_)
        expected = [whole[start:stop] for whole in by_row], of_parameters, statistics
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_copies_and_files_have_layers_of_torchs_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    synchronize(model, Rows(SoloGroup()))
    assert type(model[0]) is not nn.BatchNorm1d
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made[0]) is nn.BatchNorm1d
        assert made.state_dict().keys() == model.state_dict().keys()
    assert b"manyhands" not in pickle.dumps(model)


def trained(sync: bool, rows: int) -> list[Tensor]:
    """A loop over slices, prepared."""
    torch.manual_seed(0)
    x = torch.randn(rows, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(x, 7)
    model, optimizer, loader = mh.prepare(model, optimizer, loader, batches="slices", sync_batch_norm=sync)
    for batch in loader:
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
    return [value.double() for value in model.state_dict().values()]


def program() -> tuple[list[Tensor], list[Tensor]]:
    on_each_worker()
    return trained(True, 23), trained(False, 21)


@pytest.mark.slow
@pytest.mark.xdist_group("whole batches")
def test_several_workers_are_one(capfd: pytest.CaptureFixture[str]) -> None:
    """The loop's last batch has two rows for three workers: one of them computes on stand-ins."""
    expected, other = trained(True, 23), trained(True, 21)
    for synchronized, separate in mh.launch(program, workers=3, engine="local"):
        torch.testing.assert_close(synchronized, expected, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(separate[0], other[0])
    said = capfd.readouterr().err
    assert said.count("BatchNorm1d (1 layer) takes the statistics of each worker's own rows") == 1
