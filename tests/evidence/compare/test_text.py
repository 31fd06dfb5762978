"""A comparison in a terminal, and as a pull request's text, read as a Markdown parser does."""

import re
from dataclasses import replace

from by_numbers import SOLOS, Numbers, found
from markdown_it import MarkdownIt
from markdown_it.token import Token
from synthetic import HOSTILE, comparison, hostile

from manyhands.evidence.compare.comparison import Comparison, Target
from manyhands.evidence.compare.text import code, markdown, plain, text


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
