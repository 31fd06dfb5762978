"""A server rule of one's own, in a file: the conformance suite, and who may name it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.engines.own_rules import from_fields, list_rule, to_fields
from manyhands.errors import BadInput, ManyhandsError, UnknownName
from manyhands.server.base import Server, ServerSpec
from manyhands.server.in_process import InProcessServers
from manyhands.server.rules import OWN, make_rule
from manyhands.testing import server_suite
from manyhands.testing.group_suite import CheckFailed
from manyhands.testing.server_suite import RULE_SUITE, RULES

RULES_OF_A_FILE = (
    (Path(__file__).parent / "own_rule.py").read_text()
    + '''

class Nothing:
    pass


class Unfinished(mh.Rule):
    pass


class Counts(Half):
    """Remembers what no snapshot has."""

    seen = 0

    def merge(self, old, new, pushes):
        self.seen += 1
        new.copy_(old + pushes[0].update / self.seen)


class Mixes(Half):
    def merge(self, old, new, pushes):
        new.copy_(old + pushes[0].update.sum())


class Spoils(Half):
    def merge(self, old, new, pushes):
        old += pushes[0].update
        new.copy_(old)


'''
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "own_rule_of_this_test.py"
    file.write_text(RULES_OF_A_FILE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield file
    sys.modules.pop(file.stem, None)
    for rule in [rule for rule in OWN if rule.startswith(str(file))]:
        del OWN[rule]


@contextmanager
def servers(spec: ServerSpec, workers: int, shards: int) -> Iterator[list[Server]]:
    yield InProcessServers(spec, workers, shards, timeout_s=1).clients


@pytest.mark.parametrize("check", RULE_SUITE)
@pytest.mark.parametrize("rule", [*RULES, "own"])
def test_every_rule_passes_the_suite(rule: str, check: str, path: Path) -> None:
    options = RULES.get(rule, {"share": 0.25})
    spec = ServerSpec(rule=f"{path}:Half" if rule == "own" else rule, options=options)
    list_rule(spec)
    RULE_SUITE[check](servers, spec)


@pytest.mark.parametrize(
    ("rule", "check"),
    [("Counts", "capture"), ("Mixes", "shards_agree"), ("Spoils", "leaves_the_old_center_whole")],
)
def test_the_suite_fails_a_rule_that_breaks_a_promise(rule: str, check: str, path: Path) -> None:
    spec = ServerSpec(rule=f"{path}:{rule}")
    list_rule(spec)
    with pytest.raises((CheckFailed, ManyhandsError)):
        RULE_SUITE[check](servers, spec)


def test_every_check_that_is_written_is_in_the_suite() -> None:
    assert {f"rule_{name}" for name in RULE_SUITE} == {name for name in vars(server_suite) if name.startswith("rule_")}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Nothing", BadInput, "is no rule: write a class derived from manyhands.Rule"),
        ("Unfinished", BadInput, "does not define merge"),
        ("Halve", UnknownName, "did you mean 'Half'"),
    ],
)
def test_a_file_without_that_rule(name: str, error: type[Exception], message: str, path: Path) -> None:
    with pytest.raises(error, match=message):
        list_rule(ServerSpec(rule=f"{path}:{name}"))


def test_no_such_file_and_no_such_option(path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        list_rule(ServerSpec(rule=f"{path.parent}/none.py:Half"))
    spec = ServerSpec(rule=f"{path}:Half", options={"shares": 1})
    list_rule(spec)
    with pytest.raises(UnknownName, match="has no option 'shares'.*it has share"):
        make_rule(spec)


def test_a_rule_that_was_not_listed_is_refused(path: Path) -> None:
    """Also where this process could read the file."""
    with pytest.raises(UnknownName, match="that the process which launches the run names"):
        make_rule(ServerSpec(rule=f"{path}:Half"))
    for rule in (f"{path}:Half", "half"):
        with pytest.raises(BadInput, match="was not listed by the process that launched"):
            from_fields({"rule": rule, "bound": None, "options": {}, "compress": "none", "one_shard": False})


def test_it_arrives_where_the_file_is_not(path: Path) -> None:
    spec = ServerSpec(rule=f"{path}:Half", options={"share": 0.25})
    list_rule(spec)
    fields: dict[str, Any] = to_fields(spec)
    path.unlink()
    OWN.clear()
    sys.modules.pop(path.stem, None)
    assert from_fields(fields) == spec
    assert vars(make_rule(spec)) == {"share": 0.25}
