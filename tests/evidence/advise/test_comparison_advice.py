"""A comparison's decision, what the best strategy still loses, and why a strategy is worse than one process."""

import re
from dataclasses import replace
from typing import Any

import pytest
from measured_runs import compared, contestant, measured, reads_well, solo

from manyhands.evidence.advise import Advice, Contestant, Decision, advise_comparison, largest_loss
from manyhands.evidence.advise.worse_metric import explain
from manyhands.server.staleness import limit


def allreduce(speed: float | None, workers: int = 2, **more: Any) -> Contestant:
    """A tenth of its time is exchange."""
    of = measured(**{"compute": 9.0, "exchange": 1.0, "workers": workers, "cores": 8, **more.pop("measured", {})})
    return contestant(f"allreduce on {workers}", of, speed, **more)


def decision(*contestants: Contestant, **more: Any) -> Decision:
    return compared(solo(), *contestants, **more).decision


def named(kind: str, *contestants: Contestant, **more: Any) -> Advice | None:
    return next((one for one in advise_comparison(compared(*contestants, **more)) if one.kind == kind), None)


def test_stay_where_nothing_is_faster_and_say_why() -> None:
    def lost(**more: Any) -> str:
        found = compared(solo(), allreduce(1.0, outcome="same", measured=more))
        assert (found.decision.kind, found.decision.why) == ("stay", "slower")
        return largest_loss(found)

    assert lost() == ""
    assert lost(steps=2000) == " Its steps compute 4.5 ms, and under 10 ms sharing rarely pays."
    for part, word in (("exchange", "exchange"), ("wait", "waiting"), ("input", "input")):
        assert lost(**{"compute": 8.5, "exchange": 0.0, part: 1.5}) == f" 15 % of its time is {word}."
    assert lost(one_host=True) == " One process already uses the same cores."


def test_what_is_not_sure_is_not_decided_and_beside_a_reference_that_varies_the_upper_end_counts() -> None:
    assert decision(allreduce(2.0, quality="worse"), speed_of="time to test_accuracy ≥ 0.97").kind == "distribute"
    near = allreduce(1.05, outcome="unclear")
    assert decision(near).kind == "stay"
    assert compared(replace(solo(), varies=1.6), near).decision.kind == "undecided"
    wide = allreduce(1.15, outcome="unclear")
    assert decision(wide, margin=0.2).kind == "stay"
    assert decision(wide).kind == "undecided"


def test_what_the_best_still_loses_is_said_unless_it_was_tried() -> None:
    lossy = allreduce(1.5, measured={"compute": 6.0, "exchange": 4.0})
    advice = named("exchange-bound", solo(), lossy)
    assert advice.text.startswith("allreduce on 2: exchange-bound: 40 %")
    assert advice.numbers["period"] == 6

    def local_sgd(period: float, workers: int = 2) -> Contestant:
        spec = {"strategy": f"local-sgd:period={period:.0f}", "period": period, "workers": workers}
        return contestant("local-sgd", measured(compute=6.0, exchange=1.0, **spec), 1.4)

    assert named("exchange-bound", solo(), lossy, local_sgd(8.0)) is None
    for other in (local_sgd(4.0), local_sgd(8.0, workers=4)):
        assert named("exchange-bound", solo(), lossy, other) is not None


def test_compression_is_judged_by_what_was_measured() -> None:
    coded = measured(compute=9.0, exchange=1.0, strategy="allreduce:compress=powersgd:2")
    helps = named("compress", solo(), allreduce(0.5), contestant("allreduce:compress=powersgd:2 on 2", coded, 1.5))
    assert "compress=powersgd:2 on 2 is 3.00×" in helps.text
    costs = named("codec-costs", solo(), allreduce(1.5), contestant("coded on 2", coded, 1.0))
    assert "allreduce on 2 is 1.50× as fast as coded on 2" in costs.text
    for near in (1.4, 1.5, 1.7):  # the intervals of 1.5 and these meet
        found = advise_comparison(compared(solo(), allreduce(1.5), contestant("coded", coded, near)))
        assert not {"compress", "codec-costs"} & {one.kind for one in found}
    elsewhere = contestant("coded on 4", replace(coded, workers=4), 3.0)
    assert named("compress", solo(), allreduce(1.5), elsewhere) is None
    link: dict[str, Any] = {"parameters": 3_250_000, "sent_bytes": 195e6, "compute": 1.345, "exchange": 17.346}
    slow = allreduce(0.2, workers=4, measured=link)
    assert named("compress", solo(), slow) is not None
    coded = measured(**{**link, "exchange": 3.0}, workers=4, strategy="allreduce:compress=bf16")
    assert named("compress", solo(), slow, contestant("coded", coded, 0.19)) is None


