from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from refused_cases import all_refused

from manyhands.engines.survive import Survive
from manyhands.errors import BadInput, UnknownName
from manyhands.spec import field_docs


def test_a_text_is_read_and_reads_back() -> None:
    assert [Survive.of(nothing) for nothing in (None, "", "  ")] == [None] * 3
    for text, made in (
        ("max_losses=3,replace=false", Survive(max_losses=3, replace=False)),
        ("max_losses=any, min-workers=2", Survive(max_losses="any", min_workers=2)),
        ("max_workers=8,max_restarts=1,copies=2", Survive(max_workers=8, max_restarts=1, copies=2)),
        ("silence_s=2.5,wait_s=30,cooldown_s=1", Survive(silence_s=2.5, wait_s=30, cooldown_s=1)),
        ("slow=3,max_workers=none", Survive(slow=3)),
        ("max_losses=0", Survive()),
    ):
        assert Survive.of(text) == Survive.of(str(made)) == made, text
        assert Survive.of(made) is made
    assert str(Survive(max_losses="any", replace=False, slow=2.5)) == "max_losses=any,replace=false,slow=2.5"
    assert str(Survive()) == "max_losses=0"  # "" would read as None


def test_an_unknown_option_lists_what_there_is() -> None:
    with pytest.raises(UnknownName, match=r"no option 'max_loses' \(did you mean 'max_losses'\?\)") as caught:
        Survive.of("max_loses=3")
    for field in dataclasses.fields(Survive):
        assert field.name in str(caught.value)
    assert field_docs(Survive).keys() == {field.name for field in dataclasses.fields(Survive)}


def test_a_text_that_cannot_be_read_says_what_was_expected() -> None:
    all_refused(
        Survive.of,
        [
            ("3", "cannot read '3'.*expected option=value"),
            ("max_losses=some", "max_losses must be a whole number.*one of any"),
            ("replace=perhaps", "replace must be true or false"),
            ("min_workers=2.5", "min_workers must be a whole number"),
            ("wait_s=long", "wait_s must be a number"),
            (3, "survive must be a text.*got int"),
        ],
    )


def test_a_number_without_sense_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_losses": -1}, "max_losses must be a whole number of at least 0, or any; got -1"),
        ({"max_losses": 1.5}, "max_losses .* got 1.5"),
        ({"max_losses": True}, "max_losses .* got True"),
        ({"max_losses": "all"}, "max_losses .* got 'all'"),
        ({"min_workers": 0}, "min_workers must be a whole number of at least 1; got 0"),
        ({"max_workers": 0}, "max_workers must be a whole number of at least 1; got 0"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers must be at least min_workers, which is 3; got 2"),
        ({"replace": 1}, "replace must be true or false; got 1"),
        ({"max_restarts": -1}, "max_restarts must be a whole number of at least 0; got -1"),
        ({"copies": 0}, "copies must be 1, or 2"),
        ({"copies": 3}, "copies must be 1, or 2 .* got 3"),
        ({"silence_s": 0}, "silence_s must be a positive number of seconds; got 0"),
        ({"wait_s": -1.0}, "wait_s must be a positive number of seconds; got -1.0"),
        ({"cooldown_s": math.nan}, "cooldown_s must be a positive number of seconds; got nan"),
        ({"wait_s": math.inf}, "wait_s must be a positive number of seconds; got inf"),
        ({"slow": 1}, "slow must be a factor above 1.* got 1"),
        ({"slow": -2.0}, "slow must be a factor above 1"),
    ]
    all_refused(lambda options: Survive(**options), cases)


def test_a_run_that_cannot_have_it_is_refused() -> None:
    Survive(min_workers=2, max_workers=8, copies=2).check(4, 8, True)
    Survive().check(4, None, False)
    cases: list[tuple[tuple[dict[str, Any], tuple[int, int | None, bool]], str]] = [
        (({"min_workers": 3}, (2, 32, False)), "must start with min_workers=3 or more; got 2 workers"),
        (({"max_workers": 4}, (5, 32, False)), "must start with max_workers=4 or less; got 5 workers"),
        (({"max_workers": 64}, (4, 32, False)), "max_workers must be at most batch_size, which is 32.*got 64"),
        (({}, (4, 3, False)), "max_workers must be at most batch_size, which is 3.*got 4"),
        (({"copies": 2}, (4, 32, False)), "copies=2 is of server shards, and this run has no server"),
    ]
    all_refused(lambda case: Survive(**case[0]).check(*case[1]), cases, BadInput)
