"""Fork servers that have loaded torch already, which takes five seconds of CPU each time, for all launches in this process."""

import time
from functools import partial
from pathlib import Path

from manyhands.engines.local.fork_client import Spawner

_WAITING: list[Spawner] = []
_LENT: list[Spawner] = []
COLD: list[str] = []
"""Tests that run and want fork servers of their own."""


def lend(leftover: Path | None = None) -> Spawner:
    """Instead of `Spawner`: one that waits, if there is any, and that waits again when its borrower closes it."""
    if COLD:
        return Spawner(leftover)
    spawner = _WAITING.pop() if _WAITING else Spawner()
    spawner.close = partial(_give_back, spawner)  # type: ignore[method-assign]
    _LENT.append(spawner)
    return spawner


def still_busy() -> list[Spawner]:
    """Those that are lent, or of whose processes one lives: none, once all launches are over."""
    return [*_LENT, *filter(_children, _WAITING)]


def close_all() -> None:
    while _WAITING:
        Spawner.close(_WAITING.pop())


def _give_back(spawner: Spawner) -> int:
    if spawner in _LENT:  # it may be closed twice
        _LENT.remove(spawner)
        deadline = time.monotonic() + 2
        while spawner.alive and time.monotonic() < deadline:
            if not _children(spawner):
                _WAITING.append(spawner)
                return 0
            time.sleep(0.01)  # the processes of a launch that failed end a little later
    return Spawner.close(spawner)


def _children(spawner: Spawner) -> str:
    pid = spawner._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()
