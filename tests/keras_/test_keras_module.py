"""What manyhands sees of a Keras model."""

import copy
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from keras_models import Lazy, convolution, dense, keras, layer, of_four, rows

from manyhands.replica.layout import layouts_of

module_file: Any = Lazy("manyhands.keras.module")


def of(model: Any) -> Any:
    return module_file.KerasModule(model)


def test_trainable_weights_are_parameters_and_moving_averages_are_buffers() -> None:
    module = of(convolution())
    assert len(layouts_of(module)[0].names) == len(module.keras.trainable_variables)
    assert [name.rpartition("/")[2] for name, _ in module.named_buffers()] == ["moving_mean", "moving_variance"]
    assert all(p is v.value for p, v in zip(module.parameters(), module.trainable, strict=True))
    assert module_file.module_of(torch.nn.Sequential(module)) is module  # as an ensemble holds it


def test_a_frozen_layers_weights_are_neither_exchanged_nor_averaged() -> None:
    model = convolution()
    model.layers[0].trainable = False
    module = of(model)
    assert "0/kernel" not in layouts_of(module)[0].names
    assert "0/kernel" in dict(module.named_parameters())
    assert len(dict(module.named_buffers())) == 2


def test_the_mode_decides_on_noise_and_a_copy_draws_the_same() -> None:
    """A copy has the same weights, seeds and optimizer."""
    module, x = of(of_four(layer("GaussianNoise", 0.5))), torch.ones(2, 4)
    assert torch.equal(module.eval()(x), module(x))
    assert not torch.equal(module.train()(x), module(x))
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

    module = of(of_four(Doubled, loss=squared, metrics=[squared]))
    there = cloudpickle.loads(cloudpickle.dumps(module))
    x = torch.ones(2, 4)
    assert torch.equal(there.eval()(x), module.eval()(x))
    assert float(there.keras.compute_loss(x, x[:, 0], x)) == float(module.keras.compute_loss(x, x[:, 0], x))


def test_names_are_the_same_however_often_a_process_builds_the_model_and_no_two_are_alike() -> None:
    assert of(convolution()).names == of(convolution()).names
    assert of(dense()).names == ["0/kernel", "0/bias", "1/kernel", "1/bias"]
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, keras.layers.Dense(2, name="same")(keras.layers.Dense(3)(inputs)))
    for variable in outer.variables:
        variable._path = "a.b"
    outer.compile("sgd", "mse")
    assert of(outer).names == ["0/kernel", "0/bias", "0/kernel_1", "0/bias_1"]


@pytest.mark.nightly
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_moves_with_its_optimizer_and_its_metrics() -> None:
    model = dense()
    x, y = rows()
    model.fit(x, y, verbose=0)
    for device in ("cpu", "cuda:0"):
        module = of(model).to(device)
        own = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        assert {str(v.value.device) for v in own} == {device}
        assert module(torch.tensor(x, device=device)).device == torch.device(device)
    assert np.isfinite(model.predict(x, verbose=0)).all()
