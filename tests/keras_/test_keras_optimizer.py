"""A Keras optimizer as PyTorch has optimizers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import apart, dense, keras, values

from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput
from manyhands.keras.module import KerasModule
from manyhands.keras.optimizer import KerasOptimizer
from manyhands.replica.replica import Replica

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}

if hasattr(keras.optimizers, "Muon"):  # newer than the oldest Keras that is supported
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)


def replica_of(optimizer: Any) -> Replica:
    return Replica.of(KerasModule(dense(optimizer=optimizer)), KerasOptimizer, group=SoloGroup())


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in like]


def stepped(replica: Replica, steps: range) -> None:
    for step in steps:
        for p, gradient in zip(replica.trainable, gradients(step, replica.trainable), strict=True):
            p.grad = gradient
        replica.optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_keras_does(name: str) -> None:
    replica, plain = replica_of(OPTIMIZERS[name]()), dense(optimizer=OPTIMIZERS[name]())
    stepped(replica, range(4))
    for step in range(4):
        variables = plain.trainable_variables
        with torch.no_grad():
            plain.optimizer.apply(gradients(step, [v.value for v in variables]), variables)
    assert apart(values(replica.model.keras), values(plain)) < 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_put_back_is_gone_on_with(name: str) -> None:
    """As a checkpoint does it: other tensors under the same names, in a new optimizer."""
    whole, first, second = (replica_of(OPTIMIZERS[name]()) for _ in range(3))
    stepped(whole, range(5))
    stepped(first, range(3))
    second.parameters.copy_(first.parameters)
    second.optimizer_state.reset()
    for p, q in zip(second.trainable, first.trainable, strict=True):
        second.optimizer.state[p] = copy.deepcopy(dict(first.optimizer.state[q]))
    stepped(second, range(3, 5))
    assert apart(values(second.model.keras), values(whole.model.keras)) < 1e-6


def test_cleared_state_is_a_new_optimizers() -> None:
    for make in (OPTIMIZERS["adagrad"], OPTIMIZERS["nadam"]):
        replica, fresh = replica_of(make()), replica_of(make())
        stepped(replica, range(3))
        replica.optimizer_state.reset()
        replica.parameters.copy_(fresh.parameters)
        stepped(replica, range(5, 7))
        stepped(fresh, range(5, 7))
        assert replica.parameters.equal(fresh.parameters)
        assert int(replica.model.keras.optimizer.iterations) == 2


def test_state_has_keras_names_and_shares_its_memory() -> None:
    replica = replica_of("adam")
    stepped(replica, range(2))
    p = replica.trainable[0]
    state = replica.optimizer.state[p]
    assert state.keys() == {"momentums", "velocities", "step"}
    assert state["step"] == 2
    state["velocities"].fill_(4.0)
    assert float(replica.model.keras.optimizer._velocities[0].value.detach().mean()) == 4.0


def test_a_parameter_without_gradient_is_left_alone() -> None:
    replica = replica_of("adam")
    before = replica.parameters.clone()
    first = replica.trainable[0]
    first.grad = torch.ones_like(first)
    replica.optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(replica.named(before).values(), replica.trainable, strict=True)]
    assert moved == [True, False, False, False]


def test_the_rate_follows_a_keras_schedule() -> None:
    replica = replica_of(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)))
    stepped(replica, range(2))
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_the_rate_follows_what_is_set_on_either_side() -> None:
    replica = replica_of("sgd")
    inner, group = replica.model.keras.optimizer, replica.optimizer.param_groups[0]
    inner.learning_rate = 0.5
    stepped(replica, range(1))
    assert group["lr"] == 0.5
    group["lr"] = 0.25
    stepped(replica, range(1))
    assert float(inner.learning_rate) == 0.25
    assert group["lr"] == 0.25


def test_a_pytorch_schedule_moves_the_keras_rate() -> None:
    replica = replica_of("sgd")
    schedule = torch.optim.lr_scheduler.StepLR(replica.optimizer, 1, 0.5)
    stepped(replica, range(1))
    schedule.step()
    stepped(replica, range(1))
    assert float(replica.model.keras.optimizer.learning_rate) == pytest.approx(0.005)


def test_an_optimizer_built_for_other_weights_is_refused() -> None:
    model = dense()
    model.layers[0].trainable = False
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = True
    with pytest.raises(BadInput, match="compile the model again"):
        KerasOptimizer(KerasModule(model))


def test_a_layer_that_was_frozen_later_is_left_out() -> None:
    model = dense()
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    before = values(model)
    replica = Replica.of(KerasModule(model), KerasOptimizer, group=SoloGroup())
    stepped(replica, range(2))
    after = values(model)
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
