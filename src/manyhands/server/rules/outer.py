"""The outer optimizer: any elementwise torch optimizer as a server's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.server.pushes import Push
from manyhands.server.rules.base import Rule, check_positive, weighted_mean

ELEMENTWISE = (
    "SGD",
    "Adagrad",
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ASGD",
)
"""The elementwise torch optimizers: others cannot be split over shards, nor use a flat vector."""


@dataclass(kw_only=True)
class OuterRule(Rule):
    """-update is a pseudo-gradient, and the center takes a step of a torch optimizer along it.

    DiLoCo: Distributed Low-Communication Training of Language Models, Douillard et al., 2023; before, Adaptive
    Federated Optimization, Reddi et al., 2020. The pushes of one round are one pseudo-gradient, their weighted mean,
    and one step; a push that comes alone is one step.
    """

    optimizer: str = "SGD"
    """The name of a torch optimizer that treats every weight by itself."""
    rate: float = 0.7
    """Its lr. DiLoCo's is 0.7; 1 with momentum 0 moves the center to the mean of the workers."""
    momentum: float = 0.0
    """For SGD and RMSprop. DiLoCo's is 0.9; less, where the loss rises after the first rounds."""
    nesterov: bool = False
    """For SGD with momentum, as in DiLoCo."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer, by torch's names (betas, eps, weight_decay, ...)."""
    _center: Tensor = field(init=False, repr=False)  # [n] torch's parameter: the new version, whatever its memory
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("rate", self.rate)
        if self.optimizer not in ELEMENTWISE:
            raise BadInput(
                f"the outer optimizer must be one of {', '.join(ELEMENTWISE)}, which update each weight by itself; got "
                f"{self.optimizer!r}"
            )
        self._make(torch.zeros(1))  # wrong options raise now

    @override
    def start(self, center: Tensor) -> None:
        self._center = torch.empty_like(center)
        self._optimizer = self._make(self._center)

    @override
    def merge(self, old: Tensor, new: Tensor, pushes: Sequence[Push]) -> None:
        if new is not old:
            new.copy_(old)
        self._center.data = new
        self._center.grad = weighted_mean(pushes).neg()
        self._optimizer.step()
        self._center.grad = None

    @override
    def vectors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._state.items() if isinstance(value, Tensor) and value.dim() == 1}

    @override
    def numbers(self) -> dict[str, Any]:
        scalars = {name: value for name, value in self._state.items() if isinstance(value, Tensor) and not value.dim()}
        return {"scalars": {name: float(value) for name, value in scalars.items()}}

    @override
    def load(self, center: Tensor, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """A fresh optimizer with the state that was captured: torch makes its own only at the first step."""
        self.start(center)
        state = self._optimizer.state[self._center]
        state.update({name: vector.clone() for name, vector in vectors.items() if name != "center"})
        state.update({name: torch.tensor(value) for name, value in numbers["scalars"].items()})

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(self._center, {})
        return state

    def _make(self, center: Tensor) -> torch.optim.Optimizer:
        arguments: dict[str, Any] = {"lr": self.rate, **self.options}
        if self.momentum:
            arguments["momentum"] = self.momentum
        if self.nesterov:
            arguments["nesterov"] = True
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)([center], **arguments)
        except (TypeError, ValueError) as error:
            raise BadInput(f"torch.optim.{self.optimizer} does not take {arguments}: {error}") from error
        return made
