"""A worker that finishes first leaves its peers at work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from joined_run import Run, joined_by

from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local
from manyhands.errors import WorkerFailed

ELEMENTS = 1 << 22  # more than any buffer between two workers holds


def one_leaves(worker: Any) -> float:
    """Worker 1 returns; once its process is gone, worker 0 sends to worker 2, which waits all the while."""
    pids = worker.group.all_gather_json(os.getpid())
    vector = torch.full((ELEMENTS,), float(worker.rank))
    if worker.rank == 0:
        wait_until(lambda: _gone(pids[1]))
        worker.group.send(vector + 5.0, 2)
    elif worker.rank == 2:
        worker.group.receive_(vector, 0)
    return vector[-1].item()


def one_fails(worker: Any) -> None:
    if worker.rank == 1:
        raise KeyError("lost")
    worker.group.barrier()


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))


def test_in_shared_memory(local: Local) -> None:
    assert local.launch(one_leaves, LaunchSpec(workers=3, timeout_s=30)) == [0.0, 1.0, 5.0]


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("joining", [(1, 1), (2,)], ids=["a ring", "a ring and shared memory"])
def test_on_several_hosts(joining: tuple[int, ...]) -> None:
    run = Run(Hosts(local_workers=1), joined_by(*joining))
    assert run.launch(one_leaves, LaunchSpec(workers=3, timeout_s=30)) == [0.0, 1.0, 5.0]


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_an_error_is_told_and_not_that_its_worker_left() -> None:
    with pytest.raises(WorkerFailed, match="KeyError: 'lost'") as failed:
        Run(Hosts(local_workers=1), joined_by(1, 1)).launch(one_fails, LaunchSpec(workers=3, timeout_s=30))
    assert failed.value.rank == 1
