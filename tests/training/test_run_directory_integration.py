"""A run directory that several processes reach by a URL."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.checkpoint.paths import RemotePath
from manyhands.engines.local.engine import Local


class KillingOne:
    """A loss that ends its process, one rank's, at its n-th call."""

    def __init__(self, rank: int, call: int) -> None:
        self.rank, self.call, self.calls = rank, call, 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call and mh.worker().rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain.cross_entropy(model, batch)


def train(local: Local, workers: int = 2, **options: Any) -> mh.Run:
    return mh.train(plain.task(epochs=4), engine=local, workers=workers, threads_per_worker=1, **options)


@pytest.mark.slow
def test_killed_after_a_checkpoint_and_resumed_from_a_url_is_uninterrupted(local: Local, tmp_path: Path) -> None:
    """CASE 19"""
    url, options = f"local://{tmp_path}/run", {"strategy": "easgd:bound=0,period=2"}
    whole = train(local, **options)
    with pytest.raises(mh.WorkerFailed, match="killed by signal 9"):
        train(local, **options, run_dir=url, loss=KillingOne(0, 11))
    saved = tmp_path / "run/checkpoints/step-00000008"
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json",
        *(f"rank-0000{rank}.{kind}" for rank in range(2) for kind in ("json", "safetensors")),
    ]
    with pytest.raises(mh.BadInput, match=f"run directory {url} exists"):
        train(local, **options, run_dir=url)
    resumed = train(local, **options, run_dir=url, resume=True)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.rows == whole.rows
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]
    assert resumed.directory == RemotePath(url)


def test_an_own_paced_run_at_a_url_is_replayed(local: Local, tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    train(local, strategy="downpour", run_dir=url)
    assert mh.replay(url, task=plain.task(epochs=4)).identical


def test_a_place_that_each_process_has_for_itself_is_an_error(local: Local, tmp_path: Path) -> None:
    url = f"memory:/{tmp_path}/run"
    with pytest.raises(
        mh.ManyhandsError, match=r"worker 1 wrote rank-00001.* and worker 0 sees no bytes there: .* all hosts share"
    ):
        train(local, run_dir=url)
    RemotePath(url).remove()
