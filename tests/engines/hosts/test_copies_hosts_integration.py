"""Server shards with copies, of which workers of another host are told where the primary listens."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_run import Run, joined_by

import manyhands as mh
import plain
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.hosts.engine import Hosts

TRAINING: dict[str, Any] = {
    "workers": 2,
    "strategy": "downpour:bound=0",
    "survive": "copies=2",
    "threads_per_worker": 1,
}


def killing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The primary of shard 0 is killed once worker 1, of another host, has made some steps."""
    killed: list[int] = []
    plain_call = ElasticDriver._inject_faults

    def inject(driver: ElasticDriver) -> None:
        plain_call(driver)
        primary = driver.copies.copy_of(0, "primary")
        if not killed and driver.monitor.processes[1].step >= 4 and driver.copies.copy_of(0, "backup") is not None:
            assert primary is not None
            killed.append(primary)
            driver._signal(primary, signal.SIGKILL)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_a_primary_is_killed_while_a_worker_of_another_host_pushes(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    task = plain.task(epochs=20)
    wanted = mh.train(task, engine="local", **TRAINING)
    killed = killing(monkeypatch)
    run = Run(Hosts(local_workers=1, tls=tls), joined_by(1, tls=tls))
    result = run.during(lambda: mh.train(task, engine=run.engine, **TRAINING))
    assert killed == [-1]
    assert torch.equal(result.parameters, wanted.parameters)
    assert result.rows == wanted.rows
