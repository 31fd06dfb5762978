"""What makes a batch of weight 0 count for nothing: zero gradients, and buffers as they were before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Silence:
    """Of one model; costs nothing while it is off."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._hooks: list[Any] = []
        self._fresh: set[int] = set()  # parameters whose `.grad` is nothing but zeros of a silent batch
        self._buffers: list[tuple[Tensor, Tensor]] = []  # (buffer, what it was before the stand-in)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def turn(self, on: bool) -> None:
        """While on, backward adds zeros to every gradient, whatever it computed, a NaN too. For graphs that exist already as well."""
        if on and not self._hooks:
            self._hooks = [
                p.register_hook(lambda gradient, i=i: self._zeros(gradient, i)) for i, p in enumerate(self._parameters)
            ]
        elif not on:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _zeros(self, gradient: Tensor, i: int) -> Tensor:
        if self._parameters[i].grad is None:
            self._fresh.add(i)
        return torch.zeros_like(gradient)

    def after_backward(self) -> None:
        """A gradient that only a silent batch made is none."""
        for i in self._fresh:
            self._parameters[i].grad = None
        self._fresh.clear()

    # -- buffers -----------------------------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """A stand-in batch is coming."""
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]

    def restore_buffers(self) -> None:
        """Undo what forward did to them since `keep_buffers`."""
        for buffer, before in self._buffers:
            buffer.data.copy_(before)  # .data: a graph that is still alive may have saved the buffer

    def forget_buffers(self) -> None:
        """The stand-in is over."""
        self.restore_buffers()
        self._buffers = []
