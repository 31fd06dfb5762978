"""What is replaced in torch while a script is watched: the iterating of loaders, the making of optimizers, the start of processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import _worker_loop

from manyhands.errors import Unsupported
from manyhands.own_loop.observed.loop import ObservedLoop

_iter, _make, _start = DataLoader.__iter__, torch.optim.Optimizer.__init__, BaseProcess.start


@contextmanager
def installed(loop: ObservedLoop) -> Iterator[None]:
    """Within, the script that this process runs is watched, until `loop.leave()`."""

    def iterate(loader: DataLoader[Any]) -> Any:
        return _iter(loader) if loop.paused else loop.iterate(loader, _iter)

    @wraps(_make)
    def make(optimizer: torch.optim.Optimizer, *given: Any, **named: Any) -> None:
        _make(optimizer, *given, **named)
        loop.made(optimizer)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign,assignment]
    refuse_processes()
    watching = weakref.ref(loop)
    os.register_at_fork(after_in_child=lambda: _leave(watching()))
    loop.leave = lambda: _leave(loop)
    try:
        yield
        loop.finish()
    finally:
        _leave(loop)


def refuse_processes() -> None:
    """Until `allow_processes`, a script that starts a process with a model is refused."""

    @wraps(_start)
    def start(process: Any) -> None:
        if process._target is not _worker_loop and _holds_model([process._args, process._kwargs]):
            raise Unsupported(
                "the script trains in processes of its own, each of which would belong to one worker: run it with python, or leave its processes out"
            )
        _start(process)

    BaseProcess.start = start  # type: ignore[method-assign,assignment]


def allow_processes() -> None:
    BaseProcess.start = _start  # type: ignore[method-assign]


def _leave(loop: ObservedLoop | None) -> None:
    """Nothing is watched any more; in a process that the script starts, from its beginning."""
    if loop is None:
        return
    DataLoader.__iter__ = _iter  # type: ignore[method-assign]
    torch.optim.Optimizer.__init__ = _make  # type: ignore[method-assign]
    allow_processes()
    loop.session.observed = None


def _holds_model(value: Any) -> bool:
    """Whether arguments of a process have a module in them."""
    if isinstance(value, dict):
        return _holds_model(list(value.values()))
    return isinstance(value, nn.Module) or (isinstance(value, list | tuple) and any(map(_holds_model, value)))
