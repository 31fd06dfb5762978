"""Rotate: each worker keeps its blocks of rows, and blocks of columns travel from worker to worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.errors import BadInput, is_whole
from manyhands.replica.block_executor import BlockExecutor
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.base import Needs, State, StepResult, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Rotate(Strategy):
    """Model-parallel training of a kernel whose tables are named by two fields, such as a factorisation.

    Source: Large-Scale Matrix Factorization with Distributed Stochastic Gradient Descent, Rainer Gemulla, Erik Nijkamp,
    Peter J. Haas, Yannis Sismanis, 2011; with the rotation of STRADS: A Distributed Framework for Scheduled Model Parallel
    Machine Learning, Jin Kyu Kim et al., 2016.

    1. The keys of both fields are cut into `blocks` blocks each. A worker keeps its part of the row blocks, and the rows
       of the data that meet them, for the whole run.
    2. In step s of an epoch, row block i meets column block (i + s) mod blocks: no two workers touch one row of a table.
    3. The column block that a worker needs no more goes to the worker before it, with its state.

    The result is that of one worker which goes through the cells in this order: the same bits for every number of workers
    that divides `blocks`. A worker holds its share of both tables, and one column block more.

    Deviations: strata come in a fixed order, and each meets all of its rows once an epoch, where the first paper draws
    both. The papers cut keys into blocks at random; here they are dealt by how many rows have them, so that the cells are
    about equally large.
    """

    blocks: int | None = None
    """Blocks of each field, a multiple of the workers; none: two for each worker. Raise it if the summary reports uneven
    cells, or on one worker, where a cell that fits the processor's cache is faster."""

    name: ClassVar[str] = "rotate"
    source: ClassVar[str] = (
        "Large-Scale Matrix Factorization with Distributed Stochastic Gradient Descent, Gemulla, Nijkamp, Haas, Sismanis, 2011"
    )
    summary: ClassVar[str] = "blocks of a table, each step to the next worker"
    consistency: ClassVar[str] = "serializable"
    needs: ClassVar[Needs] = Needs(kernel=True, elementwise=False)

    def __post_init__(self) -> None:
        if self.blocks is not None and not is_whole(self.blocks):
            raise BadInput(
                f"strategy rotate: blocks must be a whole number of at least 1, or none; not {self.blocks!r}"
            )

    @override
    def blocks_of(self, workers: int) -> int:
        return self.blocks if self.blocks is not None else 2 * workers

    @override
    def check_workers(self, workers: int) -> None:
        if self.blocks is not None and self.blocks % workers:
            fitting = [n for n in range(1, self.blocks + 1) if self.blocks % n == 0]
            raise BadInput(
                f"strategy rotate: blocks={self.blocks} cannot be dealt evenly to {workers} workers: use {', '.join(map(str, fitting))} workers, or a multiple "
                f"of {workers} for blocks"
            )

    @override
    def fixed_members(self) -> str:
        return "each holds a part of the tables that no other worker has"

    @override
    def start(self, replica: Replica, worker: Worker) -> State:
        return State()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: State) -> StepResult:
        weight, executor = replica.weight, _blocks(replica)
        applied = replica.apply()
        executor.rotate()
        replica.sum_weights(worker.mesh.world, weight)
        return StepResult(applied=applied, rows_left=replica.control.any_rank_has_rows)

    @override
    def settle(self, replica: Replica, worker: Worker, state: State) -> None:
        _blocks(replica).bring_home()

    @override
    def consensus(self, replica: Replica, worker: Worker, state: State) -> FlatVector:
        """What this worker holds of the one answer, with the column blocks where they began."""
        _blocks(replica).bring_home()
        return replica.parameters


def _blocks(replica: Replica) -> BlockExecutor:
    executor = replica.executor
    assert isinstance(executor, BlockExecutor), "a strategy that cuts tables gets an executor of blocks"
    return executor
