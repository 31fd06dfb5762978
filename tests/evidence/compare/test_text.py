"""The tables: what is in them, and that they fit."""

from by_numbers import SOLOS, Numbers, found

from manyhands.evidence.compare.comparison import Target
from manyhands.evidence.compare.text import text

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


def test_verdict_failure_and_the_first_advice_come_last() -> None:
    lines = text(COMPARISON).split("\n")
    at = next(i for i, one in enumerate(lines) if one.startswith("gossip on 2 failed: it broke"))
    assert lines[at + 1].startswith(COMPARISON.verdict[:60])
    assert sum(one.startswith("Advice: ") for one in lines) == 1


def test_all_lines_fit_and_a_narrow_terminal_keeps_what_matters_most() -> None:
    for width in (40, 80, 100, 120, 300):
        assert max(map(len, text(COMPARISON, width).split("\n"))) <= min(120, max(80, width)), width
    output = text(COMPARISON, 80)
    for title in ("variant", "rows/s", "2 threads", "time to", "accuracy"):
        assert title in output
    for cell in ("12,345 +", "164.9 +  ±3 %", "1.65×", "5.00 s (1 never)", "0.9800 =", "local-sgd:period=8 on 2 "):
        assert cell in output
    for title in ("answers", "distance", "ciency"):
        assert title not in output
        assert title in text(found(RATES, METRICS, failures={"gossip on 2": "it broke"}), 120)


def test_names_that_are_too_long_are_folded_not_cut() -> None:
    name = "my_own_strategies.py:Quantised:period=8,levels=4,warmup=100,compress=topk:0.01 on 2"
    output = text(found({"solo": [1.0] * 3, name: [2.0] * 3}), 80)
    assert max(map(len, output.split("\n"))) <= 80
    assert "warmup=100" in output.replace("\n", "")


def test_an_interrupted_and_simulated_comparison_says_so() -> None:
    output = text(found({"solo": [1.0], "gossip on 2": [2.0]}, complete=False, simulated={"seed": "0"}))
    assert "1 repeat, interrupted in 12 s" in output
    assert "all seconds are virtual" in output
