"""A Keras model as a torch module: trainable weights are parameters, all else that training changes is a buffer.

On the torch backend every Keras variable is an `nn.Parameter`, a moving average as well as a kernel. `KerasModule`
holds the model's own tensors, so whatever is written to them is in the user's model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.keras.backend import keras

SEEDS = "seed_generator_state"


class KerasModule(nn.Module):
    """A compiled and built Keras model. The constructor builds its optimizer.

    keras: the model itself. counts: whether training updates its metrics. Weights of frozen layers are parameters
    without gradient; moving averages and the states of seed generators are buffers.
    """

    keras: Any

    def __init__(self, model: Any, names: list[str] | None = None) -> None:
        """names: of the model's variables, in its order, as another process has named them."""
        super().__init__()
        self.__dict__["keras"] = model  # not as a child: its tensors are registered below
        self.counts = False
        self.names = _names(model) if names is None else names
        frozen = _weights(model)
        for name, variable in zip(self.names, model.variables, strict=True):
            if variable.trainable or id(variable) in frozen:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value)
        if not model.optimizer.built:
            with self.placed():
                model.optimizer.build(model.trainable_variables)

    @override
    def forward(self, inputs: Any) -> Any:
        """The model's outputs; `training` is this module's mode."""
        if self.keras.training != self.training:
            self.keras.train(self.training)  # for torch layers inside
        mode = {"training": self.training} if self.keras._call_has_training_arg else {}
        with self.placed():
            return self.keras(inputs, **mode)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Make Keras compute on the model's device; by default it takes the first GPU."""
        with keras.device(str(next(self.parameters()).device)):
            yield

    @property
    def trainable(self) -> list[Any]:
        """The trainable variables, in the order of the parameters."""
        return [variable for variable in self.keras.variables if variable.trainable]

    def seeds(self) -> list[Tensor]:
        """[2] of each seed generator: its seed, and the number of draws."""
        return [variable.value for variable in self.keras.variables if variable.name == SEEDS]

    @override
    def cpu(self) -> KerasModule:
        """Move to Keras's default device, for `model.predict`: a GPU, if the machine has one."""
        return self.to(keras.ops.zeros(()).device)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KerasModule:
        own = (*self.keras.variables, *self.keras.metrics_variables, *self.keras.optimizer.variables)
        for tensor in (variable.value for variable in own):
            tensor.data = fn(tensor.data)
        return self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Keras's own archive, with the seeds and the classes of this process, which the archive does not have."""
        rebuild, arguments = self.keras.__reduce__()
        return _rebuilt, (
            rebuild,
            arguments,
            _objects(self.keras),
            self.names,
            [seed.tolist() for seed in self.seeds()],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModule:
        """As by pickle, on the same device."""
        _, arguments = self.__reduce__()
        return _rebuilt(*copy.deepcopy(arguments, memo)).to(next(self.parameters()).device)


def module_of(model: nn.Module) -> KerasModule:
    """The Keras model in a task's model, or the first of an ensemble's."""
    return next(module for module in model.modules() if isinstance(module, KerasModule))


def _rebuilt(
    rebuild: Callable[..., Any], arguments: tuple[Any, ...], objects: dict[str, Any], names: list[str], seeds: list[Any]
) -> KerasModule:
    with keras.device("cpu"), keras.saving.custom_object_scope(objects):
        module = KerasModule(rebuild(*arguments), names)
    for state, seed in zip(module.seeds(), seeds, strict=True):
        state.copy_(torch.tensor(seed))
    return module


def _names(model: Any) -> list[str]:
    """A name for each variable: its layer's number and its own name, `2/kernel`. Further ones of a name are numbered.

    Keras's own names (dense_7) count the layers of the whole process, so a second model would not find its checkpoint.
    """
    layers: dict[str, int] = {}
    taken: Counter[str] = Counter()
    names = []
    for variable in model.variables:
        layer = layers.setdefault(variable.path.rpartition("/")[0], len(layers))
        name = f"{layer}/{variable.name}".replace(".", "_")
        names.append(f"{name}_{taken[name]}" if taken[name] else name)
        taken[name] += 1
    return names


def _weights(model: Any) -> set[int]:
    """The ids of the variables that are trainable if no layer is frozen."""
    layers = model._flatten_layers()  # Keras has no public way to all layers at any depth
    return {id(variable) for layer in layers for variable in layer._trainable_variables}


def _objects(model: Any) -> dict[str, Any]:
    """{name: class or function} that Keras needs to rebuild the model and a worker cannot import."""
    given = keras.tree.flatten(model._compile_config.config) if model._compile_config is not None else []
    found = [type(layer) for layer in model._flatten_layers()]
    found += [one if callable(one) and hasattr(one, "__name__") else type(one) for one in given]
    own = {one.__name__: one for one in found if one.__module__.partition(".")[0] not in ("keras", "builtins")}
    return {**own, **keras.saving.get_custom_objects()}
