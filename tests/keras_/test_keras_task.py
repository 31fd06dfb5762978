"""`mh.keras.task` on one worker: what model.fit does without shuffling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import SEED, apart, compiled, convolution, dense, images, keras, layer, of_four, rows, values

import manyhands as mh

HOW: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False}


def fitted(model: Any, *data: Any, **options: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(SEED)
    return dict(model.fit(*data, **{**HOW, "verbose": 0, **options}).history)


def trained(model: Any, *data: Any, **options: Any) -> tuple[mh.Run, dict[str, list[float]]]:
    history = keras.callbacks.History()
    fields = {**HOW, "seed": SEED, "callbacks": [history], **options}
    return mh.train(mh.keras.task(model, *data, **fields), workers=1), history.history


def several() -> Any:
    """Two inputs, two outputs with losses of their own weight, and a loss that belongs to neither."""
    keras.utils.set_random_seed(SEED)
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    both = keras.layers.Dense(4, activity_regularizer="l2")(keras.layers.Concatenate()([a, b]))
    model = keras.Model([a, b], [keras.layers.Dense(1, name="p")(both), keras.layers.Dense(3, name="q")(both)])
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", ["mse", classes], loss_weights=[1.0, 0.3], metrics=[["mae"], ["accuracy"]])
    return model


def noisy() -> Any:
    """Layers with seeds of their own."""
    noise, dropout = layer("GaussianNoise", 0.5), layer("Dropout", 0.4, seed=5)
    return of_four(layer("Dense", 6), noise, dropout, optimizer=keras.optimizers.SGD(0.05, momentum=0.9))


def scheduled() -> Any:
    return dense(optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.02, 12)))


X, Y = rows()
IMAGES = images()
CASES: dict[str, tuple[Callable[[], Any], tuple[Any, Any], dict[str, Any]]] = {
    "moving averages, validation": (convolution, IMAGES, {"validation_data": (IMAGES[0][:20], IMAGES[1][:20])}),
    "noise": (noisy, (X, Y), {}),
    "a schedule, a split, class weights": (
        scheduled,
        (X, Y),
        {"validation_split": 0.3, "class_weight": {0: 3.0, 1: 0.5}},
    ),
    "sample weights": (dense, (X, Y), {"sample_weight": np.linspace(0, 2, len(Y)).astype("float32")}),
    "built by the first rows": (lambda: compiled(layer("Dense", 5), optimizer="adamw"), (X, Y), {}),
    "several inputs, outputs and losses": (several, ([X[:, :2], X[:, 2:]], [X[:, 0], Y]), {}),
}


def test_one_worker_is_fit_without_shuffling() -> None:
    for name, (make, data, options) in CASES.items():
        plain, model = make(), make()
        wanted = fitted(plain, *data, **options)
        _, history = trained(model, *data, **options)
        assert apart(values(model), values(plain)) < 1e-6, name
        assert history.keys() == wanted.keys()
        for metric, of_epochs in wanted.items():
            assert history[metric] == pytest.approx(of_epochs, abs=1e-6), (name, metric)


def test_a_second_training_goes_on_with_the_optimizer_of_the_users_own_model() -> None:
    """And its rows may come from anything that a task reads."""
    model, plain = dense(), dense()
    for _ in range(2):
        fitted(plain, X, Y, epochs=1)
    trained(model, X, Y, epochs=1)
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    run, _ = trained(model, torch.utils.data.DataLoader(data, batch_size=16), test_data=(X, Y), epochs=1)
    assert apart(values(model), values(plain)) < 1e-6
    assert int(model.optimizer.iterations) == 8
    assert run.model.keras is model
    wanted = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert run.metrics == pytest.approx({f"test_{name}": value for name, value in wanted.items()}, abs=1e-6)
    assert torch.equal(run.predict(X), torch.tensor(model.predict(X, verbose=0)))


def test_mixed_bfloat16_trains() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    _, history = trained(model, X, Y, epochs=4)
    assert history["loss"][-1] < history["loss"][0]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Moving averages, seeds, slots, iterations and rate are in the checkpoint."""

    def model() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.7)
        layers = layer("GaussianNoise", 0.2), layer("Dense", 5), layer("BatchNormalization")
        return of_four(*layers, optimizer=keras.optimizers.Adam(rate))

    whole, first, second = model(), model(), model()
    trained(whole, X, Y, callbacks=[])
    for one, options in ((first, {"max_steps": 5}), (second, {})):
        task = mh.keras.task(one, X, Y, **HOW, seed=SEED, **options)
        run = mh.train(task, workers=1, run_dir=tmp_path / "run", resume=True)
    assert run.steps == 8
    assert apart(values(second), values(whole)) == 0.0
    assert apart(values(first), values(whole)) > 1e-4


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

        def train_step(self, data: Any) -> Any:
            return {}

    own = Own()
    own.compile("sgd", "mse")
    adam = keras.optimizers.Adam
    for model, data, message in (
        (keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), (X, Y), r"model\.compile"),
        (torch.nn.Linear(4, 3), (X, Y), r"mh\.Task"),
        (own, (X, Y), "compute_loss"),
        (dense(optimizer=adam(use_ema=True)), (X, Y), "use_ema"),
        (dense(optimizer=adam(loss_scale_factor=2.0)), (X, Y), "mixed_bfloat16"),
        (dense(optimizer=keras.optimizers.LossScaleOptimizer(adam())), (X, Y), "mixed_bfloat16"),
        (dense(), ("rows.parquet", Y), "gives whole batches"),
        (compiled(layer("Dense", 5)), ("rows.parquet",), "there are no rows to build it from"),
    ):
        with pytest.raises(mh.BadInput, match=message):
            mh.keras.task(model, *data)
    model = dense()
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(mh.BadInput, match="KERAS_BACKEND=torch"):
        mh.keras.task(model, X, Y)


def test_fields_of_a_task_are_taken_and_others_refused() -> None:
    task = mh.keras.task(dense(), X, Y, batch_size_per_worker=4, clip_norm=1.0, name="mine")
    assert (task.batch_size, task.batch_size_per_worker, task.name) == (None, 4, "mine")
    with pytest.raises(mh.UnknownName, match="batchsize"):
        mh.keras.task(dense(), X, Y, batchsize=4)
