"""Keras models on two workers: simulated ones, and twice processes, which import Keras anew."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_models import apart, convolution, dense, images, keras, layer, of_four, rows, values

import manyhands as mh

PERIODIC: dict[str, Any] = {"strategy": "local-sgd:period=3", "engine": "sim", "workers": 2}


def task(model: Any, *data: Any, **options: Any) -> mh.Task:
    return mh.keras.task(model, *(data or rows()), **{"batch_size": 16, "epochs": 2, **options})


def sgd(rate: float = 0.05) -> Any:
    return keras.optimizers.SGD(rate)


@pytest.mark.slow
def test_strategies_train_the_users_own_model(local: mh.Local) -> None:
    x, y = rows()
    for strategy in ("allreduce", "gossip", "easgd", "hogwild", "ensemble"):
        engine = local if strategy == "hogwild" else "sim"  # which has no shared memory
        model = dense(optimizer=keras.optimizers.SGD(0.05, momentum=0.5))
        before, was = values(model), model.evaluate(x, y, verbose=0)[0]
        run = mh.train(task(model, validation_data=(x, y)), strategy=strategy, engine=engine, workers=2)
        assert apart(values(model), before) > 1e-3, strategy
        assert run.metrics["validation_loss"] < was, strategy
        if strategy != "ensemble":
            wanted = {
                f"validation_{name}": value for name, value in model.evaluate(x, y, verbose=0, return_dict=True).items()
            }
            assert run.metrics == pytest.approx(wanted, abs=1e-6), strategy


@pytest.mark.slow
def test_two_processes_are_one_with_rows_that_do_not_divide(local: mh.Local) -> None:
    """Metrics that are no means, too; weights by class, so that shares of a batch weigh differently; logs of all rows."""
    x, y = rows(53)
    one_hot = np.eye(3, dtype="float32")[y]
    models, histories, runs = [dense(optimizer="adamw") for _ in range(2)], [], []
    for workers, model in enumerate(models, start=1):
        ranks = keras.metrics.SensitivityAtSpecificity(0.5, class_id=1, name="sensitivity")
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), ranks]
        model.compile(model.optimizer, "categorical_crossentropy", metrics=metrics)
        histories.append(keras.callbacks.History())
        how: dict[str, Any] = {"class_weight": {0: 3.0}, "validation_data": (x, one_hot), "callbacks": histories[-1:]}
        runs.append(mh.train(task(model, x, one_hot, **how), engine=local, workers=workers))
    assert apart(*(values(model) for model in models)) < 1e-6
    assert runs[1].metrics == pytest.approx(runs[0].metrics, abs=1e-6)
    assert runs[1].metrics.keys() == {f"validation_{name}" for name in ("loss", "accuracy", "auc", "sensitivity")}
    for name, of_epochs in histories[0].history.items():
        assert histories[1].history[name] == pytest.approx(of_epochs, abs=1e-6), name


@pytest.mark.slow
def test_with_whole_batches_rows_may_meet(local: mh.Local) -> None:
    """In the loss, and in batch normalization."""

    def meeting(targets: Any, scores: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(targets, scores) + scores.std(0).sum()

    x, y = rows(53)
    models, runs = [of_four(layer("BatchNormalization"), optimizer=sgd()) for _ in range(2)], []
    for workers, model in enumerate(models, start=1):
        model.compile(model.optimizer, meeting, metrics=["accuracy"])
        how: dict[str, Any] = {"validation_data": (x, y), "batches": "whole"}
        runs.append(mh.train(task(model, x, y, **how), engine=local, workers=workers))
    assert apart(*(values(model) for model in models)) < 1e-5
    assert runs[1].metrics == pytest.approx(runs[0].metrics, abs=1e-5)


def test_moving_averages_are_in_the_answer() -> None:
    x, y = images()
    model = convolution()
    run = mh.train(task(model, x, y, validation_data=(x, y)), engine="sim", workers=2)
    moving = model.layers[1].moving_mean.value
    assert float(moving.detach().abs().max()) > 1e-3
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    assert run.metrics["validation_loss"] == pytest.approx(wanted["loss"], abs=1e-6)


def test_workers_draw_noise_of_their_own() -> None:
    """Seeds that are alike would give both halves of a batch of equal rows the same gradient: as one worker with half of it."""
    x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
    halves, whole = (of_four(layer("GaussianNoise", 1.0), optimizer=sgd(0.1)) for _ in range(2))
    mh.train(task(halves, x, y, batch_size=8, epochs=1), engine="sim", workers=2)
    mh.train(task(whole, x[:4], y[:4], batch_size=4, epochs=1), workers=1)
    assert apart(values(halves), values(whole)) > 1e-4


@pytest.mark.parametrize(
    ("strategy", "engine"), [("local-sgd:period=3", "sim"), pytest.param("downpour", "local", marks=pytest.mark.slow)]
)
def test_callbacks_on_worker_0_hold_for_all(strategy: str, engine: str, tmp_path: Path) -> None:
    """The rate that ruins the model in the third epoch reaches both; both stop; the best weights are the answer."""
    x, y = rows()
    model, history = dense(optimizer=sgd()), keras.callbacks.History()
    early = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    ruin = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch < 2 else 40.0)
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    how: dict[str, Any] = {"validation_data": (x, y), "callbacks": [ruin, early, saved, history]}
    run = mh.train(task(model, epochs=9, **how), strategy=strategy, engine=engine, workers=2)
    losses = history.history["val_loss"]
    assert len(losses) == early.stopped_epoch + 1 < 9
    assert run.info["stopped"] == "callback"
    assert run.metrics["validation_loss"] == pytest.approx(min(losses), abs=1e-6)
    assert sorted({row["rate"] for row in run.history}) == pytest.approx([0.05, 40.0])
    best = keras.saving.load_model(tmp_path / f"{int(np.argmin(losses)) + 1}.keras")
    assert apart(values(model), values(best)) < 1e-6


def test_averaged_optimizer_state_and_a_resumed_run(tmp_path: Path) -> None:
    """Local SGD averages Adam's moments; a checkpoint of each worker's own goes on as if nothing had been."""
    whole, first, second = (dense() for _ in range(3))
    mh.train(task(whole), **PERIODIC)
    mh.train(task(first, epochs=1), **PERIODIC, run_dir=tmp_path / "run")
    run = mh.train(task(second), **PERIODIC, run_dir=tmp_path / "run", resume=True)
    assert run.steps == 8
    assert apart(values(second), values(whole)) == 0.0
