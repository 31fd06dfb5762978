"""How far a run's parameters are from another's, measured at every validation by a sketch among the metrics.

A count sketch of a vector p [D] is k sums: every weight p_i is added, with a random sign σ_i, to a random one of k
buckets. Signs and buckets are the same in all runs, so that the difference of two sketches is the sketch of the
difference, and

    |sketch(p) - sketch(s)|² has the mean |p - s|²  and a variance of at most 2 |p - s|⁴ / k,

since the cross terms 2 Σ_{i<j} σ_i σ_j d_i d_j [same bucket] have mean 0 and variance 2 / k · (|d|⁴ - Σ d_i⁴). So the
standard error of the estimated distance is at most about 1 / sqrt(2k) of it: 3.1 % with k = 512. Parameters that are
equal have equal sketches.

Sources: Finding Frequent Items in Data Streams, Moses Charikar, Kevin Chen, Martin Farach-Colton, 2002 (the sketch);
The Space Complexity of Approximating the Frequency Moments, Noga Alon, Yossi Matias, Mario Szegedy, 1996 (its norm as
an estimate).
Deviation: one row of buckets, no median of several, since the norm is wanted and no single weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.replica.evaluation import AveragedOutputs
from manyhands.task import Evaluate, Measure, Metrics, Task

BUCKETS = 512
SEED = 20020708
PIECE = 1 << 18  # weights at a time: their signs and buckets take 8 bytes each
_ENTRY, _NORM = "__sketch_{}__", "__sketch_norm__"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sketch:
    """What a validation reported of the parameters."""

    buckets: Tensor  # float64 [BUCKETS]
    norm: float  # of the parameters, exact

    def distance(self, other: Sketch) -> float | None:
        """|p - s| / |s|, estimated with a relative standard error of 1 / sqrt(2 · BUCKETS); None where |s| is 0."""
        return float((self.buckets - other.buckets).norm()) / other.norm if other.norm else None


@dataclass
class Probe:
    """A task's `evaluate` that also returns a sketch of the model's trainable parameters, once for each set of them.

    A pass over the validation rows has the same parameters from its first batch to its last; where the bits are those
    of the batch before, none is returned. Every rank that has rows returns the same sketch with weight 1, so that their
    mean is it. Ensembles, which have many sets of parameters, return none. Goes to workers as the task's other
    functions do.
    """

    measure: Evaluate
    _seen: int | None = field(default=None, init=False, repr=False)

    def __call__(self, model: nn.Module, batch: Any) -> Metrics:
        metrics = dict(self.measure(model, batch))
        if isinstance(model, AveragedOutputs):
            return metrics
        weights = [p for p in model.parameters() if p.requires_grad]
        bits = fingerprint(weights)
        if bits == self._seen:
            return metrics
        self._seen = bits
        return metrics | as_metrics(sketch(weights))


def probed(task: Task) -> Task:
    """The task, its validations telling sketches, too."""
    return task.with_fields(evaluate=Probe(task.metrics))


def fingerprint(weights: Sequence[Tensor]) -> int:
    """A checksum of the bits of these tensors: it changes, almost surely, with every training step."""
    total = 0
    for weight in weights:
        words = (torch.view_as_real(weight) if weight.is_complex() else weight).detach().contiguous().reshape(-1)
        words = words.view(_WORDS[words.element_size()])
        total = (total * 1_000_003 + int(words.sum(dtype=torch.int64))) & (1 << 63) - 1
    return total


def sketch(weights: Sequence[Tensor]) -> Sketch:
    """Of all weights, one after the other. The same order, shapes and types in all runs that are compared."""
    generator = torch.Generator().manual_seed(SEED)
    buckets, square = torch.zeros(BUCKETS, dtype=torch.float64), 0.0
    for weight in weights:
        flat = (torch.view_as_real(weight) if weight.is_complex() else weight).detach().reshape(-1)
        for piece in flat.split(PIECE):
            values = piece.to("cpu", torch.float64)
            drawn = torch.randint(2 * BUCKETS, values.shape, generator=generator, device="cpu")
            signed = torch.where(drawn % 2 == 0, values, -values)
            buckets += torch.bincount(drawn // 2, weights=signed, minlength=BUCKETS)
            square += float(values.square().sum())
    return Sketch(buckets, math.sqrt(square))


def as_metrics(one: Sketch) -> dict[str, Measure]:
    """As metrics, with weight 1."""
    values = {_ENTRY.format(i): value for i, value in enumerate(one.buckets)} | {
        _NORM: torch.tensor(one.norm, dtype=torch.float64)
    }
    return {name: (value, 1.0) for name, value in values.items()}


def taken(metrics: dict[str, float], prefix: str) -> Sketch | None:
    """The sketch among metrics that begin with `prefix`, taken out of them; None where there is none."""
    norm = metrics.pop(prefix + _NORM, None)
    if norm is None:
        return None
    buckets = [metrics.pop(prefix + _ENTRY.format(i)) for i in range(BUCKETS)]
    return Sketch(torch.tensor(buckets, dtype=torch.float64), norm)
