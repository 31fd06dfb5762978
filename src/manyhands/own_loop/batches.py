"""What a worker's loop sees of a batch: all of it, or its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.errors import BadInput, Unsupported

if TYPE_CHECKING:  # it imports torch
    from manyhands.strategies.base import Strategy

WHOLE, SLICES = "whole", "slices"
ROWS = "rows"


def check_batches(given: str | None) -> None:
    """BadInput for another word than `whole` and `slices`."""
    if given not in (None, WHOLE, SLICES):
        raise BadInput(f"batches must be {WHOLE} or {SLICES}, not {given!r}")


def check_read(given: str | None) -> None:
    """BadInput for another word than `rows` and `whole`."""
    if given not in (None, ROWS, WHOLE):
        raise BadInput(f"--read must be {ROWS} or {WHOLE}, not {given!r}")


def batches_of(given: str | None, strategy: Strategy, *, one_process: bool = False) -> str:
    """WHOLE or SLICES. None: whole, where workers have one model.

    one_process: all workers are in one, as on engine sim, where torch's functions are not each worker's own: slices.

    Raises BadInput for another word, Unsupported for whole batches where each worker's model is its own.
    """
    check_batches(given)
    one_model = strategy.needs.mean_gradient and strategy.leasing() is None and strategy.server() is None
    if given == WHOLE and not one_model:
        raise Unsupported(
            f"with strategy {strategy.name} each worker's model is its own between exchanges, so workers cannot compute one batch together: "
            f"give batches={SLICES}, of which each worker trains on its rows, or strategy allreduce"
        )
    return given or (WHOLE if one_model and not one_process else SLICES)


def has_own_exchange(strategy: Strategy) -> bool:
    """Whether gradients take another way than their mean in full precision after each backward: compressed, overlapping, …"""
    from manyhands.strategies.allreduce import AllReduce

    return strategy != AllReduce()
