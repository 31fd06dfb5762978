"""What the Estimator does otherwise for Keras models. Keras is imported only where such a model is there already."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from manyhands.errors import BadInput
from manyhands.task import Evaluate

if TYPE_CHECKING:
    from manyhands.keras.module import KerasModule


def is_keras(model: Any) -> bool:
    """Whether it is a Keras model."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


def keras_module(model: nn.Module) -> KerasModule | None:
    """The Keras model as a module, where it is one."""
    here = sys.modules.get("manyhands.keras.module")
    return model if here is not None and isinstance(model, here.KerasModule) else None


def single_output_threshold(model: nn.Module) -> float:
    """Where class 1 begins: 0.5 if the model's loss takes probabilities, 0 for logits."""
    module = keras_module(model)
    if module is None:
        return 0.0
    from manyhands.keras.losses import of_logits

    return 0.0 if of_logits(module.keras) else 0.5


def metrics_of(model: nn.Module) -> Evaluate | None:
    """The metrics that a Keras model brings with it."""
    if keras_module(model) is None:
        return None
    from manyhands.keras.losses import metrics

    return metrics


def to_bytes(module: KerasModule) -> bytes:
    """Keras's own archive: JSON and weights."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        path = Path(folder) / "model.keras"
        module.keras.save(path)
        return path.read_bytes()


def from_bytes(data: bytes, what: str) -> KerasModule:
    """The compiled model of such an archive. BadInput, naming `what`, for one that needs code which is not here."""
    from manyhands.keras.backend import keras
    from manyhands.keras.module import KerasModule

    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        path = Path(folder) / "model.keras"
        path.write_bytes(data)
        try:
            return KerasModule(keras.saving.load_model(path))
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"{what} holds a Keras model that cannot be made here: {error}. Import the module that registers its own layers and losses "
                "(keras.saving.register_keras_serializable) before loading"
            ) from error
