"""An observed loop under every strategy that `mh.prepare` takes: it ends well, all workers hold one model, it has learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from observing import Program, Ran, alone, on_workers

IN_STEP = (
    "local-sgd:period=4",
    "diloco:period=4",
    "gossip",
    "allreduce:compress=topk:0.1",
    "allreduce:overlap=true",
    "local-sgd:period=end",
)
SHAPES = ("evaluating", "breaking")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ran]:
    keys = [(strategy, shape) for strategy in IN_STEP for shape in SHAPES]
    programs = [Program("shapes", (shape,), strategy=strategy) for strategy, shape in keys]
    return dict(zip(keys, on_workers(2, programs, tmp_path_factory.mktemp("strategies")), strict=True))


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    programs = [Program("shapes", (shape,)) for shape in SHAPES]
    return dict(zip(SHAPES, alone(programs, tmp_path_factory.mktemp("alone")), strict=True))


@pytest.mark.xdist_group("observed strategies")
@pytest.mark.parametrize("strategy", IN_STEP)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_step(strategy: str, shape: str, runs: dict[tuple[str, str], Ran], solo: dict[str, Ran]) -> None:
    """The first two steps are one process's: a whole batch and a probe. Then each worker has as many steps."""
    ran, one = runs[strategy, shape], solo[shape]
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(one.parameters)
    for own, expected in zip(ran.parameters[:2], one.parameters[:2], strict=True):
        assert torch.equal(own, expected) or (
            strategy.startswith(("allreduce:compress", "gossip")) and (own - expected).abs().max() < 1e-12
        )
    assert ran.dump["rates"] == one.dump["rates"]
    assert ran.dump["printed"][-1] < ran.dump["printed"][0]


SERVED = ("downpour", "quorum", "easgd", "agn", "update-sharing", "hogwild", "downpour:bound=0")


@pytest.mark.parametrize(
    "strategy", [pytest.param(one, marks=() if one == SERVED[0] else pytest.mark.slow) for one in SERVED]
)
def test_with_a_server_and_at_their_own_pace(strategy: str, tmp_path: Path, solo: dict[str, Ran]) -> None:
    """Schedules go along with the rows of all; evaluation inside of a pass is each worker's own."""
    programs = [Program("shapes", (shape,), strategy=strategy) for shape in ("step_lr",)]
    (ran,) = on_workers(2, programs, tmp_path, served=strategy)
    assert not ran.error, ran.said
    assert len(ran.parameters) > 5
    assert sorted({rate for rates in ran.dump["rates"] for rate in rates}, reverse=True) == pytest.approx(
        [1e-2, 7e-3, 4.9e-3]
    )
    assert ran.dump["printed"][-1] < ran.dump["printed"][0] + 0.2


@pytest.mark.slow
def test_evaluation_inside_of_a_pass_at_their_own_pace(tmp_path: Path) -> None:
    (ran,) = on_workers(2, [Program("shapes", ("evaluating",), strategy="downpour")], tmp_path, served="downpour")
    assert not ran.error, ran.said
