"""What is refused, for tests that try many inputs in a loop: the one that was taken is named."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from manyhands.errors import BadInput


def refused(
    words: str,
    call: Callable[..., Any],
    *arguments: Any,
    kind: type[Exception] | tuple[type[Exception], ...] = BadInput,
    case: object = None,
) -> Exception:
    """`call(*arguments)` raises an exception of this kind, in whose text `words` are found. Returns it."""
    named = f"{arguments if case is None else case!s:.300}"
    try:
        found = call(*arguments)
    except kind as error:
        if not re.search(words, str(error)):
            pytest.fail(f"{named} was refused with other words than {words!r}: {error}")
        return error
    pytest.fail(f"{named} was not refused: {found!r:.300}")


def all_refused(
    call: Callable[[Any], object],
    cases: Iterable[tuple[Any, str]],
    kind: type[Exception] | tuple[type[Exception], ...] = BadInput,
) -> None:
    """`call(case)` is refused with these words for each (case, words)."""
    for case, words in cases:
        refused(words, call, case, kind=kind)
