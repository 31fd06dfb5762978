"""Training on Spark: `frame` gives a DataFrame's rows to `train`, `Estimator` is a stage of a Spark ML pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.spark.frame import frame as frame

__all__ = ["frame"]
_WHERE = {"frame": "frame"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'manyhands.spark' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"manyhands.spark.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
