import math

from manyhands import units


def test_numbers_and_metrics() -> None:
    for value, four, three in (
        (0, "0", "0"),
        (12970, "12,970", "12,970"),
        (12970.4, "12,970", "12,970"),
        (1234.6, "1,235", "1,235"),
        (999.96, "1000", "1,000"),
        (123.456, "123.5", "123"),
        (12.345, "12.35", "12.3"),
        (99.96, "99.96", "100"),
        (-0.98672, "-0.9867", "-0.987"),
        (1.2e-05, "1.2e-05", "1.2e-05"),
        (math.inf, "not finite", "inf"),
        (math.nan, "not finite", "nan"),
    ):
        assert (units.number(value), units.short(value)) == (four, three)
    for value, shown in ((0.98, "0.9800"), (0.97251, "0.9725"), (2.0, "2.0000"), (0.00012, "0.00012")):
        assert units.metric(value) == shown  # they line up in a column


def test_counts_and_sizes() -> None:
    assert [units.count(n, "row") for n in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]
    assert [units.count(n, "push", "pushes") for n in (1, 2)] == ["1 push", "2 pushes"]
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 KB", 61_234_000: "61.2 MB", 2_500_000_000_000: "2.5 TB"}
    assert {size: units.size(size) for size in sizes} == sizes


def test_times() -> None:
    seconds = (2.5e-9, 2.5e-6, 1.5e-3, 1, 90, 3600, 2 * 86_400)
    assert list(map(units.duration, seconds)) == ["2.5 ns", "2.5 µs", "1.5 ms", "1 s", "1.5 min", "1 h", "2 d"]
    even = {0.00041: "410 µs", 0.041: "41.0 ms", 3.2: "3.20 s", 125: "2.08 min", 0.123: "123 ms"}
    assert {value: units.even_duration(value) for value in even} == even
    decimals = {0.0: "0.00 s", 0.0312: "31.2 ms", 0.1: "0.10 s", 42.3456: "42.35 s"}  # what they would hide is in ms
    assert {value: units.seconds(value, 2) for value in decimals} == decimals
    assert [units.seconds(value) for value in (0.00005, 12.34, 1234.5)] == ["0.05 ms", "12.3 s", "1,234.5 s"]


def test_lists_say_how_many_more_and_keep_commas_apart() -> None:
    for names, listed in (("a", "a"), ("abcd", "a, b, c, d"), ("abcdefg", "a, b, c, d and 3 more")):
        assert units.listed(list(names)) == listed
    for names, named in (
        ("a", "a"),
        ("ab", "a and b"),
        ("abcd", "a, b, c and d"),  # "1 more" would be no shorter than the name
        ("abcde", "a, b, c and 2 more"),
    ):
        assert units.named(list(names)) == named
    assert units.named(["a, 1", "b", "c"]) == "a, 1; b and c"


def test_text_of_others_moves_no_cursor_and_forges_no_line() -> None:
    forged = "alpha\x1b[2J\r\nWARNING all is well\u202e\x9b1m"
    assert units.printable(forged) == "alpha?[2J??WARNING all is well??1m"
    assert units.printable("a\n\tb\x07", keep="\n\t") == "a\n\tb?"
    assert units.printable("Zürich 東京 " + "x" * 500, 12) == "Zürich 東京 xx"
    assert units.printable(7) == "7"


def test_ratios_shares_and_distances() -> None:
    assert [units.times(ratio) for ratio in (1.618, 52.8, 1024.0, 0.0516)] == ["1.62×", "52.8×", "1,024×", "0.052×"]
    assert [units.percent(share) for share in (0.384, 0.004, 0.0)] == ["38 %", "0.4 %", "0 %"]
    assert [units.signed(value) for value in (0.00312, -0.02, 0.0)] == ["+0.0031", "−0.02", "0"]
    assert [units.power(exponent) for exponent in (-12, -2, 0, 3)] == ["10⁻¹²", "0.01", "1", "10³"]
    distances = (0, 0.2, 2.4e-6, 12.3, math.inf, math.nan)  # zero only where it is
    assert list(map(units.small, distances)) == ["0", "0.20", "2.4×10⁻⁶", "12", "not finite", "not finite"]


def test_a_span_says_its_unit_once_and_nothing_where_both_ends_read_the_same() -> None:
    assert units.between(3.1, 3.4, units.even_duration) == "3.10–3.40 s"
    assert units.between(0.09, 3.4, units.even_duration) == "90.0 ms–3.40 s"
    assert units.between(0.97, 0.98, units.metric) == "0.9700–0.9800"
    assert units.between(0.970001, 0.970002, units.metric) == ""
