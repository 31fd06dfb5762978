"""Stages whose optimizer's state lies on the disk, in processes."""

from pathlib import Path

import pytest
import torch
from stage_models import classified, numbers, task
from torch import nn

import manyhands as mh

WIDE = 128


class Wide(nn.Sequential):
    """Each layer's state is large enough to be put away."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(3)), nn.Linear(WIDE, 5))


TASK = task(Wide, classified, numbers(40, (WIDE,)), numbers(8, (WIDE,)), batch_size=20, schedule=None)


def run(model_parallel: str, directory: Path | None = None, epochs: int = 2) -> mh.Run:
    return mh.train(
        TASK.with_fields(epochs=epochs),
        workers=2,
        engine="local",
        threads_per_worker=1,
        model_parallel=model_parallel,
        run_dir=directory,
        resume=directory is not None,
    )


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    expected = run("stages=2")
    run("stages=2,offload=disk", tmp_path / "run", epochs=1)
    assert torch.equal(run("stages=2,offload=disk", tmp_path / "run").parameters, expected.parameters)
