"""Several ranks as threads of the test's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0


def in_threads(size: int, run: Callable[[int], T]) -> list[T]:
    """`run(rank)` for every rank, at once; their values, or the first error."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        return [future.result(DEADLINE_S) for future in futures]
