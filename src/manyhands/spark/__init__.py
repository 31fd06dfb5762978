"""Training on Spark: `frame` gives a DataFrame's rows to `train`, `Estimator` is a stage of a Spark ML pipeline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.spark.dataframe import frame as frame
    from manyhands.spark.estimator import Estimator as Estimator
    from manyhands.spark.estimator import Model as Model
    from manyhands.spark.stored_model import register_model as register_model

_WHERE = {"Estimator": "estimator", "Model": "estimator", "frame": "dataframe", "register_model": "stored_model"}
__all__ = ["Estimator", "Model", "frame", "register_model"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'manyhands.spark' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"manyhands.spark.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyspark":
            raise
        raise BadInput("mh.spark needs pyspark: pip install 'manyhands[spark]'") from error
    globals()[name] = value
    return value
