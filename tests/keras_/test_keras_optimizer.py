"""A Keras optimizer as PyTorch has optimizers."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import Lazy, apart, dense, keras, values

from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput
from manyhands.replica.replica import Replica

module: Any = Lazy("manyhands.keras.module")
optimizers: Any = Lazy("manyhands.keras.optimizer")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "clipnorm": 0.5}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "global_clipnorm": 1.0}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "centered": True}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1}),
    "adafactor": ("Adafactor", {"learning_rate": 0.01}),
    "accumulating": ("Adam", {"learning_rate": 0.01, "gradient_accumulation_steps": 2}),
    "muon": ("Muon", {"learning_rate": 0.01}),
}


def optimizer_of(name: str) -> Any:
    kind, options = OPTIMIZERS[name]
    if not hasattr(keras.optimizers, kind):
        pytest.skip(f"this Keras has no {kind}")
    return getattr(keras.optimizers, kind)(**options)


def replica_of(model: Any) -> Replica:
    return Replica.of(module.KerasModule(model), optimizers.KerasOptimizer, group=SoloGroup())


def adam() -> Replica:
    return replica_of(dense(optimizer="adam"))


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in like]


def stepped(replica: Replica, steps: range) -> None:
    for step in steps:
        for p, gradient in zip(replica.trainable, gradients(step, replica.trainable), strict=True):
            p.grad = gradient
        replica.optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_keras_does_and_goes_on_with_state_that_is_put_back(name: str) -> None:
    """As a checkpoint does it: other tensors under the same names, in a new optimizer."""
    plain = dense(optimizer=optimizer_of(name))
    first, second = (replica_of(dense(optimizer=optimizer_of(name))) for _ in range(2))

    def as_keras(steps: range) -> None:
        for step in steps:
            variables = plain.trainable_variables
            with torch.no_grad():
                plain.optimizer.apply(gradients(step, [v.value for v in variables]), variables)

    stepped(first, range(3))
    as_keras(range(3))
    assert apart(values(first.model.keras), values(plain)) < 1e-6
    second.parameters.copy_(first.parameters)
    second.optimizer_state.reset()
    for p, q in zip(second.trainable, first.trainable, strict=True):
        second.optimizer.state[p] = copy.deepcopy(dict(first.optimizer.state[q]))
    stepped(second, range(3, 5))
    as_keras(range(3, 5))
    assert apart(values(second.model.keras), values(plain)) < 1e-6


def test_cleared_state_is_a_new_optimizers() -> None:
    for name in ("adagrad", "nadam"):
        replica, fresh = (replica_of(dense(optimizer=optimizer_of(name))) for _ in range(2))
        stepped(replica, range(3))
        replica.optimizer_state.reset()
        replica.parameters.copy_(fresh.parameters)
        stepped(replica, range(5, 7))
        stepped(fresh, range(5, 7))
        assert replica.parameters.equal(fresh.parameters), name
        assert int(replica.model.keras.optimizer.iterations) == 2


def test_state_has_keras_names_and_shares_its_memory() -> None:
    replica = adam()
    stepped(replica, range(2))
    p = replica.trainable[0]
    state = replica.optimizer.state[p]
    assert state.keys() == {"momentums", "velocities", "step"}
    assert state["step"] == 2
    state["velocities"].fill_(4.0)
    assert float(replica.model.keras.optimizer._velocities[0].value.detach().mean()) == 4.0


def test_a_parameter_without_gradient_is_left_alone() -> None:
    replica = adam()
    before = replica.parameters.clone()
    first = replica.trainable[0]
    first.grad = torch.ones_like(first)
    replica.optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(replica.named(before).values(), replica.trainable, strict=True)]
    assert moved == [True, False, False, False]


def test_the_rate_follows_a_schedule_of_keras_or_of_pytorch_and_what_is_set_on_either_side() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    replica = replica_of(dense(optimizer=keras.optimizers.SGD(schedule)))
    stepped(replica, range(2))
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    replica = replica_of(dense(optimizer="sgd"))
    inner, group = replica.model.keras.optimizer, replica.optimizer.param_groups[0]
    inner.learning_rate = 0.5
    stepped(replica, range(1))
    assert group["lr"] == 0.5
    group["lr"] = 0.25
    stepped(replica, range(1))
    assert (float(inner.learning_rate), group["lr"]) == (0.25, 0.25)
    schedule = torch.optim.lr_scheduler.StepLR(replica.optimizer, 1, 0.5)
    stepped(replica, range(1))
    schedule.step()
    stepped(replica, range(1))
    assert float(inner.learning_rate) == pytest.approx(0.125)


def test_layers_that_were_frozen_before_or_after_the_optimizer_was_built() -> None:
    """It does not know weights that were frozen, and says so; it leaves out those that are frozen later."""
    model = dense()
    model.layers[0].trainable = False
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = True
    with pytest.raises(BadInput, match="compile the model again"):
        optimizers.KerasOptimizer(module.KerasModule(model))
    model = dense()
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    before = values(model)
    stepped(replica_of(model), range(2))
    same = [np.array_equal(a, b) for a, b in zip(before, values(model), strict=True)]
    assert same == [True, True, False, False]
