"""One batch in one process: what draws, what changes under the hand, and what kind of mean a loss or a metric is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands import rng
from manyhands.data.batch import rows_of, slice_rows
from manyhands.evidence.check.function_mode import FunctionMode, Seen
from manyhands.evidence.check.generators import positions
from manyhands.evidence.check.interventions import FunctionCall
from manyhands.evidence.check.trial_config import TrialConfig, in_double, memory_of, model_of_setting
from manyhands.task import Measure, Summed, Task

MEAN, SUM, OTHER_WEIGHT, COUPLED = "mean", "sum", "other-weight", "coupled"


@dataclass(frozen=True, kw_only=True)
class BatchMeasurement:
    """One forward and backward pass in training mode, from the initial parameters."""

    loss: float
    weight: float
    gradient: Tensor
    """[D]"""
    seen: tuple[Seen, ...]
    changed: tuple[str, ...]
    """Parameters that are not what they were before, without any step."""
    buffers: tuple[str, ...]
    """The same of buffers."""
    moved: tuple[str, ...]
    """Whose generators were drawn from: torch, numpy, python."""

    def same_as(self, other: BatchMeasurement) -> bool:
        """The same bits of loss and gradient; NaN is NaN."""
        losses = self.loss == other.loss or (self.loss != self.loss and other.loss != other.loss)
        return losses and torch.equal(self.gradient.nan_to_num(), other.gradient.nan_to_num())

    def far_from(self, other: BatchMeasurement) -> float:
        """The larger relative difference of loss and gradient."""
        gradient = float((self.gradient - other.gradient).abs().max()) / max(float(self.gradient.abs().max()), 1e-300)
        return max(abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss), 1e-300), gradient)


class Subject:
    """A model and its loss, built from a task of its own under the task's seed."""

    def __init__(self, task: Task, double: bool) -> None:
        self.task, self.double = task, double
        rng.seed_all(task.seed)
        self.model = model_of_setting(task.model, TrialConfig(steps=1, batch_size=None, double=double)).cpu()
        self._parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def measure(
        self,
        batch: Any,
        *,
        without: frozenset[str] = frozenset(),
        seed: int = 0,
        look: bool = False,
        after: Callable[[FunctionCall, Any], None] | None = None,
    ) -> BatchMeasurement:
        """Raises what the user's code raises. `without`, `look`, `after`: as `FunctionMode` takes them."""
        self.restore()
        rng.seed_all(seed)
        before = positions()
        mode = FunctionMode(double=self.double, without=without, guarded=memory_of(self.model), look=look, after=after)
        with mode:
            mean, weight = self._loss(batch)
            moved = tuple(name for name, state in positions().items() if state != before[name])
            mean.reshape(()).backward()
        changed = _changed(self._parameters, dict(self.model.named_parameters()))
        buffers = _changed(self._buffers, dict(self.model.named_buffers()))
        return BatchMeasurement(
            loss=float(mean.detach()),
            weight=weight,
            gradient=self._gradient(),
            seen=tuple(mode.seen),
            changed=changed,
            buffers=buffers,
            moved=moved,
        )

    def metrics(self, batch: Any) -> dict[str, tuple[float, float]]:
        """{name: (mean, weight)} of `evaluate`, in evaluation mode; what is `Summed` is exact by itself."""
        self.restore()
        rng.seed_all(0)
        self.model.eval()
        with torch.no_grad(), FunctionMode(double=self.double):
            measures = self.task.metrics(self.model, in_double(batch) if self.double else batch)
        return {name: _numbers(one, batch) for name, one in measures.items() if not isinstance(one, Summed)}

    def changed_by_metrics(self, batch: Any) -> tuple[tuple[str, ...], tuple[Seen, ...]]:
        """(parameters that `evaluate` changes, what wrote to them)"""
        self.restore()
        self.model.eval()
        with torch.no_grad(), FunctionMode(double=self.double, look=True, guarded=memory_of(self.model)) as mode:
            self.task.metrics(self.model, in_double(batch) if self.double else batch)
        return _changed(self._parameters, dict(self.model.named_parameters())), tuple(mode.seen)

    def restore(self) -> None:
        """Parameters and buffers as they were built; training mode, no gradients."""
        self.model.train()
        with torch.no_grad():
            for own, values in (
                (self.model.named_parameters(), self._parameters),
                (self.model.named_buffers(), self._buffers),
            ):
                for name, tensor in own:
                    tensor.copy_(values[name])
                    tensor.grad = None

    def name_of(self, module: Any) -> str:
        """A module's dotted name, as before torch.compile; "" of what is none of the model's."""
        found = next((name for name, own in self.model.named_modules() if own is module), "")
        return found.replace("_orig_mod.", "")

    def _loss(self, batch: Any) -> tuple[Tensor, float]:
        measure = self.task.loss(self.model, in_double(batch) if self.double else batch)
        mean, weight = measure if isinstance(measure, tuple) else (measure, rows_of(batch))
        return mean, float(weight)

    def _gradient(self) -> Tensor:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return torch.cat([grad.detach().double().reshape(-1) for grad in grads])


