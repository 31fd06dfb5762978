"""The optimizer's `step`, rebound on the user's own instance."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from manyhands.errors import Unsupported

if TYPE_CHECKING:
    from manyhands.own_loop.pair import Pair

_SLOT = "_manyhands_stepper"


class Stepper:
    """What an optimizer's rebound `step` calls: the pair that it belongs to now, and the step that it had before."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.plain_step: Callable[[], Any] = optimizer.step
        self.pair: Pair | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Stepper:
        """The one that the optimizer has, if it was prepared before, else a new one that waits to be bound."""
        found = vars(optimizer).get(_SLOT)
        return found if isinstance(found, Stepper) else cls(optimizer)

    def bind(self, optimizer: torch.optim.Optimizer, pair: Pair) -> None:
        """From now on `optimizer.step()` is the pair's.

        It is a bound method of the instance: PyTorch's schedulers wrap its `__func__`. It says that one wrapped it, and
        sets what the wrapper would set, so that a scheduler may be built before or after.
        """
        self.pair = pair
        if _SLOT in vars(optimizer):
            return
        vars(optimizer)[_SLOT] = self

        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
            self._step(closure)
            optimizer._opt_called = True  # type: ignore[attr-defined]

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, closure: Any) -> None:
        if self.pair is None:
            raise Unsupported(
                "this optimizer's model was prepared again with another optimizer: give prepare one optimizer for each model "
                "(several parameter groups in one, or its parts one by one: mh.prepare(model.encoder, first), mh.prepare(model.decoder, second))"
            )
        self.pair.step(closure)
