"""Training compiled Keras models: `task` makes a Task of one. Keras 3 on its torch backend. For users and `spark`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.keras.declare import task as task

__all__ = ["task"]


def __getattr__(name: str) -> Any:
    if name != "task":
        raise AttributeError(f"module 'manyhands.keras' has no attribute {name!r}")
    from manyhands.keras.declare import task

    return task
