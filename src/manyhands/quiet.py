"""The quiet other ranks: what N workers would print or save N times, only the first does."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import torch

from manyhands.worker import current

_quiet = False


def quiet_other_ranks(rank: int, size: int) -> None:
    """On every rank but 0: standard output goes nowhere and `torch.save` writes nothing, from now on. Idempotent.

    Standard error stays. Rank 1 says so, once, on standard error.
    """
    global _quiet
    if rank == 0 or _quiet:
        return
    _quiet = True
    if rank == 1:
        _say(size)
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open for the rest of the process's life
    atexit.register(nowhere.close)
    sys.stdout = nowhere
    torch.save = torch.serialization.save = _saving_no_files(torch.save)


@contextmanager
def only_first_speaks(size: int) -> Iterator[None]:
    """As `quiet_other_ranks`, where all workers take turns in this process: within, what happens depends on whose turn it is."""
    if size == 1:
        yield
        return
    _say(size)
    output, save = sys.stdout, torch.save
    silent = _saving_no_files(save)
    sys.stdout = cast(TextIO, _FirstsOutput(output))
    torch.save = torch.serialization.save = lambda *given, **named: (save if _is_first() else silent)(*given, **named)
    try:
        yield
    finally:
        sys.stdout = output
        torch.save = torch.serialization.save = save


class _FirstsOutput:
    """Standard output: of rank 0, and of who is no worker."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        return self._output.write(text) if _is_first() else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def _is_first() -> bool:
    worker = current()
    return worker is None or worker.rank == 0


def _say(size: int) -> None:
    others = "worker 1 of 2 prints" if size == 2 else f"workers 1 to {size - 1} of {size} print"
    sys.stderr.write(f"manyhands: {others} nothing to standard output, and torch.save writes no files there\n")


def _saving_no_files(save: Callable[..., None]) -> Callable[..., None]:
    """`torch.save` on the other ranks: the first rank's file is the one. What goes to memory or a pipe is no file, and pickle needs it."""

    def save_elsewhere(obj: Any, f: Any, *options: Any, **named: Any) -> None:
        name = getattr(f, "name", None)  # an open file's path; a pipe's is its number
        if not isinstance(f, str | os.PathLike) and not isinstance(name, str):
            save(obj, f, *options, **named)

    return save_elsewhere
