"""An optimizer whose state lies in a file steps as one whose state is in memory."""

import copy
import gc
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from manyhands.errors import ManyhandsError
from manyhands.parallel.offload import StateOnDisk
from manyhands.process_memory import resident

WIDE = 512


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=1e-2, amsgrad=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_the_same_bits(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    plain, away = model(), model()
    optimizers = [make(plain), make(away)]
    schedules = [LinearLR(optimizer, 1.0, 0.1, total_iters=5) for optimizer in optimizers]
    disk = StateOnDisk(optimizers[1])
    for step in range(5):
        x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
        for one in (plain, away):
            one.zero_grad()
            one(x).square().sum().backward()
        if step == 3:  # as after a checkpoint: the state is other tensors
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizers[0].step()
        disk.step()
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), away.parameters(), strict=True))
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [
        len(group["params"]) for group in optimizers[0].param_groups
    ]
    for p, q in zip(plain.parameters(), away.parameters(), strict=True):
        for name, value in optimizers[0].state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1].state[q][name])), name


def test_memory_is_for_one_parameters_state() -> None:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))  # 4 MB each
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(layers.parameters())
    disk = StateOnDisk(optimizer)
    disk.step()
    gc.collect()
    before = resident(name="RssFile")
    disk.step()
    grown = resident(name="RssFile") - before
    assert grown < 2 * (4 << 20)
    state = next(iter(optimizer.state.values()))["exp_avg"]
    state.add_(0)
    assert resident(name="RssFile") - before >= grown  # it comes back where it is asked for


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    layer = nn.Linear(WIDE, WIDE)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ManyhandsError, match="TMPDIR"):
        StateOnDisk(optimizer).step()
    assert len(optimizer.param_groups[0]["params"]) == 2
