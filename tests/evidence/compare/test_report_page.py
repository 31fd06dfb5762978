"""The page as text: what it says, that it is whole, and that nobody's name becomes part of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from synthetic import HOSTILE, comparison, hostile

from manyhands.evidence.compare import report
from manyhands.evidence.compare.charts import charts, left_out
from manyhands.evidence.compare.comparison import Comparison


@pytest.fixture(scope="module", autouse=True)
def without_plotly_js() -> Iterator[None]:
    """4.8 MB that say nothing here; the browser's tests have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plotly_js", lambda: "/* plotly.js */")
        yield


@pytest.fixture(scope="module")
def text() -> str:
    return report.html(comparison())


@pytest.fixture(scope="module")
def whole(text: str) -> "Page":
    return Page(text)


class Page(HTMLParser):
    """Elements with their attributes, the text that is shown, and what scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self._hidden = 0
        self.feed(text)
        self.text = " ".join(" ".join(self.shown).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("id") or "code"
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._script = None if tag == "script" else self._script
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif not self._hidden:
            self.shown.append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]


def page(made: Comparison) -> Page:
    return Page(report.html(made))


def test_it_says_verdict_advice_table_method_machine_and_trials_in_this_order(whole: Page) -> None:
    made = comparison()
    marks = [
        *(made.task, "10 variants, 3 repeats, 38,282 parameters, judged by test_accuracy, target test_accuracy ≥ 0.95"),
        *(made.verdict[13:60], "spends 31 % of its time exchanging", "What was measured", "What it looks like"),
        *("How it was measured", "AMD EPYC 7B13", "python 3.11.9, torch 2.13.0, manyhands 1.2.3"),
        *(str(made.machine["command"]), "All 30 trials"),
    ]
    places = [whole.text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_every_variant_is_a_row_and_nothing_is_loaded_from_anywhere(text: str, whole: Page) -> None:
    assert [one for name in ("src", "href", "action", "srcset") for one in whole.attributes(name)] == ["data:,"]
    assert "url(" not in text
    policy = next(one["content"] for tag, one in whole.elements if tag == "meta" and one.get("http-equiv"))
    assert policy == report.SCRIPT_POLICY
    assert policy.startswith("default-src 'none';")
    rows = re.findall(r'<tr class="reference">|<tr>\s*<th scope="row">', text.split("</table>")[0])
    assert len(rows) == 10
    first = re.findall("<table>.*?</thead>.*?the reference", text, re.DOTALL)
    assert text.count("the reference</span>") == len(first) == 2
    for words in (
        *("1.61× [1.52, 1.70] better", "0.97× [0.90, 1.04] no difference seen"),
        *("−0.012 [−0.02, −0.011] worse", "[−0.002, +0.004] same"),
    ):
        assert words in whole.text, words


def test_failures_and_what_is_not_finite_are_shown_and_break_nothing() -> None:
    text = page(comparison(fails=("allreduce on 2",))).text
    assert "Failed: allreduce on 2 ." in text
    assert "failed: worker 1 raised RuntimeError: the loss is not finite" in text
    assert "Traceback of allreduce on 2 File train.py, line 3" in text
    made = comparison()
    broken = [i for i, one in enumerate(made.trials) if one.variant == "allreduce on 4"][1]
    trials = tuple(replace(one, failure="lost") if i == broken else one for i, one in enumerate(made.trials))
    made = replace(made, trials=trials)
    assert report.failed(made, "allreduce on 4") == "in 1 of 3 repeats"
    assert report.notes(made) == ["Failed: allreduce on 4 (in 1 of 3 repeats)."]
    assert re.search("failed in 1 of 3 repeats.*failed: lost", page(made).text)  # and among the trials
    made, nan = comparison(), {"test_accuracy": float("nan")}
    lost = []
    for one in made.trials:
        curve = tuple(replace(point, metrics=nan, distance=float("inf")) for point in one.curve)
        ill = replace(one, metrics=nan, distance=float("inf"), cosine=float("nan"), curve=curve)
        lost.append(ill if one.variant == "allreduce on 4" else one)
    found = page(replace(made, trials=tuple(lost)))
    assert "not finite" in found.text
    assert "NaN" not in found.scripts["metric_over_time-figure"]


def test_notes_method_and_machine_have_their_numbers() -> None:
    assert report.notes(comparison()) == []
    made = comparison(repeats=1, simulated={"network": "latency=1ms", "compute": "10ms"}, complete=False)
    virtual, interrupted = report.notes(made)
    assert "virtual" in virtual
    assert "(network latency=1ms, compute 10ms)" in virtual
    assert "interrupted: it rests on 1 whole repeat." in interrupted
    sentences = report.method(comparison(time_margin=0.07, metric_margin=0.004))
    assert len(sentences) == 4
    assert re.search(r"\(7 % .* 0.4 % ", sentences[3])
    assert "solo, 4 threads" in sentences[1]
    nested: dict[str, Any] = {"command": "run", "versions": {"a": "1"}, "host": "h", "gpus": ["x", "y"]}
    made = comparison(machine=nested | {"empty": "", "none": None}, seconds=0.0)
    assert report.machine(made) == [("host", "h"), ("gpus", "x, y"), ("versions", "a 1"), ("command", "run")]


def test_charts_have_a_question_a_sentence_and_a_figure(whole: Page) -> None:
    drawn = [chart for group in charts(comparison()) for chart in group]
    assert [chart.name for chart in drawn] == [
        *("metric_over_time", "metric_over_rows", "time_split", "speed_up", "time_to_target", "distance_over_rows"),
        *("distance_over_time", "staleness", "bytes_sent", "memory"),
    ]
    for chart in drawn:
        assert chart.question.endswith("?")
        assert chart.reading
        assert json.loads(whole.scripts[f"{chart.name}-figure"]) == chart.figure
        assert f"{chart.question} {chart.reading}" in whole.attributes("aria-label")
    levels = [int(tag[1]) for tag, _ in whole.elements if tag in ("h1", "h2", "h3")]  # as a screen reader takes them
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert {one.get("scope") for tag, one in whole.elements if tag == "th"} == {"col", "colgroup", "row"}
    groups = whole.attributes("data-group")  # one legend serves two charts
    assert len(groups) == len(set(groups)) * 2 - 1  # the metric's, and the distance's, which is without solo itself
    figure = json.loads(whole.scripts["metric_over_time-figure"])
    assert {trace["legendgroup"] for trace in figure["data"]} == set(groups)


def test_what_the_charts_leave_out_is_said() -> None:
    many = tuple(f"local-sgd:period={i}" for i in range(1, 31))
    for made, words in (
        (comparison(), "^$"),
        (comparison(many, (2,)), "solo and the 10 others .*soonest at test_accuracy ≥ 0.95, not .*and 17 more;"),
        (comparison(many, (2,), target=None), "best in test_accuracy"),
        (comparison(("allreduce",), (64,)), "^Of many workers, at most 8 a variant"),
    ):
        assert re.search(words, left_out(made)), words


def test_what_is_missing_is_left_out() -> None:
    nothing: dict[str, Any] = {"trials": (), "differences": {}, "verdict": "", "advice": (), "machine": {}}
    for name, made in {
        "no target": comparison(target=None),
        "one worker": comparison(("downpour",), (1,)),
        "no trial": replace(comparison(), **nothing),
        "all failed": comparison(fails=tuple(one.name for one in comparison().variants), differences={}),
    }.items():
        text = page(made).text
        assert "None" not in text, name
        assert "nan" not in text.split(), name
        assert made.task in text, name


def test_nobodys_name_becomes_part_of_the_page() -> None:
    clean, found = page(hostile("harmless")), page(hostile())
    tags = [[tag for tag, _ in one.elements if tag not in ("wbr", "b")] for one in (clean, found)]
    assert tags[0] == tags[1]
    assert {*found.attributes("onerror"), *found.attributes("src")} == set()
    assert found.attributes("href") == ["data:,"]
    assert found.text.count(HOSTILE) > 10
    assert json.loads(found.scripts["metric_over_time-figure"])
