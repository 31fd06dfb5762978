"""A loop of one's own on two "hosts", with what its strategy needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from joined_run import Run, joined_by
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
import plain
from manyhands.engines.hosts.engine import Hosts
from manyhands.own_loop.launch import launch

RULE = f"{Path(__file__).parents[2] / 'server/rules/own_rule.py'}:Half"

pytestmark = pytest.mark.usefixtures("credentials", "nothing_is_left")


def train() -> tuple[list[int], Tensor]:
    torch.manual_seed(0)
    model = plain.mlp()
    rule = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(*plain.rows(39), torch.arange(39))
    loader: Any
    model, rule, loader = mh.prepare(model, rule, DataLoader(data, batch_size=12, shuffle=True))
    rows: list[int] = []
    for _ in range(2):
        for x, y, numbers in loader:
            rule.zero_grad()
            plain.cross_entropy(model, (x, y)).backward()
            rule.step()
            rows += numbers.tolist()
    return rows, plain.flat(model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour", "easgd:bound=0,period=2", "update-sharing", f"downpour:rule={RULE}"])
def test_a_server_and_leases_across_hosts(strategy: str) -> None:
    engine = Hosts(local_workers=1)
    run = Run(engine, joined_by(1))
    found = run.during(lambda: launch(train, workers=2, strategy=strategy, servers=2, engine=engine, timeout_s=30.0))
    assert sorted(row for rows, _ in found for row in rows) == sorted([*range(39)] * 2)
    assert torch.equal(found[0][1], found[1][1])
