"""docs/updates.md shows what was recorded, what it says of the records holds, and its table has all strategies."""

import json
import re
import runpy
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.strategies import CATALOGUE
from pages import ROOT, commands

UPDATES = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "updates.py")))
PAGE = ROOT / "docs" / "updates.md"
RUNS: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "docs" / "updates.json").read_text())
RANKS = range(UPDATES.WORKERS)


def spans(way: str, what: str, rank: int | None = None) -> list[dict[str, Any]]:
    return [span for span in RUNS[way] if span["what"] == what and rank in (None, span["worker"])]


@pytest.mark.parametrize("way", UPDATES.WAYS, ids=lambda way: way.name)
def test_the_record_is_what_a_run_gives(way: Any) -> None:
    assert UPDATES.record(way) == RUNS[way.name]


def test_the_page_has_the_numbers_the_commands_and_the_pictures_of_the_records_and_every_strategy_once() -> None:
    text = PAGE.read_text()
    assert UPDATES.table(RUNS) in text
    assert commands(PAGE) == [shlex.split(way.command) for way in UPDATES.WAYS]
    assert re.findall(r"plots/updates-([\w-]+)\.svg", text) == [way.name for way in UPDATES.WAYS]

    rows = re.findall(r"^\| `([\w-]+)` \|.*$", text[text.index("## All strategies") :], re.MULTILINE)
    assert sorted(rows) == sorted(CATALOGUE)


def test_who_waits_and_who_does_not_is_what_the_page_says() -> None:
    """Synchronous steps come together, and nobody computes meanwhile; periodic workers average after three steps."""
    steps = [[span["end"] for span in spans("synchronous", "step", rank)] for rank in RANKS]
    assert steps[0] == steps[1] == steps[2]
    computing = spans("synchronous", "compute")
    for mean in spans("synchronous", "mean"):
        last = mean["start"] + mean["waited"]
        assert not [span for span in computing if span["start"] < mean["end"] and span["end"] > last]
    for rank in RANKS:
        order = [span["what"] for span in RUNS["periodic"] if span["worker"] == rank]
        assert [what for what in order if what in ("step", "mean")] == ["step", "step", "step", "mean"] * 2
        computing = spans("lock-free", "compute", rank)
        assert [span["start"] for span in computing[1:]] == [span["end"] for span in computing[:-1]]
        assert [span["end"] for span in computing] == [span["end"] for span in spans("lock-free", "step", rank)]
    assert {span["what"] for span in RUNS["lock-free"]} == {"compute", "step"}
    assert not any(span.get("waited") for span in RUNS["asynchronous"])  # and the slow one is the most stale
    stale = [max(span["staleness"] for span in spans("asynchronous", "push", rank)) for rank in RANKS]
    assert max(stale) == stale[2] > len(RANKS) - 1
