"""The first operation in which two passes differ: which draws, which mixes rows, which is not the same twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.evidence.check import source_locations
from manyhands.evidence.check.findings import SourceLocation
from manyhands.evidence.check.function_mode import OF_THE_TENSOR
from manyhands.evidence.check.interventions import FunctionCall

NOISE = 1e-7
"""Sums of the same rows beside others may differ by rounding."""

Sums = tuple[tuple[float, float, float], ...]  # of each tensor that a call gave: (sum, sum by place, sum of absolutes)


@dataclass(frozen=True)
class OperationRecord:
    """A call that gave tensors, and what they add up to."""

    function: str
    place: SourceLocation | None
    module: nn.Module | None
    whole: Sums
    first: Sums
    """Of the first half of the rows, where its tensors have rows; else nothing."""
    second: Sums


class OperationLog:
    """Give `after` to a Lens: it writes down all operations of a pass over a batch of `rows`, an even number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.operations: list[OperationRecord] = []

    def after(self, call: FunctionCall, result: Any) -> None:
        if call.name in OF_THE_TENSOR:
            return
        with torch.no_grad():
            tensors = [t.detach().double() for t in _tensors(result) if t.numel() and not t.is_complex()]
            halves = [t for t in tensors if t.dim() and t.shape[0] % self.rows == 0]
            self.operations.append(
                OperationRecord(
                    function=call.name,
                    place=source_locations.running(),
                    module=source_locations.module_running(),
                    whole=_sums(tensors),
                    first=_sums([t[: t.shape[0] // 2] for t in halves]),
                    second=_sums([t[t.shape[0] // 2 :] for t in halves]),
                )
            )


def first_change(one: OperationLog, other: OperationLog) -> OperationRecord | None:
    """Of two passes over the same batch."""
    return _first(one, other, lambda a, b: not _near(a.whole, b.whole, 0.0))


def first_mixing(ab: OperationLog, bc: OperationLog) -> OperationRecord | None:
    """Of a pass over rows A and B, and one over B and C: the first that gives B other values beside C than beside A."""
    return _first(ab, bc, lambda a, b: not (_near(a.whole, b.whole, 0.0) or _near(a.second, b.first, NOISE)))


def _first(
    one: OperationLog, other: OperationLog, differs: Callable[[OperationRecord, OperationRecord], bool]
) -> OperationRecord | None:
    for a, b in zip(one.operations, other.operations, strict=False):
        if a.function != b.function or len(a.whole) != len(b.whole):
            return a  # another way was taken
        if differs(a, b):
            return a
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _sums(tensors: list[Tensor]) -> Sums:
    return tuple((float(t.sum()), float(t.reshape(-1) @ _by_place(t)), float(t.abs().sum())) for t in tensors)


def _by_place(t: Tensor) -> Tensor:
    """[numbers of t] another factor for each, so that numbers which only change places are seen too."""
    return torch.arange(t.numel(), dtype=torch.float64, device=t.device).mul_(0.7).cos_()


def _near(a: Sums, b: Sums, share: float) -> bool:
    return len(a) == len(b) and all(_close(x, y, share) for x, y in zip(a, b, strict=True))


def _close(a: tuple[float, float, float], b: tuple[float, float, float], share: float) -> bool:
    if str(a) == str(b):  # NaN is NaN
        return True
    return all(abs(x - y) <= share * max(a[2], b[2]) for x, y in zip(a, b, strict=True))
