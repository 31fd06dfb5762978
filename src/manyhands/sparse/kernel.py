"""The contract of a kernel: an algorithm that changes rows of tables in place, and the model that is made of these."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from manyhands import units
from manyhands.errors import BadInput, is_number, is_whole
from manyhands.sparse.initial import initial_rows
from manyhands.sparse.rows import Rows

Arrays = Mapping[str, NDArray[Any]]
Measure = Tensor | tuple[Tensor, Any]  # a mean over the batch, or (mean, weight)


@dataclass(frozen=True)
class Summed:
    """Metrics that are no means over rows (AUC, perplexity): what to sum over batches and workers, and the result."""

    sums: Tensor
    """[k] of this batch."""
    result: Callable[[Tensor], Mapping[str, float]]
    """(the sum of all batches, float64 [k] on the CPU) -> {name: metric}; the names take the place of this one's."""


Metrics = Mapping[str, Measure | Summed | tuple[float, float]]
Measures = Mapping[str, tuple[float, float] | Summed]


class Touched(Protocol):
    """Which keys each row of the data touches: row i of numbers() those in keys[offsets[i]:offsets[i + 1]], below `features`."""

    @property
    def offsets(self) -> NDArray[Any]: ...
    @property
    def keys(self) -> NDArray[Any]: ...
    @property
    def features(self) -> int: ...
    def numbers(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TouchedKeys:
    """Of rows that all touch equally many keys."""

    keys: NDArray[Any]  # of all rows, one after the other
    features: int
    each: int

    @property
    def offsets(self) -> NDArray[np.int64]:
        return np.arange(0, len(self.keys) + 1, self.each, dtype=np.int64)

    def numbers(self) -> NDArray[np.int64]:
        return np.arange(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.keys) // self.each


class Kernel(ABC):
    """A step that moves parameters without gradients, as compiled code. Subclasses are frozen dataclasses: their fields are
    the algorithm's options.

    For each slice of a global batch the loop calls `prepare`, then `step`. Tables lie in the flat vector of a replica:
    every strategy that exchanges parameters or updates trains a kernel.
    """

    paired: ClassVar[bool] = False
    """Whether each row of the data has one key in each of two fields, as a rating has a user and an item, and each table is
    named by one of them: strategy rotate can cut its tables."""

    @property
    def name(self) -> str:
        """How errors call it."""
        return type(self).__name__

    @abstractmethod
    def tables(self) -> dict[str, Rows]:
        """What it trains, by name."""

    @abstractmethod
    def prepare(self, batch: Any, random: int) -> dict[str, NDArray[Any]]:
        """Arrays of a batch of the task's data, ready for `step`; every random draw is made here, from the number `random`.

        Afterwards all keys stand in the fields that `tables` names, and each is in range of its table. Raises BadInput
        for a batch that it cannot take.
        """

    @abstractmethod
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        """Go through what `prepare` made, in its order, and change rows in place; returns the sum of the losses.

        rows: by table, [rows, dim], C-contiguous.
        """

    @abstractmethod
    def measure(self, rows: Arrays, batch: Arrays) -> Measures:
        """{metric: (mean, its weight)} of what `prepare` made; "loss" is one of them. Changes nothing.

        A metric that is no mean over rows is a `Summed`.
        """

    def weight(self, batch: Arrays, rows: int) -> float:
        """What the mean loss of a prepared batch of so many rows is a mean of. Default: rows."""
        return float(rows)

    def touched(self, batch: Any) -> Touched | None:
        """Which keys each row of a batch of the data touches, those of all fields numbered one behind the other. None: a row
        is no single step, or nobody knows. Default: of a kernel that is `paired`."""
        if not self.paired:
            return None
        sizes = {field: rows.rows for rows in self.tables().values() for field in rows.fields}
        arrays = self.prepare(batch, 0)
        columns = [arrays[field].astype(np.uint32) for field in sizes]
        begins = np.cumsum([0, *sizes.values()])
        numbered = [column + np.uint32(begin) for column, begin in zip(columns, begins, strict=False)]
        return TouchedKeys(np.stack(numbered, 1).ravel(), int(begins[-1]), len(columns))

    def initial_rows(self, table: str, keys: NDArray[np.int64] | range, seed: int) -> NDArray[Any]:
        """[len(keys), dim]: how the rows of these keys of a table begin. Default: as its `Rows` say."""
        return initial_rows(self.tables()[table], table, seed, keys)

    def module(self, seed: int) -> KernelModel:
        """The model of its tables as they begin; a run's answer is one with the trained tables."""
        return KernelModel(self, seed)


class KernelModel(nn.Module):
    """The tables of a kernel as a model's parameters, by name, each [rows, dim]."""

    def __init__(self, kernel: Kernel, seed: int) -> None:
        super().__init__()
        self.kernel = kernel
        for name, rows in kernel.tables().items():
            began = kernel.initial_rows(name, range(rows.rows), seed)
            self.register_parameter(name, nn.Parameter(torch.from_numpy(began)))

    def tables(self) -> dict[str, NDArray[Any]]:
        """[rows, dim] by name: views of the parameters' memory."""
        return {name: p.detach().numpy() for name, p in self.named_parameters()}


@dataclass(frozen=True)
class ModelOfKernel:
    """What stands in a task with a kernel for its `model`."""

    kernel: Kernel
    seed: int

    def __call__(self) -> KernelModel:
        return self.kernel.module(self.seed)


@dataclass(frozen=True)
class LossOfKernel:
    """What stands there for its `loss`: that of rows, which nothing can be differentiated by."""

    kernel: Kernel

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        loss = measured(model, batch)["loss"]
        assert isinstance(loss, tuple), "the loss of a kernel is a mean"
        mean, weight = loss
        return torch.tensor(mean, dtype=torch.float64), weight


@dataclass(frozen=True)
class RateOfKernel:
    """What stands there for its `optimizer`."""

    rate: float

    def __call__(self, model: nn.Module) -> Rate:
        return Rate(model.parameters(), self.rate)


class Rate(torch.optim.Optimizer):
    """Holds a kernel's rate, which schedules move. The kernel makes the steps."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("a kernel makes its steps itself")


def measured(model: nn.Module, batch: Any) -> Measures:
    """What the kernel of a model measures on a batch of the task's data. BadInput for another model."""
    kernel = getattr(model, "kernel", None)
    if not (isinstance(model, KernelModel) and isinstance(kernel, Kernel)):
        raise BadInput(
            f"the metrics of a kernel are those of one model of its tables, not of a {type(model).__name__}: give the task a function "
            "evaluate(model, batch)"
        )
    return kernel.measure(model.tables(), kernel.prepare(batch, 0))


def check_whole(kernel: Kernel, *names: str, least: int = 1) -> None:
    """BadInput where one of these options is no whole number of at least `least`."""
    for name in names:
        if not is_whole(value := getattr(kernel, name), least):
            raise BadInput(f"kernel {kernel.name}: {name} must be a whole number of at least {least}, not {value!r}")


def check_at_least_0(kernel: Kernel, *names: str) -> None:
    """BadInput where one of these options is no finite number of at least 0."""
    for name in names:
        if not (is_number(value := getattr(kernel, name)) and 0 <= value < math.inf):
            raise BadInput(f"kernel {kernel.name}: {name} must be a number of at least 0, not {value!r}")


def check_above_0(kernel: Kernel, *names: str) -> None:
    """BadInput where one of these options is no finite number above 0."""
    for name in names:
        if not (is_number(value := getattr(kernel, name)) and 0 < value < math.inf):
            raise BadInput(f"kernel {kernel.name}: {name} must be a number above 0, not {value!r}")


def columns_of(batch: Any, names: Iterable[str], kernel: Kernel) -> dict[str, NDArray[Any]]:
    """These fields of a batch, a mapping of tensors or arrays, as arrays. BadInput where one is missing."""
    wanted = list(names)
    if not isinstance(batch, Mapping):
        raise BadInput(
            f"kernel {kernel.name} takes rows with the fields {', '.join(wanted)}: give train_data as a dict of equally long arrays of these names, "
            f"not what gives batches of {type(batch).__name__}"
        )
    if missing := [name for name in wanted if name not in batch]:
        raise BadInput(
            f"kernel {kernel.name}: its data has no field {units.listed(missing, 5)}; it has {units.listed(list(map(str, batch)), 10)}"
        )
    return {name: _array(batch[name]) for name in wanted}


def check_keys(keys: NDArray[Any], rows: int, field: str, kernel: Kernel) -> None:
    """BadInput for keys that are no whole numbers in range(rows)."""
    if keys.dtype.kind not in "iu":
        raise BadInput(f"kernel {kernel.name}: field {field!r} must hold whole numbers, its keys; it is {keys.dtype}")
    if len(keys) and not (0 <= (least := int(keys.min())) <= (most := int(keys.max())) < rows):
        raise BadInput(
            f"kernel {kernel.name}: the keys of field {field!r} must be from 0 to {rows - 1:,}, as many as its table has rows; got "
            f"{least if least < 0 else most:,}"
        )


def _array(column: Any) -> NDArray[Any]:
    return np.ascontiguousarray(column.numpy() if isinstance(column, Tensor) else column)
