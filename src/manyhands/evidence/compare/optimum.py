"""The parameters that minimise a task's loss over its training rows: as the task declares them, or found where it says
that the loss is convex.

Found by full-batch L-BFGS in float64: On the Limited Memory BFGS Method for Large Scale Optimization, Dong C. Liu, Jorge
Nocedal, 1989 (torch's, with its strong-Wolfe line search).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import rng, units
from manyhands.data.batch import map_columns
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.errors import BadInput
from manyhands.evidence.compare.trial import fresh
from manyhands.task import CONVEX, Task
from manyhands.training.plan import build_model

BATCH = 4096  # rows of a forward, where the data has no batches of its own
MOST_ITERATIONS = 10_000
HISTORY = 50  # steps from which L-BFGS knows the curvature
TOLERANCE = 1e-12  # of the largest element of the gradient, as a share of its largest at the start: then it ends
ACCEPTED = 1e-7  # the same share with which it must end


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Where the loss over all training rows is least."""

    parameters: Tensor
    """Float64 [D]: the trainable parameters in the model's order, each in row-major order, as `Run.parameters`."""
    loss: float
    how: str
    """For people: `declared by the task`, `L-BFGS over 400 rows, 23 iterations`."""
    loss_at: Callable[[Tensor], float]
    """[D] -> the mean loss over all training rows, in float64."""

    def distance(self, parameters: Tensor) -> float:
        """|p - x| / |x|; |p| where x is 0."""
        size = float(self.parameters.norm())
        return float((parameters.double() - self.parameters).norm()) / (size or 1.0)

    def excess(self, parameters: Tensor) -> float:
        """The loss there, less the least."""
        return self.loss_at(parameters) - self.loss


def optimum_of(task: Task, say: Callable[[str], None] = lambda line: None) -> Optimum | None:
    """None where the task says nothing of it. All training rows are held in memory meanwhile.

    Raises BadInput for one that does not fit the model, and where L-BFGS does not come to an end.
    """
    if task.optimum is None:
        return None
    full = _FullBatch(task)
    if task.optimum != CONVEX:
        declared = full.declared(task.optimum)
        return Optimum(
            parameters=declared, loss=full.loss_at(declared), how="declared by the task", loss_at=full.loss_at
        )
    say(f"looking for the optimum: L-BFGS over {units.count(full.rows, 'row')}")
    iterations = full.minimise()
    found = full.parameters()
    how = f"L-BFGS over {units.count(full.rows, 'row')}, {units.count(iterations, 'iteration')}"
    return Optimum(parameters=found, loss=full.loss_at(found), how=how, loss_at=full.loss_at)


class _FullBatch:
    """A task's model and training rows in float64."""

    def __init__(self, task: Task) -> None:
        with rng.kept():
            rng.seed_all(task.seed)
            self.model = build_model(task.with_fields(model=fresh(task.model))).cpu().double().eval()
            source = open_source(task.train_data, collate=task.collate, loader_processes=0)
            feed = Feed(source, batch_size=source.batch_size or BATCH, shuffle=False, device=torch.device("cpu"))
            with closing(feed.epoch(0)) as slices:
                self._batches = [(_double(part.batch), part.rows) for part in slices]
        self._loss = task.loss
        self.rows = sum(rows for _, rows in self._batches)
        self._named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def minimise(self) -> int:
        """Moves the model there; the number of iterations. BadInput where the gradient stays."""
        parameters = list(self._named.values())
        stepper = torch.optim.LBFGS(
            parameters,
            max_iter=MOST_ITERATIONS,
            max_eval=2 * MOST_ITERATIONS,
            history_size=HISTORY,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            stepper.zero_grad()
            return self._mean(backward=True)

        first = _steepest(parameters, closure)
        stepper.param_groups[0]["tolerance_grad"] = TOLERANCE * first
        stepper.step(closure)
        last = _steepest(parameters, closure)
        if first and not last <= ACCEPTED * first:
            raise BadInput(
                f'the task says optimum="convex", and L-BFGS ended with a gradient of {last:.2g}, which was {first:.2g} at the start: declare the '
                "optimum ({name: tensor}), or leave it out where the loss is not convex and smooth"
            )
        return int(stepper.state[parameters[0]]["n_iter"]) if first else 0

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._named.values()])

    def loss_at(self, parameters: Tensor) -> float:
        at = 0
        with torch.no_grad():
            for p in self._named.values():
                p.copy_(parameters[at : at + p.numel()].reshape(p.shape))
                at += p.numel()
            return float(self._mean())

    def declared(self, given: Mapping[str, Any]) -> Tensor:
        """As one vector; BadInput unless it has the model's trainable parameters by name and shape."""
        tensors = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in given.items()}
        shapes = {name: list(p.shape) for name, p in self._named.items()}
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != shapes:
            got = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise BadInput(f"the task's optimum must have the model's trainable parameters, {shapes}; it has {got}")
        return torch.cat([tensors[name].reshape(-1) for name in self._named])

    def _mean(self, backward: bool = False) -> Tensor:
        """The mean over all rows, by what the loss counts; backward: its gradient is added to the parameters'."""
        measures = []
        for batch, rows in self._batches:
            measure = self._loss(self.model, batch)
            measures.append(measure if isinstance(measure, tuple) else (measure, rows))
        total = math.fsum(float(weight) for _, weight in measures)
        mean = torch.stack([value.reshape(()) * (float(weight) / total) for value, weight in measures if weight]).sum()
        if backward:
            mean.backward()
        return mean.detach()


def _double(batch: Any) -> Any:
    def column(one: Any) -> Any:
        return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one

    return map_columns(batch, column)


def _steepest(parameters: list[nn.Parameter], closure: Callable[[], Tensor]) -> float:
    """The largest element of the gradient."""
    closure()
    return max(float(p.grad.abs().max()) for p in parameters if p.grad is not None and p.grad.numel())
