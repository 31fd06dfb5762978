"""Who is slower than the others, judged from the seconds of steps."""

import math

import pytest

from manyhands.engines.driver.stragglers import WINDOW, Straggler, Stragglers


def report(found: Stragglers, seconds: dict[int, float], steps: int = WINDOW, generation: int = 0) -> None:
    for _ in range(steps):
        for worker_id, own in seconds.items():
            found.step(worker_id, generation, {"input_s": 0.0, "compute_s": own, "rows": 13, "wait_s": 9.0})


def test_the_slowest_once_all_have_reported_enough_steps() -> None:
    found = Stragglers()
    report(found, {0: 0.2, 1: 0.9, 4: 0.3}, WINDOW - 1)
    assert found.judge([0, 1, 4]) is None
    report(found, {0: 0.2, 1: 0.9}, 1)
    assert found.judge([0, 1, 4]) is None
    report(found, {4: 0.3}, 1)
    straggler = found.judge([0, 1, 4])
    assert straggler == Straggler(1, 0.9, 0.25)
    assert straggler.factor == pytest.approx(3.6)
    assert found.judge([0, 1, 4]) is None, "the next steps are judged apart"
    report(found, {0: 0.2, 1: 0.2, 4: 0.2})
    assert found.judge([0, 1, 4]) is None


def test_few_long_steps_short_ones_and_a_worker_alone_are_none() -> None:
    for reports in (
        [({0: 0.2, 1: 0.2}, WINDOW - 5), ({0: 0.2, 1: 30.0}, 5)],
        [({0: 0.0005, 1: 0.005}, WINDOW)],
        [({0: 0.2}, WINDOW)],
    ):
        found = Stragglers()
        for seconds, steps in reports:
            report(found, seconds, steps)
        assert found.judge(list(reports[0][0])) is None, reports


def test_waiting_for_rows_counts_and_waiting_for_others_does_not() -> None:
    found = Stragglers()
    for _ in range(WINDOW):
        found.step(0, 0, {"input_s": 0.5, "compute_s": 0.1, "rows": 1})
        found.step(1, 0, {"input_s": 0.0, "compute_s": 0.1, "rows": 1, "wait_s": 0.5, "exchange_s": 0.5})
    straggler = found.judge([0, 1])
    assert straggler is not None
    assert straggler.worker_id == 0


def test_with_other_members_it_begins_anew() -> None:
    """Whoever is left has more rows, and a late report of the generation before does not count."""
    found = Stragglers()
    report(found, {0: 0.2, 1: 0.9, 2: 0.2}, WINDOW - 1)
    report(found, {0: 0.3, 1: 0.3}, 1, generation=1)
    report(found, {1: 90.0}, WINDOW, generation=0)
    assert found.judge([0, 1]) is None
    report(found, {0: 0.3, 1: 0.3}, WINDOW - 1, generation=1)
    assert found.judge([0, 1]) is None
    report(found, {0: 0.3, 1: 1.3}, WINDOW, generation=1)
    assert found.judge([0, 1]) == Straggler(1, 1.3, 0.3)


def test_what_is_none_does_not_count() -> None:
    """Values of no meaning, and steps without rows."""
    for values in (
        {},
        {"input_s": "long", "compute_s": 1.0, "rows": 1},
        {"input_s": math.nan, "compute_s": 1.0, "rows": 1},
        {"input_s": 0.0, "compute_s": 0.0, "rows": 0},
    ):
        found = Stragglers()
        for _ in range(WINDOW):
            found.step(0, 0, values)
        report(found, {1: 0.1})
        assert found.judge([0, 1]) is None, values
