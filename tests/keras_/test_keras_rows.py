"""x, y and sample weights as rows of a task."""

from typing import Any

import numpy as np
import pytest
import torch
from keras_models import Lazy, rows

import manyhands as mh

module: Any = Lazy("manyhands.keras.rows")


def packed(*data: Any, **options: Any) -> Any:
    return module.packed(*data, **options)


def test_arrays_and_their_structures() -> None:
    """Floating numbers become Keras's, lists become tuples."""
    x, y = packed(np.zeros((2, 3)), np.arange(2))
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert packed(torch.zeros(2, dtype=torch.float64))[0].dtype == torch.float32
    one, other = np.zeros((2, 3), "float32"), np.ones(2, "float32")
    ((a, b),) = packed([one, other])
    assert (a.shape, b.shape) == ((2, 3), (2,))
    x, y = packed({"a": one}, {"p": other, "q": one})
    assert x.keys() == {"a"}
    assert y.keys() == {"p", "q"}
    assert module.is_arrays([np.zeros(2), {"a": np.zeros(2)}])
    assert not module.is_arrays("rows.parquet")
    assert not module.is_arrays(lambda: None)


def test_frames_series_and_lists_of_numbers_are_arrays() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    x, y = packed(frame, [0, 1])
    assert x.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert y.tolist() == [0, 1]
    assert packed(frame, frame["a"])[1].tolist() == [1.0, 2.0]


def test_the_last_rows_validate_as_keras_splits_them() -> None:
    data = packed(np.arange(10), np.arange(10))
    train, validation = module.split(data, 0.25)
    assert train[0].tolist() == list(range(7))
    assert validation[1].tolist() == [7, 8, 9]
    for fraction in (1.0, -0.1, 0.99, 0.0):
        with pytest.raises(mh.BadInput, match="validation_split"):
            module.split(data, fraction)


def test_class_weights_are_sample_weights() -> None:
    for y in (np.array([0, 1, 2]), np.eye(3), np.array([[0], [1], [2]])):
        assert packed(np.zeros(3), y, class_weight={0: 2.0, 2: 0.5})[2].tolist() == [2.0, 1.0, 0.5], y


def test_contradictions_are_refused() -> None:
    x, y = rows(4)
    for given, weights, message in (
        ((x, y, np.ones(4)), {0: 1.0}, "both given"),
        ((x, None, np.ones(4)), None, "give y"),
        ((x, y[:3]), None, "equally long"),
        ((x, {"a": y}), {0: 1.0}, "give sample_weight"),
    ):
        with pytest.raises(mh.BadInput, match=message):
            packed(*given, class_weight=weights)
