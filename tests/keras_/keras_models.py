"""Small compiled Keras models and their rows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

SEED = 3


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


def compiled(*layers: Any, optimizer: Any = "adam", metrics: Any = ("accuracy",), **options: Any) -> Any:
    """A classifier of three classes with these layers before its last."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([*(layer() for layer in layers), keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer, **{"loss": "sparse_categorical_crossentropy", "metrics": list(metrics), **options})
    return model


def dense(**options: Any) -> Any:
    return compiled(lambda: keras.Input((4,)), lambda: keras.layers.Dense(5, activation="relu"), **options)


def convolution(**options: Any) -> Any:
    """Convolution and batch normalisation, with a regulariser."""
    return compiled(
        lambda: keras.Input((6, 6, 1)),
        lambda: keras.layers.Conv2D(3, 3, activation="relu"),
        keras.layers.BatchNormalization,
        keras.layers.Flatten,
        lambda: keras.layers.Dense(4, kernel_regularizer="l2"),
        **options,
    )


def values(model: Any) -> list[np.ndarray[Any, Any]]:
    """Copies of all weights, moving averages too."""
    return [variable.value.detach().cpu().numpy().copy() for variable in model.weights]


def apart(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> float:
    """The largest difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
