"""Ready-made tasks by name: `digits`, `digits:batch_size=32,epochs=5`, `chars`. Loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.tasks.chars_task import chars as chars
    from manyhands.tasks.digits_task import digits as digits

CATALOGUE = {"digits": "manyhands.tasks.digits_task:digits", "chars": "manyhands.tasks.chars_task:chars"}

SUMMARIES = {
    "digits": "a small CNN reads 1,797 handwritten digits (bundled): about 99 % test accuracy in seconds",
    "chars": "a small transformer predicts the next character of Python's standard library: bits per character",
}


def __getattr__(name: str) -> Any:
    if name not in CATALOGUE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: its tasks are {', '.join(CATALOGUE)}")
    module, _, attribute = CATALOGUE[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *CATALOGUE})
