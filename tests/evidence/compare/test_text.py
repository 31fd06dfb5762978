"""A comparison's tables: their columns and cells, in a terminal, and as a pull request's text, read as a Markdown parser does."""

import math
import re
from dataclasses import replace

from by_numbers import SOLOS, Numbers, found
from markdown_it import MarkdownIt
from markdown_it.token import Token
from synthetic import HOSTILE, changed, comparison, hostile

from manyhands.evidence.compare.comparison import Comparison, Difference, Target, Trial
from manyhands.evidence.compare.table import NOTHING, TableCell, columns, interval
from manyhands.evidence.compare.text import code, markdown, plain, text
from manyhands.evidence.text_table import text_table


def parsed(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page)


def shown(tokens: list[Token]) -> list[str]:
    """What each block reads as."""
    return [output(token) for token in tokens if token.type == "inline"]


def output(token: Token) -> str:
    children = token.children or []
    assert {child.type for child in children} <= {"text", "code_inline", "strong_open", "strong_close", "text_special"}
    return "".join(child.content for child in children).replace("\u200b", "")


def table(made: Comparison) -> list[list[str]]:
    """Its rows, the head first."""
    rows: list[list[str]] = []
    inside = False
    for token in parsed(markdown(made)):
        if token.type == "tr_open":
            rows.append([])
        inside = token.type in ("th_open", "td_open") or (inside and token.type not in ("th_close", "td_close"))
        if inside and token.type == "inline":
            rows[-1].append(output(token))
    return rows


def test_the_table_and_what_stands_around_it() -> None:
    made = comparison(("allreduce",), (4,), verdict="allreduce on 4 is worth it.")
    numbers = {"solo, 1 thread": 0, "solo, 4 threads": 1, "allreduce on 4": 2}
    trials = []
    for one in made.trials:
        i = numbers[one.variant]
        lost = {"distance": 0.0, "bytes": i * 1000, "metrics": {"test_accuracy": 0.97}}
        trials.append(replace(one, rows_per_s=100.0 * 2**i, target_seconds=4.0 / 2**i, **lost))
    made = replace(made, trials=tuple(trials))
    solo, costs = ["× solo, 1 thread", "× solo, 4 threads"], ["distance from solo", "bytes sent"]
    assert table(made) == [
        ["variant", "rows/s", *solo, "time to test_accuracy ≥ 0.95", "test_accuracy", *costs],
        ["solo, 1 thread", "100", "–", "0.50×", "4.00 s", "0.9700", "0", "0 B"],
        ["solo, 4 threads", "200", "2.00×", "–", "2.00 s", "0.9700", "–", "1.0 KB"],
        ["allreduce on 4", "400 ▲", "4.00×", "2.00×", "1.00 s ▲", "0.9700 =", "0", "2.0 KB"],
    ]
    title, verdict, rows, legend, *rest, command = markdown(made).split("\n\n")
    assert (title, verdict) == ("### digits: strategies compared", "**allreduce on 4 is worth it.**")
    assert rows.splitlines()[1] == "| --- |" + " --: |" * 7
    assert re.match("Means of 3 repeats, .*against `solo, 4 threads`: ▲ better", legend)
    assert any("push\\_every=16" in block for block in rest)
    assert any("AMD EPYC 7B13" in block and "took 1.57 min." in block for block in rest)
    assert command == f"`{made.machine['command']}`"


def test_every_row_has_as_many_cells_as_the_head_and_there_is_less_where_less_is_known() -> None:
    made = comparison(fails=("allreduce on 2",))
    rows = table(made)
    assert len(rows) == 1 + len(made.variants)
    assert {len(row) for row in rows} == {8}
    failed = next(row for row in rows if row[0] == "allreduce on 2")
    assert failed[1].startswith("failed: worker 1 raised RuntimeError")
    assert failed[2:] == [""] * 6
    less = shown(parsed(markdown(comparison(target=None, differences={}, advice=(), machine={}, seconds=0.0))))
    assert not [block for block in less if any(word in block for word in ("▲", "Advice", "Machine", "time to"))]
    virtual = comparison(repeats=2, simulated={"network": "1ms"}, complete=False, fails=("allreduce on 2",))
    blocks = "\n".join(shown(parsed(markdown(virtual))))
    for words in ("virtual: .*network 1ms", "interrupted: .* 2 whole repeats", "Failed: allreduce on 2"):
        assert re.search(words, blocks), words


