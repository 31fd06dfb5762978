"""What the rules of advice see of a comparison."""

from dataclasses import replace

import pytest
from by_numbers import found

from manyhands.evidence.advise import advise_comparison
from manyhands.evidence.compare.comparison import Target
from manyhands.evidence.compare.verdict import compared

AIM = Target(metric="test_accuracy", value=0.97, higher=True)


def test_contestants_are_the_middle_of_their_repeats() -> None:
    made = found(
        {"solo, 1 thread": [50.0] * 3, "solo, 2 threads": [100.0] * 3, "downpour on 2": [150.0, 160.0, 170.0], "easgd on 2": [None] * 3},
        {"downpour on 2": [0.5] * 3},
        failures={"easgd on 2": "it broke"},
    )  # fmt: skip
    seen = compared(made)
    assert [one.name for one in seen.contestants] == ["solo, 1 thread", "solo, 2 threads", "downpour on 2"]
    assert (seen.reference, seen.metric, seen.speed_of) == ("solo, 2 threads", "test_accuracy", "rows/s")
    assert seen.base.speed is None
    assert seen.base.quality == ""
    (own,) = seen.several
    assert own.speed is not None
    assert own.speed.middle == pytest.approx((1.5 * 1.6 * 1.7) ** (1 / 3))
    assert (own.speed.outcome, own.quality) == ("better", "worse")
    measured = own.measured
    assert (measured.workers, measured.threads_per_worker, measured.strategy, measured.steps) == (2, 1, "downpour", 10)
    seconds = (measured.input_s, measured.compute_s, measured.exchange_s, measured.wait_s)
    assert seconds == pytest.approx((0.1, 0.6, 0.2, 0.1))
    assert measured.sent_bytes == 2_500_000
    assert measured.staleness == {0: 9, 2: 21}
    assert measured.rows_per_step == 50
    assert measured.one_host
    assert list(measured.compute_of_workers_s) == pytest.approx([0.6, 0.6])


@pytest.mark.parametrize(
    ("input", "remedy"),
    [
        ({"hits": 0, "misses": 0, "stored_bytes": 3e9}, 'shards(…, cache="12.0GB")'),
        ({"hits": 90, "misses": 10, "stored_bytes": 3e9}, "The cache has the blocks already"),
        ({}, "--loader-processes"),
    ],
)
def test_the_best_that_waits_for_files_is_told_what_would_help(input: dict[str, float], remedy: str) -> None:
    made = found({"solo, 1 thread": [50.0] * 3, "solo, 2 threads": [100.0] * 3, "gossip on 2": [150.0] * 3})
    times = ({"input": 0.6, "compute": 0.4, "exchange": 0.0, "wait": 0.0},) * 2
    trials = tuple(replace(one, timing=times, input=input) if "gossip" in one.variant else one for one in made.trials)
    seen = compared(replace(made, trials=trials))
    assert seen.several[0].measured.input == input
    (advice,) = (one for one in advise_comparison(seen) if one.kind == "input-bound")
    assert advice.text.startswith("gossip on 2: input-bound: 60 % of the time waits for rows")
    assert remedy in advice.text


def test_with_a_target_the_speed_is_of_the_time_to_it_turned_over() -> None:
    made = found(
        {"solo, 1 thread": [100.0] * 3, "solo, 2 threads": [100.0] * 3, "gossip on 2": [100.0] * 3, "agn on 2": [9.0] * 3},
        {},
        {"solo, 1 thread": [1.0] * 3, "solo, 2 threads": [4.0] * 3, "gossip on 2": [0.5] * 3, "agn on 2": [None] * 3},
        target=AIM,
    )  # fmt: skip
    seen = compared(made)
    assert seen.speed_of == "time to test_accuracy ≥ 0.97"
    assert seen.reference == "solo, 1 thread"  # it is surely faster than with two, so it is the one to beat
    speeds = {one.name: one.speed for one in seen.contestants}
    own = speeds["gossip on 2"]
    assert own is not None
    assert (own.middle, own.low, own.high, own.outcome) == (
        pytest.approx(2),
        pytest.approx(2),
        pytest.approx(2),
        "better",
    )
    assert speeds["agn on 2"] is None
    assert (made.decision, made.best) == ("distribute", "gossip on 2")
