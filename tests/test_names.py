"""What other systems call things: each word leads to something of ours, in errors as on the page of names."""

import pytest

import tables
from manyhands.errors import UnknownName
from manyhands.strategies import CATALOGUE, ELSEWHERE, strategy_of
from pages import ROOT

WORDS = "Strategies by other names"
ROWS = tables.rows(ROOT / "docs" / "names.md")
OTHERS = [row for row in ROWS if row.section != WORDS]
SYSTEMS = ["Petuum", "STRADS", "GraphLab", "PowerGraph", "Angel", "BigDL", "DistBelief", "Deeplearning4j", "Elephas"]
SYSTEMS += ["dist-keras", "TensorFlowOnSpark", "Horovod", "Determined", "HOGWILD!", "word2vec", "DDP", "FSDP"]
SYSTEMS += ["Accelerate", "DeepSpeed", "Ray Train", "BytePS", "BlueFog"]


def specs_in(hint: str) -> list[str]:
    """The strategies that a hint names."""
    named = tables.codes(hint) if " " in hint else [hint]
    return [code for code in named if code.partition(":")[0] in CATALOGUE]


def test_a_word_of_others_is_answered_with_what_there_is() -> None:
    for word, hint in ELSEWHERE.items():
        assert word not in CATALOGUE
        for code in tables.codes(hint) if " " in hint else [hint]:
            assert code in specs_in(hint) or tables.is_option(code), word
        for spec in specs_in(hint):
            strategy_of(spec)
        with pytest.raises(UnknownName) as caught:
            strategy_of(word)
        answer = str(caught.value).partition("): choose from")[0]
        assert answer.endswith(hint if " " in hint else f"{hint!r} here"), word


def test_however_a_word_is_written_and_one_that_nobody_uses_is_answered_with_the_nearest() -> None:
    for word, answer in (
        ("Parameter_Server", "what others call Parameter_Server is 'downpour' here"),
        ("allredcue", "did you mean 'allreduce'"),
    ):
        with pytest.raises(UnknownName, match=answer):
            strategy_of(word)


def test_what_a_row_names_is_there() -> None:
    for row in OTHERS:
        for code in row.named:
            tables.resolve(code)
        assert row.named or tables.is_nothing(row) or "](" in row.here, f"nothing here can be checked: {row}"


def test_the_words_of_the_page_are_those_of_the_command() -> None:
    on_page = {word: row for row in ROWS if row.section == WORDS for word in tables.codes(row.there)}
    assert on_page.keys() == ELSEWHERE.keys()
    for word, row in on_page.items():
        named = [code for code in row.named if code.partition(":")[0] in CATALOGUE]
        assert named == specs_in(ELSEWHERE[word]), word


def test_each_system_has_a_place_on_both_pages() -> None:
    for name in ("names", "migrate"):
        keys = " ".join(row.key for row in tables.rows(ROOT / "docs" / f"{name}.md"))
        assert [system for system in SYSTEMS if system not in keys] == []


def test_the_names_in_the_page_of_strategies_are_those_of_the_command() -> None:
    """`a`, `b` and `c` are `x`; the last of each clause is ours."""
    page = (ROOT / "docs" / "strategies.md").read_text()
    section = page.partition("## Names that other systems use")[2].partition("Asking for one")[0]
    clauses = [tables.codes(clause) for clause in section.split(";")]
    assert len(clauses) > 5
    for *names, ours in clauses:
        assert {ELSEWHERE[name].partition(":")[0] for name in names} == {ours}
