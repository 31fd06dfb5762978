"""x, y and sample weights as rows of a task."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from keras_models import rows

import manyhands as mh
from manyhands.keras.rows import is_arrays, packed, split


def test_floating_arrays_become_kerass_float_and_whole_ones_stay() -> None:
    x, y = packed(np.zeros((2, 3)), np.arange(2))
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert packed(torch.zeros(2, dtype=torch.float64))[0].dtype == torch.float32


def test_structures_keep_their_form_and_lists_become_tuples() -> None:
    one, other = np.zeros((2, 3), "float32"), np.ones(2, "float32")
    ((a, b),) = packed([one, other])
    assert a.shape, b.shape == ((2, 3), (2,))
    x, y = packed({"a": one}, {"p": other, "q": one})
    assert x.keys() == {"a"}
    assert y.keys() == {"p", "q"}


def test_frames_series_and_lists_of_numbers_are_arrays() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    x, y = packed(frame, [0, 1])
    assert x.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert y.tolist() == [0, 1]
    assert packed(frame, frame["a"])[1].tolist() == [1.0, 2.0]


def test_data_of_whole_batches_is_distinguished_from_arrays() -> None:
    assert is_arrays([np.zeros(2), {"a": np.zeros(2)}])
    assert not is_arrays("rows.parquet")
    assert not is_arrays(lambda: None)


def test_the_last_rows_validate_as_keras_splits_them() -> None:
    train, validation = split(packed(np.arange(10), np.arange(10)), 0.25)
    assert train[0].tolist() == list(range(7))
    assert validation[1].tolist() == [7, 8, 9]


@pytest.mark.parametrize("fraction", [1.0, -0.1, 0.99])
def test_a_split_without_rows_is_refused(fraction: float) -> None:
    with pytest.raises(mh.BadInput, match="validation_split"):
        split(packed(np.arange(10)), fraction)


@pytest.mark.parametrize("y", [np.array([0, 1, 2]), np.eye(3), np.array([[0], [1], [2]])])
def test_class_weights_are_sample_weights(y: np.ndarray) -> None:
    assert packed(np.zeros(3), y, class_weight={0: 2.0, 2: 0.5})[2].tolist() == [2.0, 1.0, 0.5]


def test_contradictions_are_refused() -> None:
    x, y = rows(4)
    with pytest.raises(mh.BadInput, match="both given"):
        packed(x, y, np.ones(4), {0: 1.0})
    with pytest.raises(mh.BadInput, match="give y"):
        packed(x, None, np.ones(4))
    with pytest.raises(mh.BadInput, match="equally long"):
        packed(x, y[:3])
    with pytest.raises(mh.BadInput, match="give sample_weight"):
        packed(x, {"a": y}, class_weight={0: 1.0})
