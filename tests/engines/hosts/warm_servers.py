"""Fork servers for launches in this process that have loaded torch already, which takes five seconds of CPU each time."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from manyhands.engines.hosts import join
from manyhands.engines.local import fork_client
from manyhands.engines.local.fork_client import Spawner

_WAITING: list[Spawner] = []
_LENT: list[Spawner] = []


@atexit.register
def _close() -> None:
    for spawner in _WAITING:
        Spawner.close(spawner)


@contextmanager
def warm_servers() -> Iterator[None]:
    """Engine hosts and agents of this process use fork servers that wait, if there are any, and afterwards let them wait."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (fork_client, join):
            patch.setattr(module, "Spawner", _lend)
        yield


def still_busy() -> list[Spawner]:
    """Those that are lent, or of whose processes one lives: none, once all launches are over."""
    return [*_LENT, *filter(_children, _WAITING)]


def _lend(leftover: Path | None = None) -> Spawner:
    try:
        spawner = _WAITING.pop()
    except IndexError:
        spawner = Spawner()
        spawner.close = partial(_give_back, spawner)  # type: ignore[method-assign]
    _LENT.append(spawner)
    return spawner


def _give_back(spawner: Spawner) -> int:
    if spawner in _LENT:  # it may be closed twice
        _LENT.remove(spawner)
        if spawner.alive and not _children(spawner):
            _WAITING.append(spawner)
            return 0
    return Spawner.close(spawner)


def _children(spawner: Spawner) -> str:
    pid = spawner._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()
