"""What is refused while a script is watched: the start of processes that would train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

from torch import nn
from torch.utils.data._utils.worker import _worker_loop

from manyhands.errors import Unsupported

_start = BaseProcess.start


@contextmanager
def processes_refused() -> Iterator[None]:
    """Within, or until `allow_processes`, a script that starts a process with a model is refused."""

    @wraps(_start)
    def start(process: Any) -> None:
        if process._target is not _worker_loop and _holds_model([process._args, process._kwargs]):
            raise Unsupported(
                "the script trains in processes of its own, each of which would belong to one worker: run it with python, or leave its processes out"
            )
        _start(process)

    BaseProcess.start = start  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        allow_processes()


def allow_processes() -> None:
    BaseProcess.start = _start  # type: ignore[method-assign]


def _holds_model(value: Any) -> bool:
    """Whether arguments of a process have a module in them."""
    if isinstance(value, dict):
        return _holds_model(list(value.values()))
    return isinstance(value, nn.Module) or (isinstance(value, list | tuple) and any(map(_holds_model, value)))
