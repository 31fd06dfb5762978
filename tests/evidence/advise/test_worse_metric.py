"""Why a strategy is worse than one process: each cause on planted numbers, and silent just beyond its threshold."""

import re
from typing import Any

import pytest
from measured_runs import contestant, measured, solo

from manyhands.evidence.advise import Advice
from manyhands.evidence.advise.worse_metric import explain
from manyhands.server.staleness import limit


def cause(
    strategy: str = "allreduce", *, effective_rate: float | None = None, batch_size: int = 64, **more: Any
) -> Advice | None:
    """Of a contestant on four workers at rate 0.1, beside solo with batches of 64 rows at rate 0.1."""
    of = measured(**{"compute": 9.0, "workers": 4, "strategy": strategy, "rate": 0.1, "steps": 700, **more})
    one = contestant("it", of, 2.0, quality="worse", effective_rate=effective_rate, batch_size=batch_size)
    return explain(one, solo(rate=0.1))


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
        "4x as far, .* 3 versions late. .* from 0.1 to 0.022",
        {"strategy": "downpour", "effective_rate": 0.4, "staleness": {3: 9}},
    ),
    ("rate-too-high", "1.5x as far. .* 0.1 to 0.066", {"effective_rate": 0.151}),
    ("unequal", "", {"effective_rate": 0.14}),
    (
        "rate-too-high",
        "outer .* 7x .* 14 rounds .*: outer_rate=0.7,outer_momentum=0.5",
        {"strategy": "diloco:period=50", "effective_rate": 0.7, "period": 50.0},
    ),
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
    for kind, says, given in CAUSES:
        advice = cause(**given)
        assert (advice.kind, advice.numbers["name"]) == (kind, "it"), given
        assert re.search(f"^it is worse: .*{says}", advice.text), (says, advice.text)
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
