"""The quiet other ranks: what N workers would print or save N times, only the first does."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

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
        others = "worker 1 of 2 prints" if size == 2 else f"workers 1 to {size - 1} of {size} print"
        sys.stderr.write(f"manyhands: {others} nothing to standard output, and torch.save writes no files there\n")
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open for the rest of the process's life
    atexit.register(nowhere.close)
    sys.stdout = nowhere
    torch.save = torch.serialization.save = _saving_no_files(torch.save)


def _saving_no_files(save: Callable[..., None]) -> Callable[..., None]:
    """`torch.save` on the other ranks: the first rank's file is the one. What goes to memory or a pipe is no file, and pickle needs it."""

    def save_elsewhere(obj: Any, f: Any, *options: Any, **named: Any) -> None:
        name = getattr(f, "name", None)  # an open file's path; a pipe's is its number
        if not isinstance(f, str | os.PathLike) and not isinstance(name, str):
            save(obj, f, *options, **named)

    return save_elsewhere
