"""Stages on a GPU, which two workers share. Without one nothing is run."""

from pathlib import Path

import pytest
import torch
from stage_models import GPT, TASKS, masked, task, tokens

import manyhands as mh

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def run(name: str, workers: int, model_parallel: str | None, directory: Path | None = None, **fields: object) -> mh.Run:
    return mh.train(
        TASKS[name].with_fields(**fields),
        workers=workers,
        engine="local",
        device="cuda:0",
        model_parallel=model_parallel,
        run_dir=directory,
        resume=directory is not None,
    )


@pytest.mark.parametrize("name", ["gpt", "cnn", "lengths", "encoder"])
def test_two_stages_train_as_one_worker_does(name: str) -> None:
    found, expected = run(name, 2, "stages=2"), run(name, 1, None)
    assert found.info["device"].startswith("cuda")
    torch.testing.assert_close(found.parameters.cpu(), expected.parameters.cpu(), rtol=0, atol=1e-9)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-9)


def test_two_replicas_of_recomputed_stages() -> None:
    found, expected = run("gpt", 4, "stages=2,recompute=units"), run("gpt", 1, None)
    torch.testing.assert_close(found.parameters.cpu(), expected.parameters.cpu(), rtol=0, atol=1e-9)


def test_a_run_goes_on(tmp_path: Path) -> None:
    fields = {"schedule": None, "epochs": 4}
    expected = run("gpt", 2, "stages=2", **fields)
    run("gpt", 2, "stages=2", tmp_path / "run", **fields | {"epochs": 2})
    found = run("gpt", 2, "stages=2", tmp_path / "run", **fields)
    torch.testing.assert_close(found.parameters.cpu(), expected.parameters.cpu(), rtol=0, atol=1e-9)


def test_half_precision_with_dropout() -> None:
    half = task(lambda: GPT(dropout=0.1), masked, tokens(64), tokens(16), precision="bf16-mixed", batch_size=32)
    half = half.with_fields(model=lambda: GPT(dropout=0.1), epochs=10)
    found = mh.train(half, workers=2, engine="local", device="cuda:0", model_parallel="stages=2")
    losses = [row["loss"] for row in found.history]
    assert losses[-1] < losses[0]
