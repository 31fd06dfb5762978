"""Stages on simulated workers: the seconds that a schedule takes on virtual clocks, and what is refused."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import BATCH, LENGTH, MICRO, TASKS, WIDTH
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.driver_client import SimDriverClient
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput, PeerLost, WorkerFailed
from manyhands.worker import Worker

ROW_S = 0.75  # seconds of the whole model for a row


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def chain(length: int, rows: int, **fields: Any) -> mh.Task:
    """So many equal layers; each step is over `rows` rows."""
    draws = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2 * rows, 4, generator=draws) for _ in range(2))
    return mh.Task(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(length))),
        loss=squares,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=torch.utils.data.TensorDataset(x, y),
        batch_size=rows,
        **fields,
    )


@dataclass(frozen=True)
class Passed:
    """One pass of a stage, on its worker's clock."""

    rank: int
    forward: bool
    began: float
    ended: float


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Passed]:
    """Of the runs of this test, as the clocks have them."""
    found: list[Passed] = []
    plain = SimDriverClient.begin_passes

    def begin_passes(self: SimDriverClient, *given: Any) -> Any:
        passed, timeline = plain(self, *given), self._lease_server.timeline

        def noted(forward: bool, share: float) -> None:
            began = timeline.now
            passed(forward, share)
            found.append(Passed(self._rank, forward, began, timeline.now))

        return noted

    monkeypatch.setattr(SimDriverClient, "begin_passes", begin_passes)
    return found


def steps_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "step"]


# -- time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "micro_batches", "bubble"),
    [(4, 4, 3 / 7), (4, 8, 3 / 11), (4, 32, 3 / 35), (8, 32, 7 / 39)],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_share_of_a_step_in_which_a_stage_waits(
    stages: int, micro_batches: int, bubble: float, schedule: str, passes: list[Passed], tmp_path: Path
) -> None:
    """Equal stages on a network that costs nothing: (K - 1) / (M + K - 1), and as many micro-batches in flight as there are
    stages from this one to the end."""
    run = mh.train(
        chain(stages, 32),
        workers=stages,
        engine=f"sim:compute='row={ROW_S}'",
        model_parallel=f"stages={stages},micro_batches={micro_batches},schedule={schedule}",
        threads_per_worker=1,
        run_dir=tmp_path / "run",
    )
    assert run.steps == 2
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 * stages
    for event in steps:
        parts = [event["values"][f"{part}_s"] for part in ("input", "compute", "exchange", "wait")]
        assert parts[1] == pytest.approx(32 * ROW_S / stages, rel=1e-12)
        assert parts[3] / sum(parts) == pytest.approx(bubble, rel=1e-12)
    for rank in range(stages):
        own = sorted((one for one in passes if one.rank == rank), key=lambda one: one.ended)
        assert len(own) == 2 * 2 * micro_batches
        assert all(one.ended <= later.began for one, later in pairwise(own))
        for tick in (own[: 2 * micro_batches], own[2 * micro_batches :]):
            computes = sum(one.ended - one.began for one in tick)
            step_s = 32 * ROW_S / stages * (1 + (stages - 1) / micro_batches)
            assert 1 - computes / step_s == pytest.approx(bubble, rel=1e-12)
            held = most = 0
            for one in tick:
                held += 1 if one.forward else -1
                most = max(most, held)
            assert most == (min(stages - rank, micro_batches) if schedule == "1f1b" else micro_batches)
