"""A Keras optimizer as PyTorch has optimizers: steps, a rate, and state by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.keras.backend import keras
from manyhands.keras.module import KerasModule

_NO_SLOTS = ("variables", "trainable_variables")


class KerasOptimizer(torch.optim.Optimizer):
    """Steps a model's trainable parameters by the optimizer that it was compiled with.

    `state[p]` holds the optimizer's variables for p under their Keras names (momentums, velocities, …), and its numbers, the
    same at each p: `step` is Keras's `iterations`. What is put there instead, by an average or a checkpoint, is what
    the next step goes on with; cleared state is that of a new optimizer. The group's `lr` follows the Keras optimizer's
    (its schedule, a callback), and the Keras optimizer's follows what a PyTorch schedule writes there.
    """

    def __init__(self, model: KerasModule) -> None:
        """Raises BadInput for an optimizer with variables that belong to no parameter, and are no numbers."""
        self.keras, self._model = model.keras.optimizer, model
        self._variables = model.trainable
        super().__init__([variable.value for variable in self._variables], {"lr": float(self.keras.learning_rate)})
        self._slots = _slots(self.keras, self._variables)
        self._numbers = _numbers(self.keras, self._slots)
        self._seen = self._rates()
        self._tell()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One Keras step with the parameters' gradients; those without one are left alone."""
        assert closure is None
        with self._model.placed():
            self._take()
            self.agree_on_rate()
            moved = [variable for variable in self._variables if variable.value.grad is not None]
            self.keras.apply([variable.value.grad for variable in moved], moved)
            self._tell()
            self.agree_on_rate()

    def agree_on_rate(self) -> None:
        """Whichever of the two rates was changed since, the other follows."""
        group, (mine, was) = self.param_groups[0], self._seen
        rate = float(self.keras.learning_rate)
        if rate != was:
            group["lr"] = rate
        elif group["lr"] != mine:
            self.keras.learning_rate = group["lr"]
        self._seen = self._rates()

    def _rates(self) -> tuple[float, float]:
        return self.param_groups[0]["lr"], float(self.keras.learning_rate)

    def _take(self) -> None:
        """Have the Keras variables be what `state` holds."""
        if not self.state:
            self._renew()
        for variable, slots in zip(self._variables, self._slots, strict=True):
            held = self.state[variable.value]
            for name, slot in slots.items():
                if held[name].data_ptr() != slot.value.data_ptr():
                    slot.value.data = held[name]
        held = self.state[self._variables[0].value]
        for name, number in self._numbers.items():
            number.assign(held[name])

    def _renew(self) -> None:
        """Have the Keras variables be those of a new optimizer, all but the rate."""
        with self._model.placed():
            new = type(self.keras).from_config(self.keras.get_config())
            new.build(self.keras._trainable_variables)
        for own, other in zip(self._slots, _slots(new, self._variables), strict=True):
            for name, slot in own.items():
                slot.assign(other[name])
        for name, number in _numbers(new, _slots(new, self._variables)).items():
            self._numbers[name].assign(number)
        self._tell()

    def _tell(self) -> None:
        """Have `state` hold the Keras variables."""
        numbers = {name: number.value.item() for name, number in self._numbers.items()}
        for variable, slots in zip(self._variables, self._slots, strict=True):
            held = self.state[variable.value]
            held.update(numbers)
            for name, slot in slots.items():
                if name not in held:
                    held[name] = slot.value.detach()


def _slots(optimizer: Any, variables: list[Any]) -> list[dict[str, Any]]:
    """{name: its variable} for each trainable variable. An optimizer holds each kind in a list, in the order of its build."""
    known = optimizer._trainable_variables
    place = {id(variable): i for i, variable in enumerate(known)}
    lists = {
        name.strip("_"): held
        for name, held in vars(optimizer).items()
        if isinstance(held, list)
        and len(held) == len(known)
        and name.strip("_") not in _NO_SLOTS
        and all(one is None or isinstance(one, keras.Variable) for one in held)
    }
    unknown = [variable.path for variable in variables if id(variable) not in place]
    if unknown:
        raise BadInput(
            f"the optimizer was built for other weights; it does not know {', '.join(unknown[:5])}: compile the model again after layers "
            "were frozen or released"
        )
    picked = [(variable, place[id(variable)]) for variable in variables]
    return [{name: held[i] for name, held in lists.items() if held[i] is not None} for _, i in picked]


def _numbers(optimizer: Any, slots: list[dict[str, Any]]) -> dict[str, Any]:
    """{name: variable} of what the optimizer counts for all parameters together; its rate apart."""
    held = {name.strip("_"): one for name, one in vars(optimizer).items() if isinstance(one, keras.Variable)}
    rate = held.pop("learning_rate", None)
    known = {id(one) for own in slots for one in own.values()} | {id(one) for one in (rate, *held.values())}
    strange = [one.path for one in optimizer.variables if id(one) not in known | _of_others(optimizer)]
    if strange or any(one.value.numel() != 1 for one in held.values()):
        raise BadInput(
            f"{type(optimizer).__name__} keeps {', '.join(strange[:5] or held)}, which no single weight of the model has: take another optimizer"
        )
    return {"step" if name == "iterations" else name: one for name, one in held.items()}


def _of_others(optimizer: Any) -> set[int]:
    """The ids of slots of weights that were frozen after the optimizer was built."""
    return {id(one) for own in _slots(optimizer, optimizer._trainable_variables) for one in own.values()}
