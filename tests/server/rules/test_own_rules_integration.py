"""A server rule of one's own on each engine: plain SGD with half of each update is SGD at half the rate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from own_rule import RULE

import manyhands as mh
import plain
from manyhands.engines.base import Engine
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim


def trained(engine: Engine | str, rule: str, rate: float, *, bound: str = "bound=0", **options: object) -> torch.Tensor:
    task = plain.task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate))
    strategy = f"downpour:{bound},rule={rule}"
    run = mh.train(task, engine=engine, strategy=strategy, **({"workers": 2, "servers": 2} | options))  # type: ignore[arg-type]
    return plain.flat(run.model)


@pytest.mark.parametrize("copies", ["", pytest.param("copies=2", marks=pytest.mark.slow)])
def test_on_processes_here_and_in_the_simulator(copies: str, local: Local) -> None:
    wanted = trained(Sim(), "add", 0.01)
    ways: list[tuple[Engine, dict[str, Any]]] = [(local, {"survive": copies})] if copies else [(local, {}), (Sim(), {})]
    for engine, options in ways:
        assert (trained(engine, RULE, 0.02, **options) - wanted).abs().max() < 1e-12, engine


def test_replayed_once_it_is_named(local: Local, tmp_path: Path) -> None:
    parameters = trained(local, RULE, 0.02, bound="bound=none", run_dir=tmp_path)
    strategy = f"downpour:rule={RULE}"
    task = plain.task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02))
    with pytest.raises(mh.BadInput, match="name it, if you trust it"):
        mh.replay(tmp_path, task=task)
    replayed = mh.replay(tmp_path, task=task, strategy=strategy)
    assert replayed.identical
    assert parameters.isfinite().all()


def test_a_rule_that_is_none_is_refused_before_anything_starts(local: Local) -> None:
    file = RULE.rpartition(":")[0]
    with pytest.raises(mh.UnknownName, match="has no 'Halves'.*did you mean 'Half'"):
        trained(local, f"{file}:Halves", 0.02)
