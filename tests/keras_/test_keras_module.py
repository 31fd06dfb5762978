"""What manyhands sees of a Keras model."""

from __future__ import annotations

import copy

import cloudpickle
import keras_models
import numpy as np
import pytest
import torch
from keras_models import compiled, convolution, dense, keras

from manyhands.keras.module import KerasModule, module_of
from manyhands.replica.layout import layouts_of


def noisy() -> KerasModule:
    return KerasModule(compiled(lambda: keras.Input((4,)), lambda: keras.layers.GaussianNoise(0.5)))


def test_trainable_weights_are_parameters_and_moving_averages_are_buffers() -> None:
    module = KerasModule(convolution())
    assert len(layouts_of(module)[0].names) == len(module.keras.trainable_variables)
    assert [name.rpartition("/")[2] for name, _ in module.named_buffers()] == ["moving_mean", "moving_variance"]
    assert all(p is v.value for p, v in zip(module.parameters(), module.trainable, strict=True))


def test_a_frozen_layers_weights_are_neither_exchanged_nor_averaged() -> None:
    model = convolution()
    model.layers[0].trainable = False
    module = KerasModule(model)
    assert "0/kernel" not in layouts_of(module)[0].names
    assert "0/kernel" in dict(module.named_parameters())
    assert len(dict(module.named_buffers())) == 2


def test_the_mode_decides_on_training_and_evaluation() -> None:
    module, x = noisy(), torch.ones(2, 4)
    assert torch.equal(module.eval()(x), module(x))
    assert not torch.equal(module.train()(x), module(x))


def test_a_copy_has_the_same_weights_seeds_and_optimizer() -> None:
    module, x = noisy(), torch.ones(2, 4)
    module.train()(x)
    other = copy.deepcopy(module)
    assert other.names == module.names
    assert torch.equal(other.train()(x), module(x))
    assert other.keras.optimizer.get_config() == module.keras.optimizer.get_config()


def test_what_only_this_process_knows_travels_along() -> None:
    class Doubled(keras.layers.Layer):
        def call(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 2

    def squared(y: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        return keras.ops.square(keras.ops.mean(predicted, -1) - y)

    module = KerasModule(compiled(lambda: keras.Input((4,)), Doubled, loss=squared, metrics=[squared]))
    sent = cloudpickle.dumps(module)
    there = cloudpickle.loads(sent)
    x = torch.ones(2, 4)
    assert torch.equal(there.eval()(x), module.eval()(x))
    assert float(there.keras.compute_loss(x, x[:, 0], x)) == float(module.keras.compute_loss(x, x[:, 0], x))


def test_variables_of_one_path_and_name_have_names_of_their_own() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, keras.layers.Dense(2, name="same")(keras.layers.Dense(3)(inputs)))
    for variable in outer.variables:
        variable._path = "a.b"
    outer.compile("sgd", "mse")
    assert KerasModule(outer).names == ["0/kernel", "0/bias", "0/kernel_1", "0/bias_1"]


def test_names_are_the_same_however_often_a_process_builds_the_model() -> None:
    assert KerasModule(convolution()).names == KerasModule(convolution()).names
    assert KerasModule(dense()).names == ["0/kernel", "0/bias", "1/kernel", "1/bias"]


def test_an_ensemble_finds_its_model() -> None:
    module = KerasModule(dense())
    assert module_of(torch.nn.Sequential(module)) is module


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_moves_with_its_optimizer_and_its_metrics() -> None:
    model = dense()
    x, y = keras_models.rows()
    model.fit(x, y, verbose=0)
    for device in ("cpu", "cuda:0"):
        module = KerasModule(model).to(device)
        own = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        assert {str(v.value.device) for v in own} == {device}
        assert module(torch.tensor(x, device=device)).device == torch.device(device)
    assert np.isfinite(model.predict(x, verbose=0)).all()
