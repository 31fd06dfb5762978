"""What each simulated worker has for itself although all are in one process: random state, modes, default dtype, whose turn it is.

PyTorch keeps the modes in the thread, and it, numpy and Python keep their generators in the process, so that all of it
would leak from one worker into the next: it is swapped when another worker's turn comes. That happens at every step of
every worker, so it has to be cheap: numpy's generator is exchanged as an object, since copying its state takes longer
than a small model's gradient. What is left to all in common, docs/simulate.md says.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.worker import Worker, current, set_current

_KEYS = 624  # of MT19937's state: so many uint32, then the position among them


@dataclass(frozen=True, slots=True)
class _Gauss:
    """The second of the two numbers that numpy's legacy normal() draws at once, while it waits; `at`: where the generator was then."""

    waits: bool
    value: float
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Isolated:
    """What `capture` found: to be put back before the same worker goes on."""

    torch_state: Tensor
    numpy_generator: np.random.MT19937
    gauss: _Gauss
    python_state: tuple[Any, ...]
    dtype: torch.dtype  # the default one
    inference: bool
    grad: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    worker: Worker | None


_gauss = _Gauss(False, 0.0, (-1, -1))  # of the generator that is numpy's now
_guard: Any = None  # see _set_inference


def capture() -> Isolated:
    """The state of the process now; numpy's generator is the very object, not a copy."""
    global _gauss
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    assert isinstance(generator, np.random.MT19937), f"numpy's global generator is a {type(generator).__name__}"
    if _gauss.waits or _gauss.at != _position(generator):  # one that waits can be drawn without a move
        state: Any = np.random.get_state(legacy=False)
        _gauss = _Gauss(bool(state["has_gauss"]), state["gauss"], _position(generator))
    return Isolated(
        torch_state=torch.get_rng_state(),
        numpy_generator=generator,
        gauss=_gauss,
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
    """Put back what `capture` gave."""
    global _gauss
    torch.set_rng_state(state.torch_state)
    np.random.set_bit_generator(state.numpy_generator)  # type: ignore[attr-defined]
    if state.gauss.waits:
        numbers: Any = np.random.get_state(legacy=False)
        np.random.set_state({**numbers, "has_gauss": 1, "gauss": state.gauss.value})
    _gauss = state.gauss
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
    generator = np.random.MT19937()
    generator.state = state.numpy_generator.state
    return replace(state, numpy_generator=generator)


def _set_inference(wanted: bool) -> None:
    """PyTorch only has a guard for it, which puts the other mode back when it is dropped: one is kept until the mode is another again."""
    global _guard
    _guard = None
    if torch.is_inference_mode_enabled() != wanted:
        _guard = torch._C._InferenceMode(wanted)
        _guard.__enter__()


def _position(generator: np.random.MT19937) -> tuple[int, int]:
    """Where a generator stands, read where numpy keeps it: one that has drawn since stands elsewhere."""
    address = generator.ctypes.state_address
    return (
        ctypes.c_uint32.from_address(address).value,
        ctypes.c_int.from_address(address + 4 * _KEYS).value,
    )
