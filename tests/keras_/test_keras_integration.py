"""Keras models on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_models import apart, compiled, convolution, dense, images, keras, rows, values

import manyhands as mh
from manyhands.strategies import CATALOGUE


def task(model: Any, *data: Any, **options: Any) -> mh.Task:
    return mh.keras.task(model, *(data or rows()), **{"batch_size": 16, "epochs": 3, **options})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in CATALOGUE if name not in ("solo", "rotate")])
def test_every_strategy_trains_the_users_own_model(strategy: str, local: mh.Local) -> None:
    x, y = rows()
    model = dense(optimizer=keras.optimizers.SGD(0.05, momentum=0.5))
    before, was = values(model), model.evaluate(x, y, verbose=0)[0]
    run = mh.train(task(model, validation_data=(x, y)), strategy=strategy, engine=local, workers=2)
    assert run.rows["total"] == 150
    assert apart(values(model), before) > 1e-3
    assert run.metrics["validation_loss"] < was
    if strategy != "ensemble":
        wanted = model.evaluate(x, y, verbose=0, return_dict=True)
        assert run.metrics == pytest.approx({f"validation_{name}": value for name, value in wanted.items()}, abs=1e-6)


@pytest.mark.slow
def test_two_workers_are_one_with_rows_that_do_not_divide(local: mh.Local) -> None:
    """Metrics that are no means, too; weights by class, so that shares of a batch weigh differently."""
    x, y = rows(53)
    ranks = keras.metrics.SensitivityAtSpecificity(0.5, class_id=1, name="sensitivity")
    models = [dense(optimizer="adamw", metrics=["accuracy", keras.metrics.F1Score(name="f1")]) for _ in range(2)]
    one_hot = np.eye(3, dtype="float32")[y]
    for model in models:
        model.compile(
            model.optimizer, "categorical_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc"), ranks]
        )
    runs = [
        mh.train(
            task(m, x, one_hot, class_weight={0: 3.0}, validation_data=(x, one_hot)), engine=local, workers=workers
        )
        for m, workers in zip(models, (1, 2), strict=True)
    ]
    assert apart(*(values(model) for model in models)) < 1e-6
    assert runs[1].metrics == pytest.approx(runs[0].metrics, abs=1e-6)
    assert runs[1].metrics.keys() == {f"validation_{name}" for name in ("loss", "accuracy", "auc", "sensitivity")}


@pytest.mark.slow
def test_moving_averages_are_in_the_answer(local: mh.Local) -> None:
    x, y = images()
    model = convolution()
    run = mh.train(task(model, x, y, validation_data=(x, y)), engine=local, workers=2)
    moving = model.layers[1].moving_mean.value
    assert float(moving.detach().abs().max()) > 1e-3
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    assert run.metrics["validation_loss"] == pytest.approx(wanted["loss"], abs=1e-6)


@pytest.mark.slow
def test_workers_draw_noise_of_their_own(local: mh.Local) -> None:
    """Seeds that are alike would give both halves of a batch of equal rows the same gradient: as one worker with half of it."""
    x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
    halves, whole = (
        compiled(
            lambda: keras.Input((4,)), lambda: keras.layers.GaussianNoise(1.0), optimizer=keras.optimizers.SGD(0.1)
        )
        for _ in range(2)
    )
    mh.train(task(halves, x, y, batch_size=8, epochs=1), engine=local, workers=2)
    mh.train(task(whole, x[:4], y[:4], batch_size=4, epochs=1), workers=1)
    assert apart(values(halves), values(whole)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local-sgd:period=3", "downpour"])
def test_callbacks_on_worker_0_hold_for_all(strategy: str, local: mh.Local, tmp_path: Path) -> None:
    """The rate that ruins the model in the third epoch reaches both; both stop; the best weights are the answer."""
    x, y = rows()
    model, history = dense(optimizer=keras.optimizers.SGD(0.05)), keras.callbacks.History()
    early = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    ruin = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch < 2 else 40.0)
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    run = mh.train(
        task(model, epochs=9, validation_data=(x, y), callbacks=[ruin, early, saved, history]),
        strategy=strategy,
        engine=local,
        workers=2,
    )
    losses = history.history["val_loss"]
    assert len(losses) == early.stopped_epoch + 1 < 9
    assert run.info["stopped"] == "callback"
    assert run.metrics["validation_loss"] == pytest.approx(min(losses), abs=1e-6)
    assert sorted({row["rate"] for row in run.history}) == pytest.approx([0.05, 40.0])
    best = keras.saving.load_model(tmp_path / f"{int(np.argmin(losses)) + 1}.keras")
    assert apart(values(model), values(best)) < 1e-6


@pytest.mark.slow
def test_a_rate_that_a_callback_sets_is_every_workers(local: mh.Local) -> None:
    """At a rate of 0 nobody moves; whoever kept another rate would move the average."""
    model, still = dense(), keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    before = values(model)
    mh.train(task(model, epochs=1, callbacks=[still]), strategy="local-sgd:period=2", engine=local, workers=2)
    assert apart(values(model), before) == 0.0


@pytest.mark.slow
def test_logs_count_all_workers_rows(local: mh.Local) -> None:
    histories = [keras.callbacks.History() for _ in range(2)]
    for workers, history in enumerate(histories, start=1):
        mh.train(task(dense(), callbacks=[history]), engine=local, workers=workers)
    assert histories[1].history["loss"] == pytest.approx(histories[0].history["loss"], abs=1e-6)
    assert histories[1].history["accuracy"] == histories[0].history["accuracy"]


@pytest.mark.slow
def test_averaged_optimizer_state_and_a_resumed_run(local: mh.Local, tmp_path: Path) -> None:
    """Local SGD averages Adam's moments; a checkpoint of each worker's own goes on as if nothing had been."""
    whole, first, second = (dense() for _ in range(3))
    how: dict[str, Any] = {"strategy": "local-sgd:period=3", "engine": local, "workers": 2}
    mh.train(task(whole), **how)
    mh.train(task(first, epochs=2), **how, run_dir=tmp_path / "run")
    run = mh.train(task(second), **how, run_dir=tmp_path / "run", resume=True)
    assert run.steps == 12
    assert apart(values(second), values(whole)) == 0.0
