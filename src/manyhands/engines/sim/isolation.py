"""What each simulated worker has for itself in the one process of all: random state, modes, default dtype, whose turn.

PyTorch keeps the modes in the thread, and it, numpy and Python keep their generators in the process, so that all of it
would leak from one worker into the next: it is swapped when another worker's turn comes. That happens at every step of
every worker, so it has to be cheap: numpy's generator is exchanged as an object, since putting its state back takes as
long again as all the rest. What is left to all in common, docs/simulate.md says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.worker import Worker, current, set_current


@dataclass(frozen=True, slots=True)
class Isolated:
    """What `capture` found: to be put back before the same worker goes on."""

    torch_state: Tensor
    numpy_generator: np.random.MT19937  # of a simulated worker: a Generator
    gauss: float | None  # the second of the two numbers that numpy's legacy normal() draws at once, where it waits
    python_state: tuple[Any, ...]
    dtype: torch.dtype  # the default one
    inference: bool
    grad: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    worker: Worker | None


_guard: Any = None  # see _set_inference


def capture() -> Isolated:
    """The state of the process now; numpy's generator is the very object, not a copy."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    assert isinstance(generator, np.random.MT19937), f"numpy's global generator is a {type(generator).__name__}"
    if isinstance(generator, Generator):
        generator.brief = True
    legacy: Any = np.random.get_state(legacy=False)  # the only way to what waits of numpy's legacy normal()
    if isinstance(generator, Generator):
        generator.brief = False
    return Isolated(
        torch_state=torch.get_rng_state(),
        numpy_generator=generator,
        gauss=legacy["gauss"] if legacy["has_gauss"] else None,
        python_state=random.getstate(),
        dtype=torch.get_default_dtype(),
        inference=torch.is_inference_mode_enabled(),
        grad=torch.is_grad_enabled(),
        autocast=torch.is_autocast_enabled("cpu"),
        autocast_dtype=torch.get_autocast_dtype("cpu"),
        autocast_cache=torch.is_autocast_cache_enabled(),
        worker=current(),
    )


def restore(state: Isolated) -> None:
    torch.set_rng_state(state.torch_state)
    np.random.set_bit_generator(state.numpy_generator)  # type: ignore[attr-defined]
    if state.gauss is not None:
        numbers: Any = np.random.get_state(legacy=False)
        np.random.set_state({**numbers, "has_gauss": 1, "gauss": state.gauss})
    random.setstate(state.python_state)
    if torch.get_default_dtype() is not state.dtype:
        torch.set_default_dtype(state.dtype)
    if torch.is_inference_mode_enabled() != state.inference:
        _set_inference(state.inference)  # which sets what follows, too
    torch.set_grad_enabled(state.grad)
    torch.set_autocast_enabled("cpu", state.autocast)
    torch.set_autocast_dtype("cpu", state.autocast_dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)
    set_current(state.worker)


def copied(state: Isolated) -> Isolated:
    """The same with a numpy generator of its own, for one that begins."""
    generator = Generator()
    generator.state = state.numpy_generator.state
    return replace(state, numpy_generator=generator)


class Generator(np.random.MT19937):
    """The random state of a worker. While `brief`, without its 624 numbers, which the pending gauss does not need."""

    brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937"} if self.brief else super().state

    @state.setter
    def state(self, value: Any) -> None:
        vars(np.random.MT19937)["state"].__set__(self, value)


Generator.__name__ = "MT19937"  # which numpy asks for


def _set_inference(wanted: bool) -> None:
    """PyTorch has only a guard, which restores the other mode when dropped: one is kept until the mode changes."""
    global _guard
    _guard = None
    if torch.is_inference_mode_enabled() != wanted:
        _guard = torch._C._InferenceMode(wanted)
        _guard.__enter__()
