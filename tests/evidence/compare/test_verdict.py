"""The one sentence, in each case that there is."""

import pytest
from by_numbers import SOLOS, Numbers, found

from manyhands.evidence.compare.comparison import Target

ONE, TWO = SOLOS
AIM = Target(metric="test_accuracy", value=0.97, higher=True)
SLOW: dict[str, Numbers] = {ONE: [55.0, 54.0, 56.0], TWO: [100.0, 101.0, 99.0]}


def rates(**more: Numbers) -> dict[str, Numbers]:
    """Solo's, and those of `strategy_2` on 2 workers."""
    return {**SLOW, **{name.replace("_", " on "): given for name, given in more.items()}}


def test_a_faster_one_that_is_as_good_is_taken() -> None:
    metrics: dict[str, Numbers] = {TWO: [0.982, 0.981, 0.983], "gossip on 2": [0.95, 0.981, 0.99]}
    comparison = found(rates(gossip_2=[160.0, 165.0, 162.0], allreduce_2=[101.0, 99.0, 100.0]), metrics)
    assert comparison.verdict.startswith("Take gossip on 2: 1.62× as fast as solo with 2 threads (1.5")
    assert comparison.verdict.endswith("×), and no difference seen in test_accuracy (0.9737 and 0.9820).")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([0.981, 0.982, 0.983], "and the same test_accuracy within 1 % (0.9820 and 0.9800)."),
        ([0.999, 0.998, 0.997], "and better in test_accuracy (0.9980 and 0.9800)."),
    ],
)
def test_what_is_said_of_its_metric(own: Numbers, words: str) -> None:
    assert found(rates(gossip_2=[160.0] * 3), {"gossip on 2": own}).verdict.endswith(words)


def test_the_fastest_is_taken_of_several() -> None:
    comparison = found(rates(gossip_2=[150.0] * 3, allreduce_2=[180.0] * 3))
    assert comparison.verdict.startswith("Take allreduce on 2: 1.8")


def test_where_none_is_faster_the_nearest_is_named() -> None:
    comparison = found(rates(allreduce_2=[97.0, 98.0, 96.0], gossip_2=[80.0] * 3, hogwild_2=[103.0, 90.0, 85.0]))
    assert comparison.verdict == (
        "Stay with one process: of 3 others none was significantly faster than solo with 2 threads by more than 5 %; "
        "the nearest is allreduce on 2, 0.97×. 20 % of its time is exchange."
    )


def test_a_nearest_one_that_may_be_faster_comes_with_its_interval() -> None:
    comparison = found(rates(allreduce_2=[120.0, 95.0, 110.0]))
    assert "of 1 other none was significantly faster" in comparison.verdict
    assert "; the nearest is allreduce on 2, 1.08× (0.7" in comparison.verdict


def test_one_that_is_seen_to_be_worth_it_and_may_not_be_is_not_decided() -> None:
    comparison = found(rates(allreduce_2=[130.0, 95.0, 120.0]))
    assert comparison.verdict.startswith(
        "Not decided: allreduce on 2 is 1.14× as fast as solo with 2 threads (0.75× to "
    )
    assert comparison.verdict.endswith("more repeats may tell.")
    assert comparison.decision == "undecided"


def test_a_reference_that_varies_by_half_is_said_and_nothing_is_decided_against_it() -> None:
    noisy = {TWO: [131.0, 206.0, 240.0], "gossip on 2": [190.0, 131.0, 270.0]}
    comparison = found(noisy)
    assert comparison.verdict.startswith("Not decided: gossip on 2 is 1.01×")
    assert "Solo with 2 threads itself varies from 131 to 240 rows/s" in comparison.verdict
    assert "idle machine" in comparison.verdict
    quiet = found(noisy | {TWO: [200.0, 206.0, 240.0]})
    assert "varies" not in quiet.verdict
    beaten = found({ONE: [3000.0] * 3, TWO: [118.0, 200.0, 99.0], "gossip on 2": [190.0] * 3})
    assert "Solo with 2 threads itself varies from 99 to 200 rows/s" in beaten.verdict
    to_target = found(noisy, {}, {TWO: [4.0, 6.0, 3.0], "gossip on 2": [3.0] * 3}, target=AIM)
    assert "itself varies from 3 to 6 s to test_accuracy ≥ 0.97" in to_target.verdict
    virtual = found({"solo": noisy[TWO], "gossip on 2": [90.0] * 3}, simulated={"seed": "0"})
    assert virtual.verdict.endswith("with more --repeats.")


def test_a_target_that_one_process_reached_now_and_then_decides_nothing() -> None:
    targets: dict[str, Numbers] = {TWO: [10.0, None, 10.0], "gossip on 2": [5.0] * 3}
    comparison = found({TWO: [100.0] * 3, "gossip on 2": [200.0] * 3}, {}, targets, target=AIM)
    assert "did not reach test_accuracy ≥ 0.97 in 1 of 3 repeats" in comparison.verdict
    assert comparison.decision == "undecided"


def test_one_thread_that_alone_reaches_the_target_is_still_one_process() -> None:
    never: Numbers = [None] * 3
    targets = {ONE: [9.0] * 3, TWO: never, "gossip on 2": never}
    comparison = found(rates(gossip_2=[200.0] * 3), {}, targets, target=AIM)
    assert comparison.verdict.startswith("Stay with one process, solo, 1 thread: it reached")
    assert comparison.decision == "stay"


