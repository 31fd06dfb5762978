"""The quiet other ranks: what N workers would print or save N times, the first does for all."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, TextIO, cast

from manyhands.rank_files.rendezvous import keep_apart, kept_apart
from manyhands.worker import Worker, current

_quiet = False


def mute_nonzero_ranks(worker: Worker, timeout_s: float) -> None:
    """From now on, on every rank but 0, standard output goes nowhere, and files to a folder of that rank's (`rank_files`).

    Standard error stays, without tqdm's bars; rank 1 says so there, once. A collective of all ranks; idempotent.
    """
    global _quiet
    if worker.size == 1:
        return
    keep_apart(worker.group, timeout_s)
    if worker.rank == 0 or _quiet:
        return
    _quiet = True
    if worker.rank == 1:
        _say(worker.size)
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open for the rest of the process's life
    atexit.register(nowhere.close)
    sys.stdout = nowhere
    # unless the script says otherwise; TensorBoard's files are dropped with the rank's copies
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read where tqdm is imported, and torch may have done that already
    loaded = sys.modules.get("tqdm.std")
    if loaded is not None:
        loaded.tqdm.__init__ = partialmethod(loaded.tqdm.__init__, disable=True)


@contextmanager
def only_first_speaks(size: int) -> Iterator[None]:
    """As `mute_nonzero_ranks` for workers that take turns in this process: the current worker's rank decides."""
    if size == 1:
        yield
        return
    _say(size)
    output = sys.stdout
    sys.stdout = cast(TextIO, _FirstsOutput(output))
    try:
        with kept_apart(size, _rank_now):
            yield
    finally:
        sys.stdout = output


class _FirstsOutput:
    """Standard output: of rank 0, and of who is no worker."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        return self._output.write(text) if not _rank_now() else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


class RankZeroLines:
    """`say(text)`: a line of worker 0 on standard error, once; none for ""."""

    def __init__(self, rank: int) -> None:
        self._rank, self._texts = rank, set[str]()

    def __call__(self, text: str) -> None:
        if self._rank == 0 and text and text not in self._texts:
            self._texts.add(text)
            sys.stderr.write(f"manyhands: {text}\n")


def _rank_now() -> int | None:
    worker = current()
    return None if worker is None else worker.rank


def _say(size: int) -> None:
    others = "worker 1 of 2 prints" if size == 2 else f"workers 1 to {size - 1} of {size} print"
    sys.stderr.write(f"manyhands: {others} nothing to standard output\n")
