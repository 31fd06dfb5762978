"""Training on Spark: `frame` gives a DataFrame's rows to `train`, `Estimator` is a stage of a Spark ML pipeline,
`executor_memory` says what its executors need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.evidence.estimate.executor_memory import executor_memory as executor_memory
    from manyhands.spark.dataframe import frame as frame
    from manyhands.spark.estimator import Estimator as Estimator
    from manyhands.spark.estimator import Model as Model
    from manyhands.spark.stored_model import register_model as register_model

_WHERE = {
    "Estimator": "manyhands.spark.estimator",
    "Model": "manyhands.spark.estimator",
    "executor_memory": "manyhands.evidence.estimate.executor_memory",
    "frame": "manyhands.spark.dataframe",
    "register_model": "manyhands.spark.stored_model",
}
__all__ = ["Estimator", "Model", "executor_memory", "frame", "register_model"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'manyhands.spark' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyspark":
            raise
        raise BadInput("mh.spark needs pyspark: pip install 'manyhands[spark]'") from error
    globals()[name] = value
    return value
