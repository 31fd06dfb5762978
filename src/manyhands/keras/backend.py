"""Imports Keras on its torch backend, on which models are torch modules."""

from __future__ import annotations

import os

from manyhands.errors import BadInput

os.environ.setdefault("KERAS_BACKEND", "torch")  # on another host nothing else sets it

try:
    import keras
except ModuleNotFoundError as missing:
    raise BadInput(
        f"mh.keras needs Keras 3 on its torch backend, and {missing.name} is not installed: pip install "
        "'manyhands[keras]', and set KERAS_BACKEND=torch before Keras is imported"
    ) from missing

__all__ = ["keras"]
