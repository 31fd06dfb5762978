"""Batch normalisation over the rows of all workers, within a call that is cut.

Source: Ioffe and Szegedy, Batch normalization: accelerating deep network training by reducing internal covariate shift, 2015.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.own_loop.whole.exchange import SumWithin, Workers, applied

_plain = nn.functional.batch_norm


class Statistics:
    """Which mean and variance `torch.nn.functional.batch_norm` takes while it trains: see `of_all_workers`, `kept`, `given`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._way: Any = None
        self._kept: deque[tuple[Tensor, Tensor, int]] = deque()

    def of_all_workers(self) -> Any:
        """Within, those of all workers' rows. Each use is a collective."""
        return self._set(self._synchronized)

    def kept(self) -> Any:
        """Within, those of the batch at hand, as ever, and they are kept for `given`."""
        self._kept.clear()
        return self._set(self._keeping)

    def given(self) -> Any:
        """Within, those that `kept` has, in its order."""
        self._left = deque(self._kept)
        return self._set(self._given)

    @property
    def held(self) -> list[Tensor]:
        """Those of `kept`."""
        return [tensor for mean, variance, _ in self._kept for tensor in (mean, variance)]

    @contextmanager
    def _set(self, way: Any) -> Iterator[None]:
        before, self._way = self._way, way
        nn.functional.batch_norm = self._batch_norm
        try:
            yield
        finally:
            self._way = before
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
        if not training or self._way is None or not self._workers.in_own_thread:
            return _plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance, count = self._way(input)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
                running_var.lerp_((variance.detach() * (count / max(1, count - 1))).to(running_var.dtype), momentum)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
        shift = (0 if bias is None else bias) - mean * scale
        result: Tensor = input * scale.view(shape) + shift.view(shape)
        return result.to(input.dtype)

    def _keeping(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        self._kept.append((mean, variance, x.numel() // x.shape[1]))
        return self._kept[-1]

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return self._left.popleft()

    def _synchronized(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        dims = [d for d in range(x.dim()) if d != 1]
        own = x.numel() // x.shape[1]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        sums = torch.cat([wide.sum(dims), wide.new_tensor([own])])
        total = applied(SumWithin, sums, self._workers)
        count = int(total[-1].item())
        mean = total[:-1] / count
        apart = (wide - mean.view([1, -1] + [1] * (x.dim() - 2))).square().sum(dims)
        return mean, applied(SumWithin, apart, self._workers) / count, count
