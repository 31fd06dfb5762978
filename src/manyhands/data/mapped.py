"""Columns in files without names, mapped: they take no memory that the system cannot take back, and nothing is left of
them."""

from __future__ import annotations

from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


def mapped(file: IO[bytes], dtype: Any) -> NDArray[Any]:
    """[n]: what was written to a file, which may be closed then. Changes stay with the process that makes them.

    It is a plain array, which is sent to workers out of band, and writable, so that compiled functions see one type.
    """
    file.flush()
    if not file.seek(0, 2):
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode="c"))
