"""An optimizer's per-parameter state as flat vectors, so that strategies can average it like parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.errors import Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.layout import Layout

COUNTS = ("step", "mu_product", "eta", "mu")  # numbers about a parameter, also where the parameter is one number itself


class OptimizerState:
    """`vectors`: {state name: flat vector}, of which the optimizer's own tensors (momentum, moments) are views.

    PyTorch makes state lazily, at a parameter's first step; `average` therefore first agrees on which parameters have
    state anywhere, and gives those that lack it here zeros.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        zeros: Callable[[], FlatVector],
        named: Callable[[FlatVector], dict[str, Tensor]],
    ) -> None:
        """layout: of all parameters. zeros, named: the replica's."""
        self._optimizer, self._layout, self._zeros, self._named = optimizer, layout, zeros, named
        self.vectors: dict[str, FlatVector] = {}
        self._copies: dict[str, FlatVector] = {}  # by name, memory for the means of `vectors`
        self._scalars: list[str] = []
        self._known = 0  # bits: parameters that have state on every rank

    def average(self, group: Group, weight: float, grad_mask: int) -> None:
        """Replace every vector by the weighted mean over ranks. A parameter's numbers (`step`, NAdam's `mu_product`)
        all become those of the rank that has stepped it most, the lowest of several; without a `step`, each the
        largest.

        One rank alone is left as it is.
        grad_mask: bits, the same on all ranks: the parameters that any rank has stepped since the last call.
        Raises Unsupported, on all ranks, by name, for state that is neither like its parameter nor a number.
        """
        self.mean(group, weight, grad_mask)()

    def mean(self, group: Group, weight: float, grad_mask: int, *, copies: bool = False) -> Callable[[], None]:
        """`average`, of which the last part is left to what this returns: it writes the numbers.

        copies: the means are computed in further vectors, as many again, and it writes them, too.
        """
        if group.size == 1:
            return lambda: None
        if grad_mask | self._known != self._known:
            self._agree(group)
            self._known |= grad_mask
        self._adopt()
        means = self.vectors if not copies else {name: self._copy(name) for name in self.vectors}
        for vector in means.values():
            vector.mean_(group, weight)
        taken = self._most_advanced(group) if self._scalars else []

        def take_over() -> None:
            for name, vector in means.items() if copies else ():
                self.vectors[name].copy_(vector)
            for p, name, value in taken:
                self._put(p, name, value)

        return take_over

    def regroup(self) -> None:
        """Other ranks: who has state is asked again before the next average."""
        self._known = 0

    def reset(self) -> None:
        """Forget all state, as after construction."""
        self._optimizer.state.clear()
        self._known = 0

    def _agree(self, group: Group) -> None:
        """All ranks learn the names of vectors and scalars, and who has state; missing ones are made, in one order."""
        mine: dict[str, dict[str, list[int]]] = {"vectors": {}, "scalars": {}, "others": {}}
        for i, p in enumerate(self._layout.parameters):
            for name, value in self._optimizer.state.get(p, {}).items():
                if value is not None:
                    mine[_kind(name, value, p)].setdefault(name, []).append(i)
        everyone = group.all_gather_json(mine)
        self._refuse({name: i[0] for one in everyone for name, i in one["others"].items()})
        vectors, scalars = ({name for one in everyone for name in one[kind]} for kind in ("vectors", "scalars"))
        self._scalars = sorted(scalars)  # a number is like its parameter where that is one number, too
        for name in sorted(vectors - scalars - set(self.vectors)):
            self.vectors[name] = self._zeros()
        for one in everyone:
            for name, parameters in (*one["vectors"].items(), *one["scalars"].items()):
                self._complete(name, parameters)

    def _refuse(self, others: dict[str, int]) -> None:
        if others:
            listing = ", ".join(f"{name} (of {self._layout.names[i]})" for name, i in sorted(others.items()))
            raise Unsupported(
                f"{type(self._optimizer).__name__} keeps state that cannot be averaged, because it is neither a number "
                f"nor shaped like its parameter: {listing}. Give optimizer_state=kept or optimizer_state=reset"
            )

    def _complete(self, name: str, parameters: list[int]) -> None:
        on_device = counts_on_device(self._optimizer)
        for i in parameters:
            p = self._layout.parameters[i]
            state = self._optimizer.state[p]
            if state.get(name) is None:
                number = torch.zeros((), dtype=torch.float32, device=p.device if p in on_device else "cpu")
                state[name] = torch.zeros_like(p) if name in self.vectors else number

    def _adopt(self) -> None:
        """Make the optimizer's tensors views of the vectors again where they are not (new state, load_state_dict)."""
        for name, vector in self.vectors.items():
            views = self._named(vector)
            for owner, p in zip(self._layout.names, self._layout.parameters, strict=True):
                view = views[owner]
                tensor = self._optimizer.state.get(p, {}).get(name)
                if isinstance(tensor, Tensor) and tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor)
                    self._optimizer.state[p][name] = view

    def _copy(self, name: str) -> FlatVector:
        if name not in self._copies:
            self._copies[name] = self._zeros()
        return self._copies[name].copy_(self.vectors[name])

    def _most_advanced(self, group: Group) -> list[tuple[Tensor, str, float]]:
        """For each parameter and number, what is taken over."""
        names, parameters = self._scalars, self._layout.parameters
        mine = [float(self._optimizer.state.get(p, {}).get(name) or 0.0) for name in names for p in parameters]
        rows = group.all_gather(torch.tensor(mine, dtype=torch.float64))
        everyone = rows.view(group.size, len(names), len(parameters))
        taken = everyone.amax(0)
        if "step" in names:
            first = torch.from_numpy(everyone[:, names.index("step")].numpy().argmax(0))  # [P] the rank
            taken = everyone.gather(0, first.expand(1, len(names), -1))[0]
        return [
            (p, name, value)
            for name, values in zip(names, taken.tolist(), strict=True)
            for p, value in zip(parameters, values, strict=True)
        ]

    def _put(self, p: Tensor, name: str, value: float) -> None:
        state = self._optimizer.state.get(p, {})
        if isinstance(held := state.get(name), Tensor):
            held.fill_(value)
        elif held is not None:
            state[name] = type(held)(value)


def _kind(name: str, value: object, p: Tensor) -> str:
    if not isinstance(value, Tensor):
        return "scalars" if isinstance(value, int | float) else "others"
    if name in COUNTS or value.shape != p.shape:
        return "scalars" if value.numel() == 1 and value.dim() <= 1 else "others"
    return "vectors" if value.dtype == p.dtype else "others"


def counts_on_device(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """The parameters whose `step` lies on their own device, because the kernel that steps them counts there."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {p for group in groups for p in group["params"]}
