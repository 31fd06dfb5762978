"""The pull request's text, read as a Markdown parser does."""

from dataclasses import replace

import pytest
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


def test_the_whole_text() -> None:
    made = comparison(("allreduce",), (4,), verdict="allreduce on 4 is worth it.")
    trials = tuple(
        replace(
            one,
            rows_per_s=100.0 * 2**i,
            target_seconds=4.0 / 2**i,
            metrics={"test_accuracy": 0.97},
            distance=0.0,
            bytes=i * 1000,
        )
        for repeat in range(3)
        for i, one in enumerate(made.trials[repeat * 3 : repeat * 3 + 3])
    )
    assert markdown(replace(made, trials=trials)).split("\n") == [
        "### digits: strategies compared",
        "",
        "**allreduce on 4 is worth it.**",
        "",
        "| variant | rows/s | × solo, 1 thread | × solo, 4 threads | time to test\\_accuracy ≥ 0.95 | test\\_accuracy | distance from solo | bytes sent |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
        "| `solo, 1 thread` | 100 | – | 0.50× | 4.00 s | 0.9700 | 0 | 0 B |",
        "| `solo, 4 threads` | 200 | 2.00× | – | 2.00 s | 0.9700 | – | 1.0 KB |",
        "| `allreduce on 4` | 400 ▲ | 4.00× | 2.00× | 1.00 s ▲ | 0.9700 = | 0 | 2.0 KB |",
        "",
        "Means of 3 repeats, of times and rates geometric; against `solo, 4 threads`: ▲ better, ▼ worse, = the same within the margin, no sign: no difference seen.",
        "",
        "**Advice:** downpour:push\\_every=4 on 4 spends 31 % of its time exchanging: push\\_every=16 would send a quarter.",
        "",
        "Machine: cores 4, processor AMD EPYC 7B13, engine local, device cpu, when 2031-05-04 12:31 UTC, "
        "versions python 3.11.9, torch 2.13.0, manyhands 1.2.3, took 1.57 min.",
        "",
        "`manyhands compare digits --strategies allreduce,local-sgd:period=8 --workers 2,4 --target test_accuracy=0.95`",
    ]


def test_every_row_has_as_many_cells_as_the_head() -> None:
    made = comparison(fails=("allreduce on 2",))
    rows = table(made)
    assert len(rows) == 1 + len(made.variants)
    assert {len(row) for row in rows} == {8}
    failed = next(row for row in rows if row[0] == "allreduce on 2")
    assert failed[1:] == ["failed: worker 1 raised RuntimeError: the loss is not finite", *[""] * 6]


def test_without_target_differences_advice_and_machine_there_is_less() -> None:
    made = comparison(target=None, differences={}, advice=(), machine={}, seconds=0.0)
    blocks = shown(parsed(markdown(made)))
    assert not [
        block for block in blocks if "▲" in block or "Advice" in block or "Machine" in block or "time to" in block
    ]


def test_a_reader_is_told_of_virtual_seconds_interruptions_and_failures() -> None:
    made = comparison(repeats=2, simulated={"network": "latency=1ms"}, complete=False, fails=("allreduce on 2",))
    blocks = shown(parsed(markdown(made)))
    assert "All seconds are virtual: they are of a simulated cluster (network latency=1ms), not of a machine." in blocks
    assert "The comparison was interrupted: it rests on 2 whole repeats." in blocks
    assert "Failed: allreduce on 2." in blocks


@pytest.mark.parametrize(
    "text", [HOSTILE, "a\nb\r\n# c", "| --- |", "![x](http://elsewhere.invalid)", "a\\`b`", "***", "&amp;"]
)
def test_any_text_reads_as_it_is_and_is_nothing_else(text: str) -> None:
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
