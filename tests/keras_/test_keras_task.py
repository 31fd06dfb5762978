"""`mh.keras.task` on one worker: what model.fit does without shuffling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import SEED, apart, compiled, convolution, dense, images, keras, rows, values

import manyhands as mh

OPTIMIZERS = {
    "adam": lambda: "adam",
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.02, 12)),
}


def fitted(model: Any, *data: Any, **options: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(SEED)
    fit = model.fit(*data, **{"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0, **options})
    return dict(fit.history)


def trained(model: Any, *data: Any, **options: Any) -> tuple[mh.Run, dict[str, list[float]]]:
    history = keras.callbacks.History()
    fields = {"batch_size": 16, "epochs": 3, "shuffle": False, "seed": SEED, "callbacks": [history], **options}
    return mh.train(mh.keras.task(model, *data, **fields), workers=1), history.history


def assert_equal(model: Any, options: dict[str, Any], *data: Any, plain: Any) -> None:
    wanted = fitted(plain, *data, **options)
    _, history = trained(model, *data, **options)
    assert apart(values(model), values(plain)) < 1e-6
    assert history.keys() == wanted.keys()
    for name in wanted:
        assert history[name] == pytest.approx(wanted[name], abs=1e-6), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_fit_without_shuffling(name: str) -> None:
    x, y = images()
    options = {"validation_data": (x[:20], y[:20])}
    make = OPTIMIZERS[name]
    assert_equal(convolution(optimizer=make()), options, x, y, plain=convolution(optimizer=make()))


@pytest.mark.parametrize("layer", ["noise", "dropout"])
def test_layers_with_a_seed_of_their_own_draw_as_in_fit(layer: str) -> None:
    make = {"noise": lambda: keras.layers.GaussianNoise(0.5), "dropout": lambda: keras.layers.Dropout(0.4, seed=5)}[
        layer
    ]
    models = [compiled(lambda: keras.Input((4,)), lambda: keras.layers.Dense(6), make) for _ in range(2)]
    assert_equal(models[0], {}, *rows(), plain=models[1])


def test_the_end_of_the_rows_validates_as_in_fit() -> None:
    assert_equal(dense(), {"validation_split": 0.3}, *rows(), plain=dense())


def test_weights_of_samples_and_classes_count_as_in_fit() -> None:
    x, y = rows()
    assert_equal(dense(), {"class_weight": {0: 3.0, 1: 0.5}}, x, y, plain=dense())
    weight = np.linspace(0, 2, len(y)).astype("float32")
    assert_equal(dense(), {"sample_weight": weight}, x, y, plain=dense())


def several() -> Any:
    """Two inputs, two outputs with losses of their own weight, and a loss that belongs to neither."""
    keras.utils.set_random_seed(SEED)
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    both = keras.layers.Dense(4, activity_regularizer="l2")(keras.layers.Concatenate()([a, b]))
    model = keras.Model([a, b], [keras.layers.Dense(1, name="p")(both), keras.layers.Dense(3, name="q")(both)])
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", ["mse", classes], loss_weights=[1.0, 0.3], metrics=[["mae"], ["accuracy"]])
    return model


def test_several_inputs_outputs_and_losses() -> None:
    x, y = rows()
    assert_equal(several(), {}, [x[:, :2], x[:, 2:]], [x[:, 0], y], plain=several())


def test_a_model_without_input_is_built_by_the_first_rows() -> None:
    models = [compiled(lambda: keras.layers.Dense(5)) for _ in range(2)]
    assert_equal(models[0], {}, *rows(), plain=models[1])


def test_a_second_training_goes_on_with_the_optimizer() -> None:
    x, y = rows()
    model, plain = dense(), dense()
    for _ in range(2):
        fitted(plain, x, y)
        trained(model, x, y)
    assert apart(values(model), values(plain)) < 1e-6
    assert int(model.optimizer.iterations) == 24


def test_the_weights_are_in_the_users_own_model() -> None:
    x, y = rows()
    model = dense()
    run, _ = trained(model, x, y, test_data=(x, y))
    assert run.model.keras is model
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    assert run.metrics == pytest.approx({f"test_{name}": value for name, value in wanted.items()}, abs=1e-6)
    assert torch.equal(run.predict(x), torch.tensor(model.predict(x, verbose=0)))


def test_batches_may_come_from_anything_that_a_task_reads() -> None:
    x, y = rows()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=16
    )
    model, plain = dense(), dense()
    trained(plain, x, y)
    trained(model, loader)
    assert apart(values(model), values(plain)) < 1e-6


def test_mixed_bfloat16_trains() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    _, history = trained(model, *rows(), epochs=8)
    assert history["loss"][-1] < history["loss"][0]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Moving averages, seeds, slots, iterations and rate are in the checkpoint."""

    def model() -> Any:
        noise = lambda: keras.layers.GaussianNoise(0.2)  # noqa: E731 - a layer, made when the seed is set
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.7)
        layers = [lambda: keras.Input((4,)), noise, lambda: keras.layers.Dense(5), keras.layers.BatchNormalization]
        return compiled(*layers, optimizer=keras.optimizers.Adam(rate))

    whole, first, second = model(), model(), model()
    trained(whole, *rows(), callbacks=[])
    for one, options in ((first, {"max_steps": 6}), (second, {})):
        fields = {"batch_size": 16, "epochs": 3, "shuffle": False, "seed": SEED, **options}
        run = mh.train(mh.keras.task(one, *rows(), **fields), workers=1, run_dir=tmp_path / "run", resume=True)
    assert run.steps == 12
    assert apart(values(second), values(whole)) == 0.0
    assert apart(values(first), values(whole)) > 1e-4


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_compiled() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(mh.BadInput, match=r"model\.compile"):
        mh.keras.task(model, *rows())


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense()
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(mh.BadInput, match="KERAS_BACKEND=torch"):
        mh.keras.task(model, *rows())


def test_no_keras_model() -> None:
    with pytest.raises(mh.BadInput, match=r"mh\.Task"):
        mh.keras.task(torch.nn.Linear(4, 3), *rows())


def test_a_step_of_the_models_own() -> None:
    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

        def train_step(self, data: Any) -> Any:
            return {}

    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(mh.BadInput, match="compute_loss"):
        mh.keras.task(model, *rows())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: keras.optimizers.Adam(use_ema=True), "use_ema"),
        (lambda: keras.optimizers.Adam(loss_scale_factor=2.0), "mixed_bfloat16"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mixed_bfloat16"),
    ],
)
def test_optimizers_that_do_more_than_step(make: Any, why: str) -> None:
    with pytest.raises(mh.BadInput, match=why):
        mh.keras.task(dense(optimizer=make()), *rows())


def test_arrays_with_data_of_whole_batches() -> None:
    with pytest.raises(mh.BadInput, match="gives whole batches"):
        mh.keras.task(dense(), "rows.parquet", rows()[1])
    with pytest.raises(mh.BadInput, match="there are no rows to build it from"):
        mh.keras.task(compiled(lambda: keras.layers.Dense(5)), "rows.parquet")


def test_fields_of_a_task_are_taken_and_others_refused() -> None:
    task = mh.keras.task(dense(), *rows(), batch_size_per_worker=4, clip_norm=1.0, name="mine")
    assert (task.batch_size, task.batch_size_per_worker, task.name) == (None, 4, "mine")
    with pytest.raises(mh.UnknownName, match="batchsize"):
        mh.keras.task(dense(), *rows(), batchsize=4)
