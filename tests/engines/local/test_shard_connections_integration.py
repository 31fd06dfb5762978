"""Workers and shards of a run whose members may change: connections come from the driver, lost workers are fenced."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.local.engine import Local
from manyhands.engines.survive import Survive
from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker

N = 8


def pushes(worker: Worker) -> list[float] | None:
    """Worker 1's first process dies after two pushes, the next one pushes three times; then worker 0 reads the center."""
    server = worker.server
    assert server is not None
    generation = -1
    while worker.join(blank=generation < 0):
        generation = worker.generation
        if generation == 0:
            server.initialize(torch.zeros(N))
        server.activate()
        if worker.worker_id == 1:
            for _ in range(3 if generation else 2):
                server.push(torch.ones(N))
            if generation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        server.deactivate()
        try:
            worker.group.barrier()
            if generation < 1 or worker.size < 2:
                worker.group.barrier()  # until the other one is lost, or another takes its place
                continue
        except PeerLost:
            continue
        if worker.rank == 0:
            center = torch.empty(N)
            server.center(center)
            return center.tolist()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_lost_worker_is_fenced_and_the_next_process_begins_anew(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(
        ElasticDriver, "_shards_closed", lambda _, worker_id, pushes: closed.append((worker_id, pushes.numbers))
    )
    spec = LaunchSpec(
        workers=2, servers=servers, server=ServerSpec(rule="add"), survive=Survive(max_losses=1), timeout_s=20
    )
    result, _ = Local().launch(pushes, spec)
    assert result == [5.0] * N
    assert closed == [(1, [2] * servers)]
