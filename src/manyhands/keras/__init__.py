"""Training compiled Keras models: `task` makes a Task of one. Keras 3 on its torch backend. For users and `spark`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.keras.declare import task as task

__all__ = ["task"]
_WHERE = {"task": "declare"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'manyhands.keras' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"manyhands.keras.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
