"""Tables as plain text."""

from manyhands.evidence.text_table import text_table


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
