"""Workers and hosts are lost where a server's shards, which lie on the driver's host, serve several: each row counts once."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

import numbered_rows
import pytest
from fault_harness import Patient, fired, nothing_left
from joined_run import Run, joined_by

import manyhands as mh
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.hosts.engine import Hosts

BATCH, ROWS = 12, 12 * 13


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, and a folder to which nobody else writes: what is left there is this run's."""
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _one_is_lost(worker: mh.Worker) -> bool:
    """At their own pace the others would take all rows before it."""
    return worker.broken or worker.interrupted or worker.generation > 0


def train(faults: str, strategy: str, tls: bool = False, **options: Any) -> mh.Run:
    """Two workers here, of whom one is worker 0, and one of a host that joins."""
    waits = (
        {}
        if strategy == "quorum" or "bound=0" in strategy
        else {"loss": Patient(until=_one_is_lost, call=3, loss=numbered_rows.minus_mean)}
    )
    of = numbered_rows.task(ROWS, BATCH, epochs=1, **waits)
    run = Run(Hosts(local_workers=2, tls=tls, faults=faults), joined_by(1, tls=tls))
    fields: dict[str, Any] = {"survive": "max_losses=3,silence_s=5", "threads_per_worker": 1, **options}
    return run.during(lambda: mh.train(of, engine=run.engine, workers=3, strategy=strategy, **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "faults", "tls"),
    [
        ("downpour:bound=0", "kill=2@step:4", True),
        pytest.param("downpour", "kill=2@step:1", True, marks=pytest.mark.slow),
        pytest.param("downpour:push_every=3,pull_every=3", "kill=2@step:1", False, marks=pytest.mark.slow),
        pytest.param("downpour:bound=0", "kill=0@step:3:exchange,kill=2@step:6", False, marks=pytest.mark.slow),
        pytest.param("quorum", "kill=2@step:4:exchange", False, marks=pytest.mark.slow),
    ],
)
def test_each_row_counts_once_though_a_worker_is_lost(strategy: str, faults: str, tls: bool) -> None:
    with nothing_left():
        run = train(faults, strategy, tls)
    fired(run, *faults.split(","))
    numbered_rows.trained_once(run, BATCH, (4, 6, 8, 12))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour", "downpour:bound=0"])
def test_a_worker_of_another_host_and_the_primary_are_lost(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, plain_call, fault = [], ElasticDriver._inject_faults, "kill=2@step:1"

    def inject(driver: ElasticDriver) -> None:
        plain_call(driver)
        primary = driver.copies.copy_of(0, "primary")
        if not killed and driver.monitor.processes[0].step >= 3 and driver.copies.copy_of(0, "backup") is not None:
            assert primary is not None
            killed.append(primary)
            driver._signal(primary, signal.SIGKILL)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    run = train(fault, strategy, survive="max_losses=3,silence_s=5,copies=2")
    assert killed == [-1]
    fired(run, fault)
    numbered_rows.trained_once(run, BATCH, (4, 6, 8, 12))
