"""The step executor of a kernel whose tables are cut into blocks, of which each worker holds some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from manyhands.comm.background import Background, Started
from manyhands.comm.group import Group
from manyhands.data.sharding import slice_of
from manyhands.data.strata import Cell, Cells, KeyBlocks
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.replica.evaluation import Measured
from manyhands.replica.executor import Allocate, StepExecutor, StepLoss, shards_of
from manyhands.replica.kernel_executor import not_finite
from manyhands.sparse.kernel import Kernel, RateOfKernel
from manyhands.sparse.rows import Rows
from manyhands.task import Evaluate, Metrics

_CLOSE_S = 10.0


class BlockExecutor(StepExecutor):
    """All workers hold one replica together: each its row blocks, and as many column blocks, which travel.

    Before any step row block i and column block i are at home with the same worker. After s rotations it holds the column
    blocks (i + s) mod B in their places; after B they are at home again. A block's parameters are `TABLE[i]`, as `members`
    know it by, whoever holds it: in files the blocks are at home.
    """

    def __init__(
        self, kernel: Kernel, seed: int, rate: float, blocks: KeyBlocks, members: Group, *, beside: bool = True
    ) -> None:
        """beside: blocks travel in a thread, while other cells are computed."""
        self.kernel, self._seed, self._blocks, self.members = kernel, seed, blocks, members
        self._rate = rate
        self._count = blocks.blocks
        self._own = range(*slice_of(self._count, members.rank, members.size))
        tables = kernel.tables()
        self._of_rows = {name: rows for name, rows in tables.items() if rows.fields == (blocks.row_field,)}
        self._of_columns = {name: rows for name, rows in tables.items() if rows.fields == (blocks.column_field,)}
        self._tables = self._of_rows | self._of_columns
        self._rotations = 0  # since the column blocks were at home, below B
        self._cells: Cells | None = None  # of this tick
        self._weight = 0.0
        self._background = Background("manyhands-rotate") if beside and members.size > 1 else None
        self._under_way: Started[None] | None = None

    # -- memory ------------------------------------------------------------------------------------------------------

    @override
    def build(self, allocate: Allocate) -> None:
        self.model = nn.Module()
        for name, rows in self._tables.items():
            for block in self._own:
                began = self._initial(name, rows, self._keys(rows)[block])
                self.model.register_parameter(f"{name}[{block}]", nn.Parameter(began))
        self.shards = shards_of(self.model, allocate, gradients=False)
        self.optimizer = RateOfKernel(self._rate)(self.model)
        self._held = dict(self.model.named_parameters())
        self._spare = {name: torch.empty_like(self._slot(name, self._own[0])) for name in self._of_columns}
        self._all = (1 << len(self._held)) - 1

    def _keys(self, rows: Rows) -> NDArray[np.int64]:
        """[blocks, keys of a block] of a table."""
        return self._blocks.keys[rows.fields[0]]

    def _initial(self, table: str, rows: Rows, keys: NDArray[np.int64]) -> Tensor:
        """[keys of a block, dim]: how they begin, zeros where a block has one less."""
        there = np.flatnonzero(keys >= 0)
        found = np.zeros((len(keys), rows.dim), rows.dtype)
        found[there] = self.kernel.initial_rows(table, keys[there], self._seed)
        return torch.from_numpy(found)

    def _slot(self, table: str, column_block: int) -> Tensor:
        """The memory in which a column block lies while it is here. As one leaves, the one that comes takes its place."""
        home = self._own.start + (column_block - self._own.start) % len(self._own)
        return self._held[f"{table}[{home}]"].detach()

    def _rows(self, cell: Cell) -> dict[str, NDArray[Any]]:
        rows = {name: self._held[f"{name}[{cell.row_block}]"].detach().numpy() for name in self._of_rows}
        return rows | {name: self._slot(name, cell.column_block).numpy() for name in self._of_columns}

    # -- blocks that travel ------------------------------------------------------------------------------------------

    def rotate(self) -> None:
        """The column block of this worker's first row block goes to the worker before, and another one comes; a
        collective. What a step has begun to send is waited for."""
        if self.members.size > 1:
            if self._under_way is None:
                self._send()
            else:
                self._under_way.wait()
                self._under_way = None
            for name, spare in self._spare.items():
                self._slot(name, self._leaving).copy_(spare)
        self._rotations = (self._rotations + 1) % self._count

    def bring_home(self) -> None:
        """A collective: column blocks are where they began."""
        self._rotate_to(0)

    def _rotate_to(self, rotations: int) -> None:
        while self._rotations != rotations:
            self.rotate()

    @property
    def _leaving(self) -> int:
        return (self._own.start + self._rotations) % self._count

    def _send(self) -> None:
        rank, size = self.members.rank, self.members.size
        for name, spare in self._spare.items():
            self.members.swap(self._slot(name, self._leaving), (rank - 1) % size, spare, (rank + 1) % size)

    # -- step --------------------------------------------------------------------------------------------------------

    @override
    def begin_tick(self) -> None:
        self._cells, self._weight = None, 0.0

    @override
    def backward(self, batch: Any | None) -> StepLoss:
        if not isinstance(batch, Cells):
            raise ManyhandsError(f"expected the cells of a stratum, got {type(batch).__name__}")
        self._rotate_to(batch.stratum)
        self._cells = batch
        self._weight = sum(self.kernel.weight(cell.arrays, cell.rows) for cell in batch.cells if cell.rows)
        return StepLoss(weight=self._weight, grad_mask=self._all if self._weight else 0)

    @override
    def apply(self) -> float:
        assert self._cells is not None, "a step without rows is not applied"
        rate, losses = float(self.optimizer.param_groups[0]["lr"]), 0.0
        for i, cell in enumerate(self._cells.cells):  # the first one's column block is the one that leaves
            if cell.rows:
                losses += self.kernel.step(self._rows(cell), cell.arrays, rate)
            if i == 0 and len(self._cells.cells) > 1 and self._background is not None:
                self._under_way = self._background.start(self._send)
        loss = losses / self._weight
        if not math.isfinite(loss):
            raise not_finite(self.kernel, loss, rate)
        return loss

    @override
    def clip(self, norm: float) -> None:
        raise self.without_gradients()

    @override
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        """What the kernel measures on this member's cells of a stratum; {} where they are empty. After the last stratum of a
        pass, column blocks are at home again."""
        if not isinstance(batch, Cells):
            raise Unsupported(f"tables in blocks measure cells, not {type(batch).__name__}")
        self._rotate_to(batch.stratum)
        measured = Measured()
        for cell in batch.cells:
            if cell.rows:
                measured.add(self.kernel.measure(self._rows(cell), cell.arrays), cell.rows)
        self.rotate()
        means = {name: (total / weight, weight) for name, (total, weight) in measured.means.items()}
        return means | measured.summed

    # -- the answer --------------------------------------------------------------------------------------------------

    @override
    def own_parameters(self) -> int:
        """Without the row by which some blocks are longer than their keys."""
        own = slice(self._own.start, self._own.stop)
        return sum(int((self._keys(rows)[own] >= 0).sum()) * rows.dim for rows in self._tables.values())

    @override
    def saved(self) -> list[str]:
        return [*self.kernel.tables()]

    @override
    def whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tables [rows, dim] in the order of their keys, of the blocks of all members, `TABLE[i]`."""
        found = {}
        for name, rows in self._tables.items():
            table = found[name] = torch.empty(rows.rows, rows.dim, dtype=getattr(torch, rows.dtype))
            for block, keys in enumerate(self._keys(rows)):
                there = np.flatnonzero(keys >= 0)
                table[torch.from_numpy(keys[there])] = parameters[f"{name}[{block}]"][torch.from_numpy(there)]
        return found

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._background is not None:
            self._background.close(_CLOSE_S)


