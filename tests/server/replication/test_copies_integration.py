"""A shard with a backup, in processes: its primary is stopped while workers push. Killed ones: tests/faults."""

import signal
import time
from typing import Any

import pytest
import torch

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.local.engine import Local
from manyhands.engines.survive import Survive
from manyhands.events import Event
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker

N = 50_000  # of which a shard's part goes through shared memory
PUSHES = 40


class Seen(Observer):
    def __init__(self) -> None:
        self.changes: list[str] = []

    def event(self, event: Event) -> None:
        if event.type == "change":
            self.changes.append(event.values["message"])


def counts(worker: Worker) -> list[float] | None:
    """Each worker pushes ones, and ticks; at the end the center has counted them."""
    server = worker.server
    assert server is not None
    server.initialize(torch.zeros(N))
    server.activate()
    worker.group.barrier()
    seen, center = torch.zeros(N), torch.empty(N)
    for _ in range(PUSHES):
        server.push(torch.ones(N))
        server.tick()
        server.pull(center)
        assert center.ge(seen).all()
        seen.copy_(center)
        time.sleep(0.02)  # so that what is killed is killed meanwhile
    server.deactivate()
    worker.group.barrier()
    server.center(center)
    worker.group.barrier()
    return [float(center.min()), float(center.max())] if worker.rank == 0 else None


@pytest.mark.slow
def test_a_stopped_primary_is_lost_and_every_push_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the shard has had two copies for a moment."""
    stopped, seen, plain, since = list[int](), Seen(), ElasticDriver._inject_faults, time.monotonic()

    def inject(driver: Any) -> None:
        nonlocal since
        plain(driver)
        primary = driver.copies.copy_of(0, "primary")
        if driver.copies.copy_of(0, "backup") is None or driver.membership.generation < 0:
            since = time.monotonic()
        elif not stopped and time.monotonic() - since > 0.4:
            driver._signal(primary, signal.SIGSTOP)
            stopped.append(primary)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    survive = Survive(copies=2, silence_s=2.0)
    server = ServerSpec(rule="outer", options={"rate": 1.0})
    spec = LaunchSpec(workers=2, server=server, servers=2, survive=survive, timeout_s=20.0, observer=seen)
    result, _ = Local().launch(counts, spec)
    assert len(stopped) == 1
    assert result == [2.0 * PUSHES] * 2
    for words in ("server shard 0 has one copy", "server shard 0 has 2 copies again", "sent no heartbeat for"):
        assert any(words in message for message in seen.changes), words
