"""train() over two "hosts" of one machine: a server's strategies, replay, stop and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from joined_run import Run, joined_by
from test_train_server_integration import leases, task

import manyhands as mh
from manyhands.engines.cores import usable_cores
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local
from manyhands.errors import Preempted
from manyhands.events import Event
from preempting import Preempting


@pytest.fixture(autouse=True)
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))


def train(given: mh.Task, strategy: str, *, tls: bool = True, **options: Any) -> mh.Run:
    """One worker here, and one that joins."""
    run = Run(Hosts(local_workers=1, tls=tls), joined_by(1, tls=tls))
    fields = {"engine": run.engine, "strategy": strategy, "workers": 2, "threads_per_worker": 1, **options}
    return run.during(lambda: mh.train(given, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour", "update-sharing"])
def test_workers_of_two_hosts_at_their_own_pace_train_every_row_once_and_it_can_be_replayed(
    tmp_path: Path, strategy: str
) -> None:
    folder = tmp_path / "run"
    run = train(task(), strategy, run_dir=folder)
    assert run.rows["total"] == sum(run.rows["workers"]) == 390
    assert sorted(leases(folder)) == [(e, b, p) for e in range(3) for b in range(11) for p in range(2)]
    assert sum(run.staleness.values()) > 0
    assert run.info["engine"] == "hosts"
    assert mh.replay(folder, task=task()).identical


@pytest.mark.slow
def test_in_step_over_two_hosts_it_is_what_it_is_on_one_and_without_tls_the_summary_says_so(local: Local) -> None:
    fields = {"strategy": "easgd:via=group", "workers": 2, "threads_per_worker": 1}
    here = mh.train(task(), engine=local, **fields)
    cores = usable_cores()
    there = train(task(), "easgd:via=group", tls=False, threads_per_worker=cores)
    assert there.rows["total"] == 390
    assert (there.parameters - here.parameters).abs().max() < 1e-12
    output = " ".join(there.summary().split())
    assert "WITHOUT TLS on 127.0.0.1" in output
    assert "could read and change all messages, and the program too" in output
    assert f"2 workers with {2 * cores} threads on" in output  # the one that joined is on this very machine
    assert there.info["machines"][0]["cores"] == cores


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "local://"])
def test_stopped_on_two_hosts_and_resumed_on_one(scheme: str, local: Local, tmp_path: Path) -> None:
    """Every row is trained once, whoever is there; with a run directory on a disk, and at a URL."""
    folder = tmp_path / "run"
    url = f"{scheme}{folder}"
    with pytest.raises(Preempted, match=rf"resume it with resume=True \(--resume\) from {url}$"):
        train(task(loss=Preempting(1, 5)), "downpour", run_dir=url)
    assert 5 <= len(leases(folder)) <= 2 * 5
    fields = {"strategy": "downpour", "workers": 2, "threads_per_worker": 1}
    run = mh.train(task(), engine=local, run_dir=url, resume=True, **fields)
    assert run.rows["total"] == 390
    assert sorted(leases(folder)) == [(e, b, p) for e in range(3) for b in range(11) for p in range(2)]
    assert torch.isfinite(run.parameters).all()


@pytest.mark.slow
def test_faults_on_another_host() -> None:
    """Its worker stands still at a step, and is then killed at another."""
    seen: list[str] = []

    class Seen(mh.Callback):
        def on_notice(self, event: Event) -> None:
            seen.extend([event.values["fault"]] if event.type == "fault" else [])

    faults = "pause=1@step:3+0.3,kill=1@step:6:exchange"
    run = Run(Hosts(local_workers=1, faults=faults), joined_by(1))
    fields = {"engine": run.engine, "workers": 2, "threads_per_worker": 1, "callbacks": [Seen()]}
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9.* in phase exchange at step 6"):
        run.during(lambda: mh.train(task(), **fields))
    assert ",".join(seen) == faults
