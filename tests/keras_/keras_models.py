"""Small compiled Keras models and their rows. Keras, which takes seconds to import, is imported when it is first used."""

import importlib
import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
SEED = 3


class Lazy:
    """A module that needs Keras."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pickle asks, before there is a name
            raise AttributeError(attribute)
        pytest.importorskip("keras")
        return getattr(importlib.import_module(self._name), attribute)


keras: Any = Lazy("keras")


def rows(n: int = 50, width: int = 4, classes: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x [n, width] around its class's place, y [n]."""
    random = np.random.default_rng(0)
    y = random.integers(0, classes, n)
    places = random.normal(size=(classes, width))
    return (places[y] + 0.3 * random.normal(size=(n, width))).astype("float32"), y


def images(n: int = 50) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x [n, 6, 6, 1], y [n]"""
    x, y = rows(n, 36)
    return x.reshape(n, 6, 6, 1), y


def layer(kind: str, *arguments: Any, **options: Any) -> Any:
    """Makes a layer, once the seed is set."""
    return lambda: getattr(keras.layers, kind)(*arguments, **options)


def compiled(*layers: Any, optimizer: Any = "adam", metrics: Any = ("accuracy",), **options: Any) -> Any:
    """A classifier of three classes with these layers before its last."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([*(make() for make in layers), keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer, **{"loss": "sparse_categorical_crossentropy", "metrics": list(metrics), **options})
    return model


def of_four(*layers: Any, **options: Any) -> Any:
    """The same for rows of four numbers."""
    return compiled(lambda: keras.Input((4,)), *layers, **options)


def dense(**options: Any) -> Any:
    return of_four(layer("Dense", 5, activation="relu"), **options)


def convolution(**options: Any) -> Any:
    """Convolution and batch normalisation, with a regulariser."""
    layers = (layer("Conv2D", 3, 3, activation="relu"), layer("BatchNormalization"), layer("Flatten"))
    return compiled(lambda: keras.Input((6, 6, 1)), *layers, layer("Dense", 4, kernel_regularizer="l2"), **options)


def values(model: Any) -> list[np.ndarray[Any, Any]]:
    """Copies of all weights, moving averages too."""
    return [variable.value.detach().cpu().numpy().copy() for variable in model.weights]


def apart(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> float:
    """The largest difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
