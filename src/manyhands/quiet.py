"""The quiet other ranks: what N workers would print or save N times, only the first does."""

from __future__ import annotations

import atexit
import os
import sys
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
        others = "worker 1" if size == 2 else f"workers 1 to {size - 1}"
        sys.stderr.write(
            f"manyhands: {others} of {size} print nothing to standard output, and torch.save writes nothing there\n"
        )
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open for the rest of the process's life
    atexit.register(nowhere.close)
    sys.stdout = nowhere
    torch.save = torch.serialization.save = _save_nothing


def _save_nothing(*_: Any, **__: Any) -> None:
    """`torch.save` on the other ranks: the first rank's file is the one."""
