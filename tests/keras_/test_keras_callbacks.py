"""Keras callbacks, on one worker."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_models import SEED, apart, dense, keras, rows, values

import manyhands as mh
from manyhands.keras.callbacks import KerasCallbacks, _attributes


def trained(callbacks: list[Any], model: Any = None, **options: Any) -> tuple[Any, mh.Run]:
    x, y = rows()
    model = model or dense()
    fields = {
        "batch_size": 16,
        "epochs": 5,
        "shuffle": False,
        "seed": SEED,
        "validation_data": (x[:20], y[:20]),
        **options,
    }
    task = mh.keras.task(model, x, y, callbacks=callbacks, **fields)
    return model, mh.train(task, workers=1)


def fitted(callbacks: list[Any]) -> Any:
    x, y = rows()
    model = dense()
    model.fit(
        x, y, batch_size=16, epochs=5, shuffle=False, verbose=0, validation_data=(x[:20], y[:20]), callbacks=callbacks
    )
    return model


def worsening() -> Any:
    """The second epoch's rate ruins the model."""
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 if epoch < 2 else 3.0)


def stopping() -> Any:
    return keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)


def test_early_stopping_stops_and_brings_the_best_weights_back() -> None:
    early, plain = stopping(), stopping()
    model, run = trained([worsening(), early])
    wanted = fitted([worsening(), plain])
    assert (early.stopped_epoch, early.best_epoch) == (plain.stopped_epoch, plain.best_epoch) == (3, 1)
    assert apart(values(model), values(wanted)) < 1e-6
    assert run.info["stopped"] == "callback"
    assert run.steps == 16
    assert run.metrics["validation_loss"] == pytest.approx(early.best, abs=1e-6)


def test_the_best_weights_come_back_when_nothing_stopped() -> None:
    early = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    model, run = trained([worsening(), early])
    assert run.steps == 20
    assert apart(values(model), early.best_weights) == 0.0


def test_rates_are_set_before_and_after_an_epoch() -> None:
    plateau = lambda: keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=9.0)  # noqa: E731
    model, run = trained([plateau()])
    wanted = fitted([plateau()])
    assert apart(values(model), values(wanted)) < 1e-6
    assert float(model.optimizer.learning_rate) == float(wanted.optimizer.learning_rate) < 1e-6
    assert run.history[-1]["rate"] < run.history[0]["rate"]


def test_a_checkpoint_has_the_weights_of_its_epoch(tmp_path: Path) -> None:
    def saver(folder: str) -> Any:
        return keras.callbacks.ModelCheckpoint(tmp_path / folder / "{epoch}.keras")

    trained([saver("ours")])
    fitted([saver("plain")])
    for epoch in (1, 5):
        ours, plain = (keras.saving.load_model(tmp_path / f / f"{epoch}.keras") for f in ("ours", "plain"))
        assert apart(values(ours), values(plain)) < 1e-6


def test_logs_have_the_names_and_numbers_of_fit(tmp_path: Path) -> None:
    trained([keras.callbacks.CSVLogger(tmp_path / "ours.csv")])
    fitted([keras.callbacks.CSVLogger(tmp_path / "plain.csv")])
    tables = [list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("ours.csv", "plain.csv")]
    assert tables[0][0].keys() == tables[1][0].keys()
    for ours, plain in zip(*tables, strict=True):
        assert [float(v) for v in ours.values()] == pytest.approx([float(v) for v in plain.values()], abs=1e-6)


def test_everything_is_called_in_its_order() -> None:
    def recorder(into: list[str]) -> Any:
        names = [
            "on_train_begin",
            "on_epoch_begin",
            "on_train_batch_begin",
            "on_train_batch_end",
            "on_epoch_end",
            "on_train_end",
        ]
        return keras.callbacks.LambdaCallback(
            **{name: lambda *_, logs=None, name=name: into.append(name) for name in names}
        )

    ours: list[str] = []
    plain: list[str] = []
    trained([recorder(ours)])
    fitted([recorder(plain)])
    assert ours == plain
    assert len(ours) == 2 + 5 * (2 + 2 * 4)


def test_a_stop_after_a_batch_is_obeyed() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    _, run = trained([Stop()])
    assert run.steps < 4
    assert run.info["stopped"] == "callback"


def test_changing_weights_between_epochs_is_refused() -> None:
    class Clear(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([np.zeros_like(w) for w in self.model.get_weights()])

    with pytest.raises(mh.Unsupported, match="between two epochs"):
        trained([Clear()])


def test_what_is_no_callback_or_has_a_better_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mh.BadInput, match=r"train\(callbacks"):
        trained([mh.EarlyStopping()])
    with pytest.raises(mh.BadInput, match="resume=True"):
        trained([keras.callbacks.BackupAndRestore(tmp_path)])


def test_an_ensemble_has_no_single_model_for_callbacks() -> None:
    task = mh.keras.task(dense(), *rows(), callbacks=[stopping()])
    with pytest.raises(mh.Unsupported, match="one on each worker"):
        mh.train(task, strategy="ensemble", workers=2)


def test_callbacks_get_the_attributes_of_worker_0s() -> None:
    """Numbers, texts, and lists and dicts of them."""
    there, here = (keras.callbacks.EarlyStopping("loss") for _ in range(2))
    there.set_params({"epochs": 3})
    there.best, there.stopped_epoch, there.lost = np.float32(0.5), 4, {"a": [1, None]}
    attributes = _attributes(there)
    assert pickle.loads(pickle.dumps(attributes))["best"] == 0.5
    KerasCallbacks((here,)).on_result([attributes])
    assert (here.best, here.stopped_epoch, here.lost, here.params) == (0.5, 4, {"a": [1, None]}, None)