def two_fields(kernel: Kernel) -> dict[str, int]:
    """{field: how many keys it has}, of the two fields that name a kernel's tables; that of most numbers comes first, whose
    blocks stay. Unsupported for kernels that are not `paired`."""
    if not kernel.paired:
        raise Unsupported(
            f"strategy rotate cuts tables where each row of the data has one key in each of two fields, as a rating has a user and an item, and kernel "
            f"{kernel.name} has other rows: use hogwild, local-sgd or downpour"
        )
    numbers: dict[str, int] = {}
    keys: dict[str, int] = {}
    for name, rows in kernel.tables().items():
        if len(rows.fields) != 1 or keys.setdefault(rows.fields[0], rows.rows) != rows.rows:
            raise BadInput(
                f"kernel {kernel.name} is `paired`: each of its tables must be named by one field, and those of one field have equally many rows; "
                f"{name} has the fields {rows.fields} and {rows.rows:,} rows"
            )
        numbers[rows.fields[0]] = numbers.get(rows.fields[0], 0) + rows.rows * rows.dim
    if len(keys) != 2:
        raise BadInput(
            f"kernel {kernel.name} is `paired`: its tables must be named by two fields, not by {', '.join(keys)}"
        )
    return {field: keys[field] for field in sorted(keys, key=lambda field: -numbers[field])}