def _numbers(measure: Measure, batch: Any) -> tuple[float, float]:
    mean, weight = measure if isinstance(measure, tuple) else (measure, rows_of(batch))
    return float(mean), float(weight)


def _changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name, value in before.items() if not torch.equal(now[name].detach(), value))


# -- what kind of mean ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """How what is measured of rows together follows from what is measured of them apart."""

    kind: str
    """mean: their mean by weight, as it must be. sum: it adds up. other-weight: a mean, by other weights than were said.
    coupled: rows depend on which others are beside them."""
    off: float = 0.0
    """By how much the mean by weight misses the whole; relative."""
    constant: bool = False
    """Of a sum: a part of it does not add up (a penalty on the parameters)."""
    numbers: dict[str, float] = field(default_factory=dict)


Whole = tuple[float, float]  # (mean, weight)


def law_of(measure: Callable[[Any], Whole], batch: Any, tolerance: float, least: int = 1) -> Law:
    """Of three parts of a batch: its first half, the rest, and the last `least` rows.

    L(whole)·w(whole) = Σ L(part)·w(part) makes a mean; L(AB) = L(A) + L(B) - constant, for any parts, a sum; if there are
    weights with which L(AB), L(BC) and L(ABC) are means of L(A), L(B) and L(C), then it is a mean by those.
    """
    n = rows_of(batch)
    if n < 4 * least:
        return _law_of_two(measure, batch, tolerance)
    middle, last = n // 2, n - least
    cuts = [(0, n), (0, middle), (middle, last), (last, n), (0, last), (middle, n)]
    whole, a, b, c, ab, bc = (measure(slice_rows(batch, *cut)) for cut in cuts)
    scale = max(abs(mean) for mean, _ in (whole, a, b, c, ab, bc)) or 1.0
    off = _off(whole, (a, b, c), scale)
    numbers = {"whole": whole[0], "first": a[0], "second": b[0], "last": c[0]}
    if off <= tolerance:
        return Law(MEAN, off, numbers=numbers)
    added = a[0] + b[0] - ab[0], b[0] + c[0] - bc[0]  # the constant, twice
    adds = abs(added[0] - added[1]) <= tolerance * scale and abs(whole[0] - ab[0] - (bc[0] - b[0])) <= tolerance * scale
    if adds and abs(ab[0] - a[0]) > tolerance * scale:
        return Law(SUM, off, abs(added[0]) > tolerance * scale, numbers)
    kind = OTHER_WEIGHT if _has_weights(whole[0], a[0], b[0], c[0], ab[0], bc[0], tolerance * scale) else COUPLED
    return Law(kind, off, numbers=numbers)


def _law_of_two(measure: Callable[[Any], Whole], batch: Any, tolerance: float) -> Law:
    """Too few rows to tell all kinds apart."""
    n = rows_of(batch)
    if n < 2:
        return Law(MEAN)
    whole, a, b = (measure(slice_rows(batch, *cut)) for cut in ((0, n), (0, n // 2), (n // 2, n)))
    scale = max(abs(mean) for mean, _ in (whole, a, b)) or 1.0
    off = _off(whole, (a, b), scale)
    numbers = {"whole": whole[0], "first": a[0], "second": b[0]}
    if off <= tolerance:
        return Law(MEAN, off, numbers=numbers)
    adds = abs(a[0] + b[0] - whole[0]) <= tolerance * scale
    return Law(SUM if adds else COUPLED, off, numbers=numbers)


def _off(whole: Whole, parts: tuple[Whole, ...], scale: float) -> float:
    """Also where the weights alone do not add up."""
    total = sum(weight for _, weight in parts)
    mean = sum(mean * weight for mean, weight in parts if weight) / total if total else 0.0
    wrong = abs(total - whole[1]) / max(abs(total), abs(whole[1]), 1e-300)
    missed = abs(mean - whole[0]) / scale
    return max(missed, wrong) if np.isfinite(missed) else float("inf")


def _has_weights(whole: float, a: float, b: float, c: float, ab: float, bc: float, tolerance: float) -> bool:
    """Whether some weights of three parts make means of all of them: those that two pairs ask for are tried on the third."""
    if min(abs(b - ab), abs(c - bc)) <= tolerance:
        return False
    of_b = (ab - a) / (b - ab)  # with a's as 1
    of_c = of_b * (bc - b) / (c - bc)
    if not (of_b > 0 and of_c > 0):
        return False
    return abs((a + of_b * b + of_c * c) / (1 + of_b + of_c) - whole) <= 10 * tolerance * max(1.0, of_b, of_c)


def gradients_add(measure: Callable[[Any], BatchMeasurement], batch: Any, tolerance: float, least: int = 1) -> bool:
    """Whether the gradient of the whole is the mean of its parts', by weight; the last part has `least` rows."""
    n = rows_of(batch)
    if n < 2 * least:
        return True
    whole, a, b = (measure(slice_rows(batch, *cut)) for cut in ((0, n), (0, n - least), (n - least, n)))
    total = a.weight + b.weight
    if not total:
        return True
    mean = a.gradient * (a.weight / total) + b.gradient * (b.weight / total)
    return float((mean - whole.gradient).abs().max()) <= tolerance * max(float(whole.gradient.abs().max()), 1e-300)