def test_a_faster_one_that_loses_is_named_and_not_recommended() -> None:
    comparison = found(
        rates(downpour_2=[160.0] * 3, gossip_2=[90.0] * 3), {"downpour on 2": [0.91, 0.90, 0.92], TWO: [0.98] * 3}
    )
    assert comparison.verdict == (
        "Stay with one process: downpour on 2 is 1.60× as fast as solo with 2 threads, but worse in test_accuracy (0.9100 and 0.9800), and "
        "of the other 1 none was significantly faster than solo with 2 threads by more than 5 %; the nearest is gossip on 2, 0.90×. 20 % of its time is exchange."
    )


def test_beside_the_one_to_take_a_faster_one_that_loses_is_named() -> None:
    metrics: dict[str, Numbers] = {"downpour on 2": [0.91, 0.90, 0.92]}
    comparison = found(rates(downpour_2=[160.0] * 3, gossip_2=[120.0] * 3), metrics)
    assert comparison.verdict.startswith("Take gossip on 2: 1.20×")
    assert comparison.verdict.endswith(
        "; downpour on 2 is faster still, 1.60×, but worse in test_accuracy (0.9100 and 0.9800)."
    )


def test_one_process_is_taken_with_the_threads_that_are_better() -> None:
    comparison = found({ONE: [200.0] * 3, TWO: [100.0] * 3, "allreduce on 2": [150.0] * 3})
    assert comparison.verdict == (
        "Stay with one process, with 1 thread: of 1 other none was significantly faster than solo with 1 thread by more than 5 %; "
        "the nearest is allreduce on 2, 0.75×. 20 % of its time is exchange."
    )


def test_with_a_target_the_time_to_it_decides() -> None:
    targets: dict[str, Numbers] = {
        ONE: [20.0] * 3,
        TWO: [10.0] * 3,
        "gossip on 2": [12.0] * 3,
        "downpour on 2": [5.0] * 3,
    }
    many = rates(gossip_2=[200.0] * 3, downpour_2=[90.0] * 3)
    comparison = found(many, {"downpour on 2": [0.971] * 3}, targets, target=AIM)
    assert comparison.verdict == (
        "Take downpour on 2: 2.00× as fast to test_accuracy ≥ 0.97 as solo with 2 threads, and the same "
        "test_accuracy within 1 % (0.9710 and 0.9800)."
    )
    slower = found(many, {}, {**targets, "downpour on 2": [10.0] * 3}, target=AIM)
    assert "faster to test_accuracy ≥ 0.97 than solo with 2 threads" in slower.verdict
    assert "the nearest is downpour on 2, 1.00×." in slower.verdict


def test_a_target_that_one_process_never_reaches() -> None:
    never: Numbers = [None] * 3
    targets: dict[str, Numbers] = {
        ONE: never,
        TWO: never,
        "gossip on 2": [12.0, 13.0, 14.0],
        "easgd on 2": [9.0, None, 9.0],
    }
    some = found(rates(gossip_2=[90.0] * 3, easgd_2=[90.0] * 3), {}, targets, target=AIM)
    assert some.verdict == (
        "Take gossip on 2: it reached test_accuracy ≥ 0.97 in all 3 repeats, in 13 s, and solo with 2 threads in none."
    )
    none = found(rates(gossip_2=[90.0] * 3), {}, {**targets, "gossip on 2": never}, target=AIM)
    assert none.verdict.startswith("Not decided: solo with 2 threads did not reach test_accuracy ≥ 0.97")


def test_a_target_that_a_faster_one_missed_once_does_not_make_it_better() -> None:
    targets: dict[str, Numbers] = {ONE: [20.0] * 3, TWO: [10.0] * 3, "gossip on 2": [2.0, None, 2.0]}
    comparison = found(rates(gossip_2=[200.0] * 3), {}, targets, target=AIM)
    assert "the nearest is gossip on 2, not there in 1 of 3 repeats." in comparison.verdict
    never = found(rates(gossip_2=[200.0] * 3), {}, {**targets, "gossip on 2": [None] * 3}, target=AIM)
    assert "the nearest is gossip on 2, which it never reached." in never.verdict


@pytest.mark.parametrize(("repeats", "words"), [(1, "1 repeat cannot"), (2, "2 repeats cannot")])
def test_too_few_repeats_decide_nothing(repeats: int, words: str) -> None:
    comparison = found({TWO: [100.0] * repeats, "gossip on 2": [200.0] * repeats})
    assert comparison.verdict == (
        f"Not decided: {words} tell a difference from chance, 3 can (fastest so far: gossip on 2, 2.00× solo with 2 threads)."
    )


def test_those_that_failed_are_counted() -> None:
    some = found(rates(gossip_2=[90.0] * 3, easgd_2=[None] * 3), failures={"easgd on 2": "it broke"})
    assert "of 2 others (1 failed) none was significantly" in some.verdict
    all_failed = found(rates(easgd_2=[None] * 3), failures={"easgd on 2": "it broke"})
    assert all_failed.verdict == "Stay with one process: easgd on 2 failed."


def test_solo_alone_is_told_as_it_is() -> None:
    assert found(SLOW).verdict.startswith("Nothing but one process was tried: solo with 1 thread is 0.55× as fast as")


def test_virtual_seconds_are_said_to_be_such() -> None:
    comparison = found({"solo": [100.0] * 3, "gossip on 2": [160.0] * 3}, simulated={"seed": "0"})
    assert comparison.verdict.startswith("On the simulated cluster: take gossip on 2: 1.60× as fast as solo")
