"""Tasks with a kernel: what goes together, the rate, the loss, what is refused, and the model that comes back."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from products import Products, rows_of_products

import manyhands as mh
from manyhands.sparse.kernel import KernelModel
from refusals import refused


def fields(**changes: Any) -> dict[str, Any]:
    return {"kernel": Products(), "rate": 0.02, "train_data": rows_of_products(), "batch_size": 50, **changes}


def trained(**changes: Any) -> mh.Run:
    return mh.train(**{"strategy": "solo", "workers": 1, **fields(**changes)})


def test_one_worker_is_the_kernel_over_the_epochs_order() -> None:
    kernel, data = Products(), rows_of_products()
    run = trained(epochs=2, seed=3)
    tables = KernelModel(kernel, 3).tables()
    losses = []
    for epoch in range(2):
        order = mh.epoch_order(400, 3, epoch)
        for start in range(0, 400, 50):
            own = order[start : start + 50]
            losses.append(kernel.step(tables, {name: column[own] for name, column in data.items()}, 0.02) / 50)
    assert all(np.array_equal(table, tables[name]) for name, table in run.model.tables().items())
    assert [row["loss"] for row in run.history] == losses
    assert run.rows["total"] == 800


def test_the_rate_falls_to_the_last_one_in_a_line_or_by_epochs() -> None:
    line = [row["rate"] for row in trained(epochs=2, last_rate=0.004).history]
    assert line == pytest.approx([0.02 - 0.016 * (step + 1) / 16 for step in range(16)])
    by_epoch = [row["rate"] for row in trained(epochs=3, rate_decay=0.5).history]
    assert by_epoch == pytest.approx([0.02] * 7 + [0.01] * 8 + [0.005] * 8 + [0.0025])  # as it is after the step
    assert {row["rate"] for row in trained(epochs=2).history} == {0.02}


def test_the_model_holds_the_tables_and_the_kernel_measures(tmp_path: Path) -> None:
    """Those of a finished run, too."""
    validation = rows_of_products(80, seed=2)
    run, again = (trained(validation_data=validation, run_dir=tmp_path / "run", resume=True) for _ in range(2))
    assert isinstance(run.model, KernelModel)
    measured = run.model.kernel.measure(run.model.tables(), validation)
    assert run.metrics["validation_loss"] == pytest.approx(measured["loss"][0])
    assert all(np.array_equal(table, again.model.tables()[name]) for name, table in run.model.tables().items())
    norm = lambda model, batch: {"norm": torch.tensor(model.tables()["users"]).norm()}  # noqa: E731
    own = trained(validation_data=validation, evaluate=norm)
    assert own.metrics["validation_norm"] == pytest.approx(float(np.linalg.norm(own.model.tables()["users"])))


def test_a_task_is_changed_and_made_again() -> None:
    task = mh.Task(**fields())
    assert mh.train(task, strategy="solo", workers=1, seed=9).info["rows"] == 400
    changed = task.with_fields(seed=9, rate=0.1)
    assert changed.model().tables()["users"][0, 0] == KernelModel(Products(), 9).tables()["users"][0, 0]
    assert changed.optimizer(changed.model()).param_groups[0]["lr"] == 0.1


def test_fields_that_do_not_go_together_are_refused() -> None:
    without = {"kernel": None, "model": torch.nn.Linear(1, 1), "loss": lambda m, b: 0, "optimizer": lambda m: 0}
    for changes, text in [
        ({"rate": None}, "rate"),
        ({"rate": -1}, "rate"),
        ({"rate": 1, "last_rate": 0.1, "rate_decay": 0.5}, "last_rate"),
        ({"kernel": "word2vec"}, "kernel"),
        ({"model": torch.nn.Linear(1, 1)}, "model"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"micro_batch_size": 3}, "micro_batch_size"),
        (without, "rate"),
    ]:
        refused(text, lambda changes=changes: mh.Task(**fields(**changes)), case=changes)


def test_strategies_that_exchange_gradients_or_outputs_are_refused() -> None:
    for strategy in ("allreduce", "quorum", "downpour:rule=adagrad", "local-sgd:warmup=5", "ensemble"):
        with pytest.raises(mh.Unsupported, match="hogwild|evaluate"):
            trained(strategy=strategy, workers=2)


def test_rows_that_a_kernel_cannot_take_are_refused() -> None:
    data = rows_of_products()
    for changed, text in [
        ({name: column for name, column in data.items() if name != "item"}, "item"),
        (data | {"user": data["user"] + 40}, "from 0 to 39"),
        (data | {"user": data["user"] - 1}, "-1"),
        (data | {"user": data["user"] * 1.0}, "whole numbers"),
        (next(iter(data.values())), "user, item, number"),
    ]:
        refused(text, lambda changed=changed: trained(train_data=changed), case=text)


@dataclass(frozen=True, kw_only=True)
class Diverges(Products):
    def step(self, rows: Any, batch: Any, rate: float) -> float:
        return float("nan") if rows["user_moves"].sum() > 100 else super().step(rows, batch, rate)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_kernel_and_slice() -> None:
    for nonfinite in ("raise", "skip"):
        with pytest.raises(mh.ManyhandsError, match=r"(?s)Diverges.*rate 0\.02.*slice 0 of global batch 3"):
            trained(kernel=Diverges(), nonfinite=nonfinite)


def test_without_numba_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import manyhands as mh\n"
        "try:\n    from manyhands.kernels import Linear\n"
        "except mh.Unsupported as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'manyhands[sparse]'" in done.stdout


def test_what_works_with_gradients_refuses_a_kernel() -> None:
    for ask in (mh.check, lambda task: mh.plan(task, workers=2), mh.calibrate):
        refused(r"Products.*manyhands compare", ask, mh.Task(**fields()), kind=mh.Unsupported)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(mh.Unsupported, match="kernel"):
        mh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="rotate")


@pytest.mark.slow
def test_strategies_are_compared_on_a_kernel() -> None:
    task = mh.Task(**fields(validation_data=rows_of_products(100, seed=2)))
    found = mh.compare(task, strategies=["rotate"], workers=(2,), repeats=1)
    assert {one.strategy for one in found.variants} == {"solo", "rotate"}
    assert not [trial.failure for trial in found.trials if trial.failure]


def test_where_no_strategy_is_given_one_that_trains_kernels_is_taken() -> None:
    for workers, strategy in ((1, "solo"), (2, "hogwild")):
        assert mh.train(**fields(), workers=workers).info["strategy"] == strategy
    assert mh.train("digits", workers=1, max_steps=1).info["strategy"] == "allreduce"
