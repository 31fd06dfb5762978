"""A Keras optimizer as a PyTorch optimizer: steps, a learning rate, and state by parameter."""

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
    """Steps a model's trainable parameters with the optimizer that it was compiled with.

    `state[p]` holds the optimizer's variables for p under their Keras names (momentums, velocities, …), and its
    numbers, the same for each p: `step` is Keras's `iterations`. The next step uses what an average or a checkpoint
    writes there; cleared state resets the optimizer. The group's `lr` follows the Keras optimizer's (its schedule, a
    callback), and the Keras optimizer's follows a PyTorch schedule that writes `lr`.
    """

    def __init__(self, model: KerasModule) -> None:
        """Raises BadInput for an optimizer with variables that neither belong to a parameter nor are numbers."""
        self.keras, self._model = model.keras.optimizer, model
        self._variables = model.trainable
        super().__init__([variable.value for variable in self._variables], {"lr": float(self.keras.learning_rate)})
        self._slots = _slots(self.keras, self._variables)
        self._numbers = _numbers(self.keras, self._slots)
        self._last_rates = self._rates()
        self._write_state()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One Keras step with the parameters' gradients. Parameters without one do not change."""
        assert closure is None
        with self._model.placed():
            self._read_state()
            self.agree_on_rate()
            moved = [variable for variable in self._variables if variable.value.grad is not None]
            self.keras.apply([variable.value.grad for variable in moved], moved)
            self._write_state()
            self.agree_on_rate()

    def agree_on_rate(self) -> None:
        """Copy the rate that changed since the last call, Keras's or the group's, to the other."""
        group, (mine, was) = self.param_groups[0], self._last_rates
        rate = float(self.keras.learning_rate)
        if rate != was:
            group["lr"] = rate
        elif group["lr"] != mine:
            self.keras.learning_rate = group["lr"]
        self._last_rates = self._rates()

    def _rates(self) -> tuple[float, float]:
        return self.param_groups[0]["lr"], float(self.keras.learning_rate)

    def _read_state(self) -> None:
        """Set the Keras variables from `state`."""
        if not self.state:
            self._reset()
        for variable, slots in zip(self._variables, self._slots, strict=True):
            held = self.state[variable.value]
            for name, slot in slots.items():
                if held[name].data_ptr() != slot.value.data_ptr():
                    slot.value.data = held[name]
        held = self.state[self._variables[0].value]
        for name, number in self._numbers.items():
            number.assign(held[name])

    def _reset(self) -> None:
        """Set the Keras variables to those of a new optimizer, except for the rate."""
        with self._model.placed():
            new = type(self.keras).from_config(self.keras.get_config())
            new.build(self.keras._trainable_variables)
        for own, other in zip(self._slots, _slots(new, self._variables), strict=True):
            for name, slot in own.items():
                slot.assign(other[name])
        for name, number in _numbers(new, _slots(new, self._variables)).items():
            self._numbers[name].assign(number)
        self._write_state()

    def _write_state(self) -> None:
        """Set `state` from the Keras variables."""
        numbers = {name: number.value.item() for name, number in self._numbers.items()}
        for variable, slots in zip(self._variables, self._slots, strict=True):
            held = self.state[variable.value]
            held.update(numbers)
            for name, slot in slots.items():
                if name not in held:
                    held[name] = slot.value.detach()


def _slots(optimizer: Any, variables: list[Any]) -> list[dict[str, Any]]:
    """{name: variable} for each trainable variable. An optimizer has a list of each kind, in the order of its build."""
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
            f"the optimizer was built for other weights; it does not know {', '.join(unknown[:5])}: compile the model "
            "again after layers were frozen or released"
        )
    picked = [(variable, place[id(variable)]) for variable in variables]
    return [{name: held[i] for name, held in lists.items() if held[i] is not None} for _, i in picked]


def _numbers(optimizer: Any, slots: list[dict[str, Any]]) -> dict[str, Any]:
    """{name: variable} of the optimizer's numbers for all parameters together, without its rate."""
    held = {name.strip("_"): one for name, one in vars(optimizer).items() if isinstance(one, keras.Variable)}
    rate = held.pop("learning_rate", None)
    known = {id(one) for own in slots for one in own.values()} | {id(one) for one in (rate, *held.values())}
    frozen = _slots(optimizer, optimizer._trainable_variables)  # also of weights that were frozen after the build
    known |= {id(one) for own in frozen for one in own.values()}
    unknown = [one.path for one in optimizer.variables if id(one) not in known]
    if unknown or any(one.value.numel() != 1 for one in held.values()):
        raise BadInput(
            f"{type(optimizer).__name__} keeps {', '.join(unknown[:5] or held)}, which belongs to no single weight of the "
            "model: use another optimizer"
        )
    return {"step" if name == "iterations" else name: one for name, one in held.items()}
