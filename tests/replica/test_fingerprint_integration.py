"""Other code, settings or data on a joined host, and replicas that drift apart: each ends the run and is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_script import Script
from joined_run import ADDRESS

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, ManyhandsError

COMMAND = """
    import os, sys
    os.chdir(sys.argv.pop(1))
    from manyhands.cli.commands import main
    main()
"""
MY = """
import torch
import manyhands as mh

LOGS = "/var/log/{name}"  # {name}'s own

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr={rate})

def model():
    return torch.nn.Linear(5, 3)

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

task = mh.Task(model=model, loss=loss, optimizer=optimizer, train_data="rows.npz", epochs=1, batch_size=8)
"""


@pytest.mark.nightly
def test_what_differs_on_a_joined_host_is_named_before_training(
    script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of my.py, and other rows; hosts that are alike train in tests/engines/hosts."""
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    _host(tmp_path / "alpha")
    _host(tmp_path / "beta", rate="0.2", seed=2)
    options = "-n 2 --local-workers 1 --threads-per-worker 1 --log quiet --run-dir mine --engine hosts"
    driver = script(COMMAND, "alpha", "train", "my.py:task", *options.split())
    assert driver.process.stderr is not None
    while not (found := ADDRESS.search(line := driver.process.stderr.readline())):
        assert line
    joiner = script(COMMAND, "beta", "join", found[1], "--workers", found[2])
    code, _, err = driver.end()
    assert code == 2, err
    for text in (err, joiner.end()[2]):
        for words in ("worker 1 on", "code of my is", "a sample of train_data"):
            assert words in text, text
    assert not list((tmp_path / "alpha/mine").glob("checkpoints/*"))


def _host(folder: Path, rate: str = "0.1", seed: int = 1) -> None:
    folder.mkdir()
    (folder / "my.py").write_text(MY.format(name=folder.name, rate=rate))
    x, y = plain.rows(24, torch.float32, seed)
    np.savez(folder / "rows.npz", x=x.numpy(), y=y.numpy())


class Drifting:
    """On worker 1 its n-th call changes a parameter behind everybody's back."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call and mh.worker().rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(0.5)
        return plain.cross_entropy(model, batch)


def train(local: Local, **options: Any) -> mh.Run:
    fields = {"model": plain.mlp, "optimizer": plain.OPTIMIZERS["sgd"], "train_data": plain.rows(48), "batch_size": 4}
    return mh.train(engine=local, workers=2, threads_per_worker=1, **{**fields, **options})


def test_replicas_that_drift_apart_end_the_run_before_the_next_checkpoint(local: Local, tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError, match="differ at step 8: the parameters of worker 1 on"):
        train(local, loss=Drifting(6), run_dir=tmp_path / "run", checkpoint_every=4)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.slow
def test_they_are_compared_every_so_many_steps_if_asked(local: Local, tmp_path: Path) -> None:
    """Local SGD averages every 4 steps: what drifted in a window is averaged too."""
    with pytest.raises(ManyhandsError, match="differ at step 3"):
        train(local, loss=Drifting(2), check_replicas_every=3)
    options = {"strategy": "local-sgd:period=4", "check_replicas_every": 3, "run_dir": tmp_path / "run"}
    assert train(local, loss=Drifting(2), checkpoint_every=2, **options).steps == 12


def own_rate(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + mh.worker().rank))


@pytest.mark.slow
def test_a_rate_that_depends_on_the_rank(local: Local) -> None:
    """An error where all replicas are to stay equal, a warning where each steps alone for a while; an ensemble's members are free."""
    fields = {"optimizer": own_rate, "loss": plain.cross_entropy, "max_steps": 2}
    with pytest.raises(BadInput, match=r"the optimizer's lr is 0\.2, and on worker 0 .* it is 0\.1"):
        train(local, **fields)
    (warning,) = train(local, strategy="local-sgd:period=2", **fields).info["warnings"]
    assert "lr is 0.2, and on worker 0" in warning
    assert train(local, strategy="ensemble", **fields).info["warnings"] == []
