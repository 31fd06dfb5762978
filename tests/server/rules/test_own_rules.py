"""A server rule of one's own, in a file: the conformance suite, and who may name it."""

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
from manyhands.testing.server_suite import RULE_SUITE, RULES
from refusals import refused

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


@pytest.mark.parametrize("rule", [*RULES, "pairs", "own"])
def test_every_rule_passes_the_suite(rule: str, path: Path) -> None:
    """The other three checks of our rules are among those of a server."""
    options = {"own": {"share": 0.25}, "pairs": {"seed": 4}}.get(rule) or RULES[rule]
    spec = ServerSpec(rule=f"{path}:Half" if rule == "own" else rule, options=options)
    list_rule(spec)
    ours = ("shards_agree", "capture") if rule == "pairs" else ("in_step", "leaves_the_old_center_whole")
    for check in RULE_SUITE if rule == "own" else ours:
        RULE_SUITE[check](servers, spec)


def test_the_suite_fails_a_rule_that_breaks_a_promise(path: Path) -> None:
    broken = {"Counts": "capture", "Mixes": "shards_agree", "Spoils": "leaves_the_old_center_whole"}
    for rule, check in broken.items():
        list_rule(spec := ServerSpec(rule=f"{path}:{rule}"))
        refused("", RULE_SUITE[check], servers, spec, kind=ManyhandsError, case=rule)


def test_what_cannot_be_listed_or_made(path: Path) -> None:
    """A rule that was not listed is refused also where this process could read the file."""
    half = f"{path}:Half"
    for rule, kind, message in [
        (f"{path}:Nothing", BadInput, "is no rule: write a class derived from manyhands.Rule"),
        (f"{path}:Unfinished", BadInput, "does not define merge"),
        (f"{path}:Halve", UnknownName, "did you mean 'Half'"),
        (f"{path.parent}/none.py:Half", BadInput, "there is no file"),
    ]:
        refused(message, list_rule, ServerSpec(rule=rule), kind=kind)
    unlisted = "that the process which launches the run names"
    refused(unlisted, make_rule, ServerSpec(rule=half), kind=UnknownName)
    for rule in (half, "half"):
        fields = {"rule": rule, "bound": None, "options": {}, "compress": "none", "one_shard": False}
        refused("was not listed by the process that launched", from_fields, fields)
    list_rule(spec := ServerSpec(rule=half, options={"shares": 1}))
    refused("has no option 'shares'.*it has share", make_rule, spec, kind=UnknownName)


def test_it_arrives_where_the_file_is_not(path: Path) -> None:
    spec = ServerSpec(rule=f"{path}:Half", options={"share": 0.25})
    list_rule(spec)
    fields: dict[str, Any] = to_fields(spec)
    path.unlink()
    OWN.clear()
    sys.modules.pop(path.stem, None)
    assert from_fields(fields) == spec
    assert vars(make_rule(spec)) == {"share": 0.25}
