"""The pull request's text, read as a Markdown parser does."""

import re
from dataclasses import replace

from markdown_it import MarkdownIt
from markdown_it.token import Token
from synthetic import HOSTILE, comparison, hostile

from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.text import code, markdown, plain


def parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


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
        costs = {"distance": 0.0, "bytes": i * 1000, "metrics": {"test_accuracy": 0.97}}
        trials.append(replace(one, rows_per_s=100.0 * 2**i, target_seconds=4.0 / 2**i, **costs))
    made = replace(made, trials=tuple(trials))
    solo = ["× solo, 1 thread", "× solo, 4 threads"]
    assert table(made) == [
        [
            "variant",
            "rows/s",
            *solo,
            "time to test_accuracy ≥ 0.95",
            "test_accuracy",
            "distance from solo",
            "bytes sent",
        ],
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


def test_any_text_reads_as_it_is_and_is_nothing_else() -> None:
    texts = "a\nb\r\n# c", "| --- |", "![x](http://elsewhere.invalid)", "a\\`b`", "***", "&amp;"
    for text in (HOSTILE, *texts):
        flat = " ".join(text.split())
        assert shown(parsed(f"x {plain(text)}")) == [f"x {flat}"]
        assert shown(parsed(f"x {code(text)}")) == [f"x {flat}"]
        cells = shown(parsed(f"| {code(text, in_table=True)} | {plain(text)} |\n| --- | --- |"))
        assert cells[1] == flat
        assert cells[0].replace("\\|", "|") == flat.replace("\\|", "|")


def test_hostile_names_make_no_markup_and_mention_nobody() -> None:
    text = markdown(hostile())
    types = {token.type for token in parsed(text)}
    assert "html_block" not in types
    assert shown(parsed(text))[0] == f"{HOSTILE}: strategies compared"
    assert {len(row) for row in table(hostile())} == {8}
    outside_code = "".join(text.split("``")[::2])
    assert "@s" not in outside_code
    assert "http://" not in outside_code
