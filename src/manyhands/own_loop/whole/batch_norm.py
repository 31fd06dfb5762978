"""Batch normalization within a call: over the rows of all workers where it is cut, and by given statistics where it is tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.own_loop.whole.exchange import Workers
from manyhands.replica.sync_batch_norm import Moments, Rows, batch_norm, note_moments, own_moments

_plain = nn.functional.batch_norm


class Statistics:
    """Which mean and variance `torch.nn.functional.batch_norm` takes while it trains: see `of_all_workers`, `kept`, `given`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._found: Callable[[Tensor], Moments] | None = None  # None: those of all workers' rows
        self._kept: deque[Moments] = deque()

    def of_all_workers(self) -> Any:
        """Within, those of all workers' rows. Each use is a collective."""
        return self._within(None)

    def kept(self) -> Any:
        """Within, those of the batch at hand, as ever, and they are kept for `given`."""
        self._kept.clear()
        return self._within(self._keep)

    def given(self) -> Any:
        """Within, those that `kept` has, in its order."""
        left = deque(self._kept)
        return self._within(lambda x: left.popleft())

    @property
    def held(self) -> list[Tensor]:
        """Those of `kept`."""
        return [tensor for mean, variance, _ in self._kept for tensor in (mean, variance)]

    def _keep(self, x: Tensor) -> Moments:
        self._kept.append((*own_moments(x), x.numel() // x.shape[1]))
        return self._kept[-1]

    @contextmanager
    def _within(self, found: Callable[[Tensor], Moments] | None) -> Iterator[None]:
        self._found = found
        nn.functional.batch_norm = self._batch_norm
        try:
            yield
        finally:
            nn.functional.batch_norm = _plain

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """In place of torch.nn.functional.batch_norm."""
        if not training or not self._workers.in_own_thread:
            return _plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if self._found is None:
            rows = Rows(self._workers.group)
            return batch_norm(rows, input, running_mean, running_var, weight, bias, momentum, eps)
        moments = self._found(input)
        note_moments(moments, running_mean, running_var, momentum)
        return _plain(input, *moments[:2], weight, bias, False, momentum, eps)
