"""Shards with a backup, in processes: primaries and backups are killed while workers push."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.local.engine import Local
from manyhands.engines.survive import Survive
from manyhands.errors import WorkerFailed
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


def killing(monkeypatch: pytest.MonkeyPatch, role: str, number: int = signal.SIGKILL) -> list[str]:
    """Once the shard has had two copies for a moment, that of a role gets this signal; "both": both get it."""
    killed: list[str] = []
    plain = ElasticDriver._inject_faults
    since = time.monotonic()

    def inject(driver: Any) -> None:
        nonlocal since
        plain(driver)
        backup, primary = driver.copies.copy_of(0, "backup"), driver.copies.copy_of(0, "primary")
        if backup is None or driver.membership.generation < 0:
            since = time.monotonic()
        elif not killed and time.monotonic() - since > 0.4:
            for name in ("primary", "backup") if role == "both" else (role,):
                driver._signal(primary if name == "primary" else backup, number)
            killed.append(role)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    return killed


def spec(**fields: Any) -> LaunchSpec:
    common = {"workers": 2, "server": ServerSpec(rule="add"), "survive": Survive(copies=2), "timeout_s": 20.0}
    return LaunchSpec(**{**common, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "number", "server", "servers"),
    [
        ("primary", signal.SIGKILL, ServerSpec(rule="add"), 2),
        ("backup", signal.SIGSTOP, ServerSpec(rule="add", bound=0), 1),
        ("primary", signal.SIGSTOP, ServerSpec(rule="outer", options={"rate": 1.0}), 1),
    ],
)
def test_every_push_counts_once(
    role: str, number: int, server: ServerSpec, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped copy is lost."""
    killed, seen = killing(monkeypatch, role, number), Seen()
    survive = Survive(copies=2, silence_s=2.0)
    result, _ = Local().launch(counts, spec(server=server, servers=servers, observer=seen, survive=survive))
    assert killed == [role]
    assert result == [2.0 * PUSHES] * 2
    assert any("server shard 0 has one copy" in message for message in seen.changes)
    assert "server shard 0 has 2 copies again" in seen.changes
    assert any("sent no heartbeat for" in message for message in seen.changes) == (number == signal.SIGSTOP)


@pytest.mark.slow
def test_both_copies_lost_end_the_run_and_name_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = killing(monkeypatch, "both")
    with pytest.raises(WorkerFailed, match=r"No copy of server shard 0 is left.*--resume"):
        Local().launch(counts, spec())
    assert killed == ["both"]
