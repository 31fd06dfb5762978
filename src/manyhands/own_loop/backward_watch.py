"""What sees a backward before it runs: the losses that it starts from, and the line of the script that called it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.errors import Line, calling_line
from manyhands.worker import Worker, current


@dataclass(frozen=True)
class Roots:
    """The tensors from which a backward starts."""

    tensors: list[Tensor]
    line: Line  # of the script, which called it
    of_losses: bool  # without gradients of the caller's own

    @property
    def loss(self) -> Tensor | None:
        """The only one, where it is one number."""
        one = self.tensors[0] if len(self.tensors) == 1 and self.of_losses else None
        return one if one is not None and one.numel() == 1 else None


class BackwardWatcher(Protocol):
    """Who is asked about the backwards of one worker."""

    worker: Worker

    def backward_of(self, roots: Roots) -> AbstractContextManager[float]:
        """Entered before the backward and left after it; gives what its gradients are multiplied by."""


_watchers: list[tuple[weakref.ref[Any], threading.Thread]] = []  # (watcher, its thread), the newest last
_behind: Any = torch.autograd.backward  # what `_backward` calls: torch's own, or engine sim's
_installed = False  # `_backward` is called where torch.autograd.backward is, maybe by another one that stands before it
_changing = threading.RLock()  # reentrant: the garbage collector may call `_forget` within `watch`


def watch(watcher: BackwardWatcher) -> None:
    """From now on, until it is gone."""
    global _behind, _installed
    with _changing:
        _watchers.append((weakref.ref(watcher, lambda _: _forget()), threading.current_thread()))
        now = torch.autograd.backward
        if now is not _backward and (not _installed or now.__module__ == "torch.autograd"):
            _behind, torch.autograd.backward, _installed = now, _backward, True


def _forget() -> None:
    global _installed
    with _changing:
        _watchers[:] = [entry for entry in _watchers if entry[0]() is not None]
        if not _watchers and torch.autograd.backward is _backward:  # else another one stands before it, and calls it
            torch.autograd.backward, _installed = _behind, False


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    """In place of torch.autograd.backward, which Tensor.backward calls, too."""
    watcher = _watcher_here()
    if watcher is None:
        _behind(tensors, grad_tensors, *args, **options)
        return
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
    with watcher.backward_of(Roots(losses, calling_line(), all(one is None for one in given))) as scale:
        _behind(losses, grad_tensors if scale == 1 else _scaled(losses, given, scale), *args, **options)


def _watcher_here() -> BackwardWatcher | None:
    """That of the current worker; of workers that are threads of a test, that of this thread."""
    worker, thread = current(), threading.current_thread()
    found = None
    for reference, own_thread in reversed(_watchers):
        watcher: BackwardWatcher | None = reference()
        if watcher is None:
            continue
        if watcher.worker is worker:
            return watcher
        if found is None and own_thread is thread and not watcher.worker.shares_process:
            found = watcher
    return found


def _scaled(losses: Sequence[Tensor], given: Sequence[Tensor | None], scale: float) -> list[Tensor]:
    """The gradients of the losses, `scale` times as large."""
    if len(given) != len(losses):
        given = [None] * len(losses)
    return [
        torch.full_like(loss, scale) if one is None else one * scale for loss, one in zip(losses, given, strict=True)
    ]
