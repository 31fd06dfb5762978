"""Keras callbacks, on one worker."""

import csv
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_models import SEED, Lazy, apart, dense, keras, rows, values

import manyhands as mh

module: Any = Lazy("manyhands.keras.callbacks")
HOW: dict[str, Any] = {"batch_size": 16, "epochs": 5, "shuffle": False}


def trained(*callbacks: Any) -> tuple[Any, mh.Run]:
    x, y = rows()
    model, fields = dense(), HOW | {"validation_data": (x[:20], y[:20])}
    return model, mh.train(mh.keras.task(model, x, y, callbacks=callbacks, seed=SEED, **fields), workers=1)


def fitted(*callbacks: Any) -> Any:
    x, y = rows()
    model, fields = dense(), HOW | {"validation_data": (x[:20], y[:20])}
    model.fit(x, y, callbacks=list(callbacks), verbose=0, **fields)
    return model


def worsening() -> Any:
    """The second epoch's rate ruins the model."""
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 if epoch < 2 else 3.0)


def stopping(patience: int = 2) -> Any:
    return keras.callbacks.EarlyStopping("val_loss", patience=patience, restore_best_weights=True)


CALLS = ("train_begin", "epoch_begin", "train_batch_begin", "train_batch_end", "epoch_end", "train_end")


def test_callbacks_do_what_they_do_in_fit(tmp_path: Path) -> None:
    """The best weights come back, checkpoints have those of their epoch, logs have names and numbers, calls their order."""

    def all_of(folder: str) -> tuple[list[str], Any, list[Any]]:
        called, early = list[str](), stopping()
        recorder = keras.callbacks.LambdaCallback(
            **{f"on_{name}": lambda *_, logs=None, name=name: called.append(name) for name in CALLS}
        )
        saver = keras.callbacks.ModelCheckpoint(tmp_path / folder / "{epoch}.keras")
        logger = keras.callbacks.CSVLogger(tmp_path / f"{folder}.csv")
        return called, early, [worsening(), early, saver, logger, recorder]

    ours, early, callbacks = all_of("ours")
    plain, other, others = all_of("plain")
    model, run = trained(*callbacks)
    wanted = fitted(*others)
    assert (early.stopped_epoch, early.best_epoch) == (other.stopped_epoch, other.best_epoch) == (3, 1)
    assert apart(values(model), values(wanted)) < 1e-6
    assert (run.info["stopped"], run.steps) == ("callback", 16)
    assert run.metrics["validation_loss"] == pytest.approx(early.best, abs=1e-6)
    assert ours == plain
    assert len(ours) == 2 + 4 * (2 + 2 * 4)
    for epoch in (1, 2):
        saved = (keras.saving.load_model(tmp_path / folder / f"{epoch}.keras") for folder in ("ours", "plain"))
        assert apart(*(values(one) for one in saved)) < 1e-6
    tables = [list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("ours.csv", "plain.csv")]
    assert tables[0][0].keys() == tables[1][0].keys()
    for one, another in zip(*tables, strict=True):
        numbers = [[float(value) for value in row.values()] for row in (one, another)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-6)


def test_the_best_weights_come_back_when_nothing_stopped() -> None:
    early = stopping(patience=9)
    model, run = trained(worsening(), early)
    assert run.steps == 20
    assert apart(values(model), early.best_weights) == 0.0


def test_rates_are_set_before_and_after_an_epoch() -> None:
    plateau = lambda: keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=9.0)  # noqa: E731
    model, run = trained(plateau())
    wanted = fitted(plateau())
    assert apart(values(model), values(wanted)) < 1e-6
    assert float(model.optimizer.learning_rate) == float(wanted.optimizer.learning_rate) < 1e-6
    assert run.history[-1]["rate"] < run.history[0]["rate"]


def test_a_stop_after_a_batch_is_obeyed() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    _, run = trained(Stop())
    assert run.steps < 4
    assert run.info["stopped"] == "callback"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """What changes the model between two epochs: test_worker_callback.py."""
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    for callback, message in ((mh.EarlyStopping(), r"train\(callbacks"), (backup, "resume=True")):
        with pytest.raises(mh.BadInput, match=message):
            trained(callback)
    task = mh.keras.task(dense(), *rows(), callbacks=[stopping()])
    with pytest.raises(mh.Unsupported, match="one on each worker"):
        mh.train(task, strategy="ensemble", workers=2)


def test_callbacks_get_the_attributes_of_worker_0s() -> None:
    """Numbers, texts, and lists and dicts of them."""
    there, here = stopping(), stopping()
    there.set_params({"epochs": 3})
    there.best, there.stopped_epoch, there.lost = np.float32(0.5), 4, {"a": [1, None]}
    attributes = module._attributes(there)
    assert pickle.loads(pickle.dumps(attributes))["best"] == 0.5
    module.KerasCallbacks((here,)).on_result([attributes])
    assert (here.best, here.stopped_epoch, here.lost, here.params) == (0.5, 4, {"a": [1, None]}, None)
