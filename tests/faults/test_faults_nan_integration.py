"""A worker whose gradient is not finite: the run ends with its name, or leaves the step out."""

from __future__ import annotations

import pytest
from fault_harness import GLOBAL_ROWS, Trial, fired, task

import manyhands as mh

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("survive", "strategy"),
    [
        ("max_losses=2", "allreduce"),
        pytest.param(None, "allreduce", marks=slow),
        pytest.param("max_losses=2", "allreduce:overlap=true", marks=slow),
        pytest.param(None, "allreduce:overlap=true", marks=slow),
        pytest.param(None, "local-sgd:period=2,warmup=9", marks=slow),
    ],
)
def test_the_error_names_the_worker_whose_own_gradient_it_is(survive: str | None, strategy: str, trial: Trial) -> None:
    fault = "nan=1@step:4"
    with pytest.raises(mh.ManyhandsError, match=r"gradient of step 4 is not finite in 0\.weight") as caught:
        trial.train(faults=fault, survive=survive, strategy=strategy)
    assert not isinstance(caught.value, mh.WorkerFailed | mh.BadInput)
    assert "own gradient of worker 1 alone is not finite" in str(caught.value)
    assert trial.seen.faults == [fault]
    assert trial.seen.changes == []
    assert trial.seen.ends == ["failed"]


@slow
def test_two_workers_are_named(trial: Trial) -> None:
    with pytest.raises(mh.ManyhandsError, match="own gradients of workers 0 and 2 are not finite"):
        trial.train(faults="nan=0@step:4,nan=2@step:4", of=task(micro_batch_size=5))


@slow
def test_who_moves_by_its_own_gradient_asks_nobody(trial: Trial) -> None:
    with pytest.raises(mh.ManyhandsError, match="gradient of step 4 is not finite") as caught:
        trial.train(faults="nan=1@step:4", survive=None, strategy="local-sgd:period=3")
    assert "apart" not in str(caught.value)


@slow
@pytest.mark.parametrize("survive", ["max_losses=2", None])
def test_steps_that_are_to_be_left_out_are(survive: str | None, trial: Trial) -> None:
    fault = "nan=1@step:4"
    run = trial.train(faults=fault, survive=survive, nonfinite="skip")
    fired(run, fault)
    assert run.rows["unused"] == GLOBAL_ROWS[4]
    assert [row["tick"] for row in run.history if row["unused"]] == [4]
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
