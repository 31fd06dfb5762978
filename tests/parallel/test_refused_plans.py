"""Each plan that is refused, and what is said of it (refused_plans.txt)."""

from __future__ import annotations

import pytest
import refused_plans
from refused_plans import CASES, FILE, said

KNOWN = dict(block.split("\n    ", 1) for block in FILE.read_text().strip().split("\n\n"))


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.slow if "compiled" in title else ()) for title in CASES]
)
def test_a_refused_plan_says_what_is_known(title: str) -> None:
    """After a change that is wanted: `python tests/parallel/refused_plans.py`."""
    assert said(CASES[title]) == KNOWN[title]


def test_the_file_has_the_plans_and_no_others() -> None:
    assert list(KNOWN) == list(CASES)


def test_a_plan_that_is_taken_is_no_refused_one() -> None:
    with pytest.raises(AssertionError, match="it was not refused"):
        said(refused_plans.cut("stages=2"))
