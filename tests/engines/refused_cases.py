"""Tables of what is refused, in one loop; the case that was not is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from manyhands.errors import BadInput


def all_refused(
    call: Callable[[Any], object],
    cases: Iterable[tuple[Any, str]],
    kind: type[Exception] | tuple[type[Exception], ...] = BadInput,
) -> None:
    """`call(case)` raises `kind` with these words, a pattern, for each (case, words)."""
    for case, words in cases:
        try:
            found = call(case)
        except kind as error:
            if not re.search(words, str(error)):
                pytest.fail(f"{case!r} was refused with other words than {words!r}: {error}")
        except Exception as error:
            error.add_note(f"case: {case!r}")
            raise
        else:
            pytest.fail(f"{case!r} was not refused: {found!r}")
