"""Callbacks of a run, called on the driver while it trains. For users, `training` and `evidence`."""

from __future__ import annotations

from manyhands.callbacks.base import Callback
from manyhands.callbacks.early_stopping import EarlyStopping
from manyhands.callbacks.progress import Progress
from manyhands.callbacks.trackers import MLflow, TensorBoard, WandB

__all__ = ["Callback", "EarlyStopping", "MLflow", "Progress", "TensorBoard", "WandB"]
