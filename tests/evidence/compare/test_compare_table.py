"""The table's columns and cells; tables as plain text."""

import math
import re
from dataclasses import replace

from synthetic import changed, comparison

from manyhands.evidence.compare.comparison import Comparison, Difference, Trial
from manyhands.evidence.compare.table import NOTHING, TableCell, columns, interval
from manyhands.evidence.text_table import text_table


def cell(made: Comparison, group: str, label: str, name: str) -> TableCell:
    found = next(column for column in columns(made) if (column.group, column.label) == (group, label))
    return found.cell(made.variant(name))


def test_a_rate_says_mean_spread_interval_and_verdict_and_speed_up_is_against_both_solos() -> None:
    made = changed(comparison(), "allreduce on 4", rows_per_s=[16000.0, 16000.0, 14000.0])
    found = cell(made, "Speed", "rows/s", "allreduce on 4")
    assert found.text == "15,303"  # the geometric mean
    assert found.lines == ("14,000–16,000", "1.61× [1.52, 1.70]")
    assert found.mark == "better"
    assert re.match(r"better: 1.61× \[1.52, 1.70\], .* 95 % .*solo, 4 threads; up to 5 %", found.title)
    assert cell(made, "Speed", "rows/s", "solo, 4 threads").mark == ""
    made = comparison()
    for name, rate in (("solo, 1 thread", 100.0), ("solo, 4 threads", 200.0), ("allreduce on 4", 300.0)):
        made = changed(made, name, rows_per_s=rate)
    assert cell(made, "Speed", "× solo, 1 thread", "allreduce on 4") == TableCell(text="3.00×")
    assert cell(made, "Speed", "efficiency", "allreduce on 4").text == "75 %"
    (against,) = (one for one in columns(made) if one.terminal == "× solo,\n4 threads")
    assert against.cell(made.variant("allreduce on 4")) == TableCell(text="1.50×")
    assert against.label == ""  # on the page it stands below rows/s, with its interval
    assert cell(made, "Speed", "× solo, 1 thread", "solo, 4 threads").text == "2.00×"
    assert cell(made, "Speed", "× solo, 1 thread", "solo, 1 thread").text == NOTHING


def test_a_target_is_reached_or_not_or_in_some_repeats() -> None:
    made = changed(comparison(), "allreduce on 4", target_seconds=[1.0, 4.0, 2.0])
    found = cell(made, "Until test_accuracy ≥ 0.95", "time", "allreduce on 4")
    assert (found.text, found.lines[0], found.mark) == ("2.00 s", "1.00–4.00 s", "better")
    some = changed(made, "allreduce on 4", target_seconds=[1.0, None, None])
    found = cell(some, "Until test_accuracy ≥ 0.95", "time", "allreduce on 4")
    assert (found.text, found.lines, found.mark) == ("1.00 s", ("2 never",), "")
    never = changed(made, "allreduce on 4", target_seconds=None)
    worse = Difference(of="target_seconds", middle=math.inf, low=math.inf, high=math.inf, margin=0.05, outcome="worse")
    never = replace(never, differences={"allreduce on 4": (worse,)})
    found = cell(never, "Until test_accuracy ≥ 0.95", "time", "allreduce on 4")
    assert (found.text, found.lines, found.mark) == ("never", (), "worse")


def test_what_is_not_finite_and_what_is_no_distance() -> None:
    made, group, name = comparison(), "Against solo, 4 threads", "allreduce on 4"
    nan = {"train_accuracy": math.nan, "test_accuracy": math.nan}
    given = [one.metrics for one in made.of(name)]
    some = changed(made, name, metrics=[nan, *given[1:]])
    assert "1 not finite" in cell(some, "At the end", "test_accuracy", name).lines
    assert cell(changed(made, name, metrics=nan), "At the end", "test_accuracy", name).text == NOTHING
    made = changed(made, "solo, 4 threads", distance=0.0)
    assert cell(made, group, "distance", "solo, 4 threads").text == NOTHING
    assert cell(made, group, "distance", name).text == "0"
    assert cell(made, group, "agreement", name).text == "100.0 %"


def test_costs_rows_without_effect_and_what_was_read_of_files() -> None:
    made = changed(comparison(), "downpour:push_every=4 on 2", unused=[10, 30, 20])
    made = changed(made, "downpour:push_every=4 on 2", memory=(100_000_000, 300_000_000), bytes=61_200_000, seconds=2.0)
    name = "downpour:push_every=4 on 2"
    assert cell(made, "Cost and rate", "unused rows", name) == TableCell(text="20", between="10–30")
    assert cell(made, "Cost and rate", "memory", name).text == "300.0 MB"
    assert cell(made, "Cost and rate", "sent", name).text == "61.2 MB"
    assert cell(made, "Cost and rate", "worker-seconds", name).text == "4"
    assert cell(changed(made, name, effective_rate=0.012), "Cost and rate", "effective rate", name).text == "0.012"
    nothing = replace(made, trials=tuple(replace(one, unused=0, memory=()) for one in made.trials))
    labels = [column.label for column in columns(nothing)]
    assert "unused rows" not in labels
    assert "memory" not in labels
    name = "allreduce on 2"
    made = changed(comparison(), name, input=[*({"bytes": many, "reads": 9} for many in (2e6, 4e6, 6e6))])
    made = changed(made, name, timing=({"input": 1.0, "compute": 2.0}, {"input": 2.0, "compute": 3.0}))
    assert cell(made, "Cost and rate", "read", name) == TableCell(text="4.0 MB", between="2.0–6.0 MB")
    assert cell(made, "Cost and rate", "waiting for input", name).text == "38 %"
    assert cell(made, "Cost and rate", "read", "solo, 4 threads").text == NOTHING
    labels = [column.label for column in columns(comparison())]
    assert not {"read", "waiting for input"} & set(labels)


def test_columns_and_intervals_are_those_of_what_was_measured() -> None:
    for of, (middle, low, high), output in (
        ("rows_per_s", (1.62, 1.55, 1.7), "1.62× [1.55, 1.70]"),
        ("test_loss", (-0.0021, -0.004, 0.008), "−0.0021 [−0.004, +0.008]"),
        ("seconds", (1.62, 0.0, math.inf), "1.62×"),  # one repeat has no interval
        ("target_seconds", (math.nan, math.nan, math.nan), ""),
    ):
        found = Difference(of=of, middle=middle, low=low, high=high, margin=0.05, outcome="unclear")
        assert interval(found) == output, of
    made, broken = comparison(), comparison(fails=("allreduce on 4",))
    assert not [column for column in columns(comparison(target=None)) if column.group.startswith("Until")]
    assert [column.label for column in columns(made)] == [column.label for column in columns(broken)]
    assert all(column.cell(broken.variant("allreduce on 4")).text == NOTHING for column in columns(broken))
    failed = tuple(Trial(variant=one.variant, repeat=one.repeat, seed=0, failure="broken") for one in made.trials)
    assert columns(replace(made, trials=failed)) == ()


def test_the_first_column_is_at_the_left_and_folded_and_the_others_at_the_right() -> None:
    assert text_table({"name": ["a", "long one"], "rows\nto it": ["12", ""]}, 40).split("\n") == [
        "           rows",
        "name      to it",
        "a            12",
        "long one",
    ]
    lines = text_table({"name": ["abcdefghij"], "number": ["1,000,000"]}, 16).split("\n")
    assert max(map(len, lines)) <= 16
    assert "1,000,000" in lines[1]
    assert len(lines) == 3