def test_any_text_reads_as_it_is_makes_no_markup_and_mentions_nobody() -> None:
    texts = "a\nb\r\n# c", "| --- |", "![x](http://elsewhere.invalid)", "a\\`b`", "***", "&amp;"
    for given in (HOSTILE, *texts):
        flat = " ".join(given.split())
        assert shown(parsed(f"x {plain(given)}")) == [f"x {flat}"]
        assert shown(parsed(f"x {code(given)}")) == [f"x {flat}"]
        cells = shown(parsed(f"| {code(given, in_table=True)} | {plain(given)} |\n| --- | --- |"))
        assert cells[1] == flat
        assert cells[0].replace("\\|", "|") == flat.replace("\\|", "|")
    page = markdown(hostile())
    types = {token.type for token in parsed(page)}
    assert "html_block" not in types
    assert shown(parsed(page))[0] == f"{HOSTILE}: strategies compared"
    assert {len(row) for row in table(hostile())} == {8}
    outside_code = "".join(page.split("``")[::2])
    assert "@s" not in outside_code
    assert "http://" not in outside_code


# -- in a terminal -------------------------------------------------------------------------------------------------------

ONE, TWO = SOLOS
AIM = Target(metric="test_accuracy", value=0.97, higher=True)
RATES: dict[str, Numbers] = {
    ONE: [50.0] * 3,
    TWO: [100.0, 101.0, 99.0],
    "local-sgd:period=8 on 2": [160.0, 170.0, 165.0],
    "downpour on 2": [12_345.0] * 3,
    "gossip on 2": [None] * 3,
}
METRICS: dict[str, Numbers] = {"downpour on 2": [0.8] * 3}
TARGETS: dict[str, Numbers] = {
    ONE: [20.0] * 3,
    TWO: [10.0, 10.0, 10.0],
    "local-sgd:period=8 on 2": [5.0, 5.0, None],
    "downpour on 2": [None] * 3,
}
COMPARISON = found(RATES, METRICS, TARGETS, failures={"gossip on 2": "it broke"}, target=AIM)


def words(output: str, start: str) -> str:
    return " ".join(next(one for one in output.split("\n") if one.startswith(start)).split())


def test_a_line_says_what_a_variant_did_and_one_of_the_second_table_what_it_cost() -> None:
    output = text(COMPARISON)
    assert words(output, TWO) == "solo, 2 threads 100 ±1 % 2.00× 100 % 10.0 s 1,000 0.9800"
    for name, cells in {
        "local-sgd:period=8 on 2": ["164.9 + ±3 %", "1.65×", "5.00 s (1 never)", "0.9800 ="],  # the geometric mean
        "downpour on 2": ["12,345", "never", "0.8000 -"],
        "gossip on 2": ["failed"],
    }.items():
        for cell in cells:
            assert cell in words(output, name), (name, cell)
    _, _, costs = text(COMPARISON).partition("of 3 repeats")
    assert words(costs, "downpour on 2") == "downpour on 2 0.162 10 % 60 % 20 % 10 % 5.0 MB 2 200.0 MB"


def test_all_lines_fit_and_a_narrow_terminal_keeps_what_matters_most() -> None:
    for width in (40, 80, 300):
        assert max(map(len, text(COMPARISON, width).split("\n"))) <= min(120, max(80, width)), width
    output = text(COMPARISON, 80)
    for cell in ("12,345 +", "164.9 +  ±3 %", "1.65×", "5.00 s (1 never)", "0.9800 =", "local-sgd:period=8 on 2 "):
        assert cell in output
    assert "ciency" not in output
    name = "my_own_strategies.py:Quantised:period=8,levels=4,warmup=100,compress=topk:0.01 on 2"
    output = text(found({"solo": [1.0] * 3, name: [2.0] * 3}), 80)
    assert max(map(len, output.split("\n"))) <= 80
    assert "warmup=100" in output.replace("\n", "")


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
