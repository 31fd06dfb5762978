"""Of many cases of a test, which take seconds each, the first in `make test`, all in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(first: int, cases: Iterable[Any]) -> list[Any]:
    """For `pytest.mark.parametrize`: all cases, of which those after the first so many are marked slow."""
    marked = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if index < first else pytest.mark.slow) for index, case in enumerate(marked)]