def test_threads_or_processes_of_as_many_cores() -> None:
    here = {"one_host": True}
    single = contestant("solo, 1 thread", measured(compute=10.0, workers=1, strategy="solo"), 0.8)
    better = named("processes", solo(), single, allreduce(1.3, measured=here))
    assert re.search("allreduce on 2 is 1.30× as fast as solo, .* 1.25×", better.text)
    worse = named("threads-win", solo(), allreduce(0.5, measured=here))
    assert "solo is 2.00× as fast as allreduce on 2" in worse.text
    for silent in (allreduce(1.0, measured=here), allreduce(1.3), allreduce(1.3, workers=4, measured=here)):
        assert named("processes", solo(), silent) is None
        assert named("threads-win", solo(), silent) is None
    assert named("processes", solo(threads=1), allreduce(1.3, measured={**here, "workers": 1})) is None


def cause(
    strategy: str = "allreduce", *, effective_rate: float | None = None, batch_size: int = 64, **more: Any
) -> Advice | None:
    """Of a contestant on four workers at rate 0.1, beside solo with batches of 64 rows at rate 0.1."""
    of = measured(**{"compute": 9.0, "workers": 4, "strategy": strategy, "rate": 0.1, "steps": 700, **more})
    one = contestant("it", of, 2.0, quality="worse", effective_rate=effective_rate, batch_size=batch_size)
    return explain(one, solo(rate=0.1))


OUTER: dict[str, Any] = {"strategy": "diloco:period=50", "period": 50.0}
CAUSES: list[tuple[str, str, dict[str, Any]]] = [
    ("unused-rows", "11 % .* fewer backups", {"strategy": "quorum", "unused": 0.11}),
    ("unequal", "manyhands check", {"strategy": "quorum", "unused": 0.10}),
    ("batch", "4x as large.* 0.25x .* 1x the rate.* --batch-size 64, or 4x", {"batch_size": 256}),
    ("batch", "at 1.9x the rate", {"batch_size": 256, "rate": 0.19}),
    ("critical-batch", "2.1x the rate", {"batch_size": 256, "rate": 0.21}),
    ("batch", "its batch is 1.5x", {"batch_size": 96}),
    ("unequal", "", {"batch_size": 95}),
    (
        "rate-too-high",
        "4x .* 3 versions .* to 0.022",
        {"strategy": "downpour", "effective_rate": 0.4, "staleness": {3: 9}},
    ),
    ("rate-too-high", "1.5x as far. .* 0.1 to 0.066", {"effective_rate": 0.151}),
    ("unequal", "", {"effective_rate": 0.14}),
    ("rate-too-high", "7x .* 14 rounds .*: outer_rate=0.7,outer_momentum=0.5", OUTER | {"effective_rate": 0.7}),
    ("behind", "use window=1, or train longer", {"strategy": "agn", "period": 4.0}),
    ("behind", "use downpour, or train longer", {"strategy": "dynsgd"}),
    ("behind", "train longer, or use", {"strategy": "easgd", "server": True, "period": 4.0}),
    ("behind", "train longer.$", {"strategy": "easgd", "server": True}),
    ("behind", "short runs", {"strategy": "eamsgd", "server": True, "effective_rate": 0.2}),
    ("rate-too-low", "0.5x as far .* rate to 0.2", {"effective_rate": 0.05}),
    ("unequal", "", {"effective_rate": 0.07}),
    ("late", "22 % .* to 0.022", {"strategy": "mine.py:Own", "staleness": {3: 9}}),
    ("codec-loses", "compress=topk:0.01", {"strategy": "allreduce:compress=topk:0.01"}),
    ("unequal", "", {"strategy": "allreduce:compress=bf16"}),
    ("drift", "50 steps, .* 700 .* 26: .* every 25 steps", {"strategy": "local-sgd:period=50", "period": 50.0}),
    ("drift", "8 steps: .* every 4 steps", {"strategy": "local-sgd", "period": 8.0}),
    ("drift", "2 steps: .* every 1 step", {"strategy": "local-sgd:period=2", "period": 2.0}),
]


def test_each_cause_at_its_threshold_and_none_is_made_up() -> None:
    for kind, says, facts in CAUSES:
        advice = cause(**facts)
        assert (advice.kind, advice.numbers["name"]) == (kind, "it"), facts
        assert re.search(f"^it is worse: .*{says}", advice.text), (says, advice.text)
        reads_well(advice.text, 240)
    assert cause("local-sgd", period=1.0) is None
    assert cause("gossip") is None
    assert cause("agn:window=1") is None


def test_a_late_rate_is_lowered_by_whichever_asks_for_more_and_sure_causes_go_first() -> None:
    late = cause("downpour", effective_rate=0.4, staleness={3: 9})
    assert late.numbers["rate"] == pytest.approx(0.1 * limit(3) / 2)
    assert cause("downpour", effective_rate=0.4).numbers["rate"] == pytest.approx(0.1 / 4)
    everything: dict[str, Any] = {"staleness": {3: 9}, "period": 50.0, "strategy": "downpour:compress=onebit"}
    changes: tuple[dict[str, Any], ...] = ({"unused": 0.5}, {"batch_size": 256}, {"effective_rate": 0.4}, {})
    order = [cause(**{**everything, **change}).kind for change in (*changes, {"staleness": {}})]
    assert order == ["unused-rows", "batch", "rate-too-high", "late", "codec-loses"]
