"""An optimizer's per-parameter state as flat vectors, so that strategies can average it like parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.flat import Layout


class OptimizerState:
    """`vectors`: {state name: [D']}, of which the optimizer's own tensors (momentum, moments) are views.

    PyTorch makes state lazily, at a parameter's first step; `average` therefore first agrees on which parameters have
    state anywhere, and gives those that lack it here zeros.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: Layout, zeros: Callable[[], Tensor]) -> None:
        self._optimizer, self._layout, self._zeros = optimizer, layout, zeros
        self.vectors: dict[str, Tensor] = {}
        self._scalars: list[str] = []
        self._known = 0  # bits: parameters that have state on every rank

    def average(self, group: Group, weight: float, touched: int) -> None:
        """Replace every vector by the weighted mean over ranks, and every count (`step`) by the maximum.

        touched: bits, the same on all ranks: the parameters that any rank has stepped since the last call.
        """
        if touched | self._known != self._known:
            self._agree(group)
            self._known |= touched
        self._adopt()
        for vector in self.vectors.values():
            group.mean_(vector, weight)
        if self._scalars:
            self._take_maxima(group)

    def reset(self) -> None:
        """Forget all state, as after construction."""
        self._optimizer.state.clear()
        self._known = 0

    def _agree(self, group: Group) -> None:
        """All ranks learn the names of vectors and scalars, and who has state; missing ones are made, in one order."""
        mine = {"vectors": {}, "scalars": {}}  # type: dict[str, dict[str, list[int]]]
        for i, p in enumerate(self._layout.parameters):
            for name, value in self._optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape and name != "step":
                    mine["vectors"].setdefault(name, []).append(i)
                elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                    mine["scalars"].setdefault(name, []).append(i)
        everyone = group.all_gather_json(mine)
        for name in sorted({name for one in everyone for name in one["vectors"]} - set(self.vectors)):
            self.vectors[name] = self._zeros()
        self._scalars = sorted({name for one in everyone for name in one["scalars"]})
        for kind in ("vectors", "scalars"):
            for one in everyone:
                for name, parameters in one[kind].items():
                    self._complete(kind, name, parameters)

    def _complete(self, kind: str, name: str, parameters: list[int]) -> None:
        for i in parameters:
            p = self._layout.parameters[i]
            state = self._optimizer.state[p]
            if name not in state:
                state[name] = torch.zeros_like(p) if kind == "vectors" else torch.zeros((), dtype=torch.float32)

    def _adopt(self) -> None:
        """Make the optimizer's tensors views of the vectors again where they are not (new state, load_state_dict)."""
        for name, vector in self.vectors.items():
            for p, view in zip(self._layout.parameters, self._layout.views(vector), strict=True):
                tensor = self._optimizer.state.get(p, {}).get(name)
                if isinstance(tensor, Tensor) and tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor)
                    self._optimizer.state[p][name] = view

    def _take_maxima(self, group: Group) -> None:
        parameters = self._layout.parameters
        for name in self._scalars:
            mine = torch.tensor(
                [float(self._optimizer.state.get(p, {}).get(name, 0.0)) for p in parameters], dtype=torch.float64
            )
            highest = group.all_gather(mine).amax(0).tolist()
            for p, value in zip(parameters, highest, strict=True):
                state = self._optimizer.state.get(p, {})
                if isinstance(held := state.get(name), Tensor):
                    held.fill_(value)
                elif held is not None:
                    state[name] = type(held)(value)
