"""Advice about exchange: periods, codecs and servers, with hand-computed predictions."""

from typing import Any

import pytest
from measured_runs import measured

from manyhands.evidence.advise import Advice, RunMeasurements, advise, all_advice


def output(run: RunMeasurements, kind: str) -> Advice | None:
    return next((one for one in all_advice(run) if one.kind == kind), None)


@pytest.mark.parametrize(
    ("exchange", "compute", "more", "says"),
    [
        (0.25, 0.75, {}, "(25 ms a step). --strategy local-sgd:period=3,optimizer_state=kept is about 1.2x as fast"),
        (0.4, 0.6, {}, "--strategy local-sgd:period=6,optimizer_state=kept is about 1.5x as fast"),
        (0.4, 0.6, {"steps": 10}, "10 steps can bear about 3, so it may cost accuracy."),
        (4.0, 6.0, {"steps": 100}, "period=6,optimizer_state=kept is about 1.5x as fast; compare its accuracy."),
        (0.76, 0.24, {}, "period=29,"),
        (
            0.77,
            0.23,
            {"steps": 23},
            "--strategy diloco:period=31 is about 3.9x as fast; that is 1 round, and few may",
        ),
        (77.0, 23.0, {"steps": 700}, "that is 23 rounds, and few may cost accuracy."),
        (0.4, 0.6, {"epoch_steps": 4}, "local-sgd:period=4,optimizer_state=kept is about 1.4x as fast"),
        (
            0.4,
            0.6,
            {"strategy": "local-sgd:period=4", "period": 4.0},
            "Raising period from 4 to 24 is about 1.5x as fast",
        ),
        (0.4, 0.6, {"strategy": "agn", "server": True, "period": 4.0}, "Raising window from 4 to 24"),
        (0.4, 0.6, {"strategy": "downpour", "server": True}, "Raising push_every and pull_every from 1 to 6"),
        (0.4, 0.6, {"strategy": "downpour", "server": True}, "windows add up, so lower the rate as well."),
        (0.4, 0.6, {"strategy": "quorum", "server": True}, "--strategy local-sgd:period=6"),
        (0.4, 0.6, {"strategy": "local-sgd:period=end", "period": 10.0, "epoch_steps": 10}, "as rare as can be"),
    ],
)
def test_the_smallest_period_that_leaves_a_tenth(
    exchange: float, compute: float, more: dict[str, Any], says: str
) -> None:
    advice = output(measured(exchange=exchange, compute=compute, **more), "exchange-bound")
    assert advice is not None
    assert says in advice.text


def test_below_a_quarter_of_the_time_no_period_is_proposed() -> None:
    assert output(measured(exchange=0.24, compute=0.76), "exchange-bound") is None
    assert output(measured(exchange=0.25, compute=0.75), "exchange-bound") is not None
    assert output(measured(exchange=0.25, compute=0.75, workers=1), "exchange-bound") is None


def test_the_prediction_is_what_the_slow_link_gave() -> None:
    """docs/benchmarks.md: allreduce 1.869 s a step, 0.1345 s of them computing; diloco:period=50 0.1668 s, so 11.2 times as fast."""
    advice = output(measured(exchange=17.346, compute=1.345, period=1.0), "exchange-bound")
    assert advice is not None
    assert advice.numbers["period"] == 117  # 9 · 1.7346 / 0.1345 = 116.07
    assert advice.numbers["speedup"] == pytest.approx(1.8691 / (0.1345 + 1.7346 / 117))
    at_50 = measured(exchange=17.346, compute=1.345, period=1.0, epoch_steps=50)
    assert output(at_50, "exchange-bound").numbers["speedup"] == pytest.approx(11.2, rel=0.02)  # type: ignore[union-attr]


LINK: dict[str, Any] = {"workers": 4, "steps": 10, "parameters": 3_250_000, "compute": 1.345, "exchange": 17.346}


def test_a_codec_on_a_slow_link_with_the_benchmarks_numbers() -> None:
    """3.25 M numbers, 19.5 MB a step and worker at 11.2 MB/s: the measured rows/s of powersgd:2 were 8.5 times allreduce's, of bf16 1.67."""
    advice = output(measured(**LINK, sent_bytes=195e6), "compress")
    assert advice is not None
    assert advice.text == (
        "slow link: it carries 11.2 MB/s. --strategy allreduce:compress=powersgd:2 is about 8.5x as fast; "
        "bf16, which only rounds, 1.7x."
    )
    round_s = 1.7346 * 0.015 + 3_250_000 * 18e-9
    assert advice.numbers["speedup"] == pytest.approx(18.691 / (1.345 + 10 * round_s))
    assert advice.wins == pytest.approx(1 - 1 / advice.numbers["speedup"])


@pytest.mark.parametrize(
    "change",
    [
        {"exchange": 0.01},  # 20 GB/s
        {"sent_bytes": 9.9e6},  # less than 1 MB a round
        {"parameters": 0},
        {"strategy": "local-sgd", "period": 8.0},
        {"strategy": "allreduce:overlap=true"},
        {"strategy": "diloco:streaming=4", "period": 4.0},
        {"strategy": "allreduce:compress=int8"},
        {"compute": 0.05},  # too short a step
        {"compute": 200.0},  # exchange hardly counts
    ],
)
def test_no_codec_where_none_helps_or_none_is_taken(change: dict[str, Any]) -> None:
    assert output(measured(**LINK, sent_bytes=195e6), "compress") is not None
    assert output(measured(**{**LINK, "sent_bytes": 195e6, **change}), "compress") is None


def test_a_codec_is_proposed_from_a_tenth_faster_on() -> None:
    """Of 1 M numbers between two workers topk:0.01 sends 0.02 and computes 81 ms a round; of 4 s a tenth faster is 0.364 s less."""
    run: dict[str, Any] = {
        "workers": 2,
        "steps": 10,
        "parameters": 1_000_000,
        "shapes": [(1_000_000,)],
        "sent_bytes": 4e7,
    }
    least = (4 * (1 - 1 / 1.1) + 0.81) / 0.98
    advice = output(measured(**run, exchange=least + 0.001, compute=4 - least - 0.001), "compress")
    assert advice is not None
    assert advice.numbers["codec"] == "topk:0.01"
    assert output(measured(**run, exchange=least - 0.001, compute=4 - least + 0.001), "compress") is None


def test_among_many_workers_bf16_may_be_the_best_alone() -> None:
    """topk goes to all 63 others, 0.64 of the bytes; a vector is no matrix; 5 - 0.37 s of 11 are won."""
    run: dict[str, Any] = {"workers": 64, "parameters": 1_000_000, "shapes": [(1_000_000,)], "sent_bytes": 1e8}
    advice = output(measured(**run, exchange=10.0, compute=1.0), "compress")
    assert advice is not None
    assert advice.text == "slow link: it carries 10 MB/s. --strategy allreduce:compress=bf16 is about 1.7x as fast."


def test_pulls_of_a_server_are_not_compressed() -> None:
    advice = output(measured(**LINK, sent_bytes=260e6, strategy="agn:window=1", server=True), "compress")
    assert advice is not None
    assert "--strategy agn:window=1,compress=powersgd:2" in advice.text
    round_s = 1.7346 * (1 + 0.015) / 2 + 3_250_000 * 18e-9
    assert advice.numbers["speedup"] == pytest.approx(18.691 / (1.345 + 10 * round_s))


def test_a_codec_between_processes_of_one_host_costs() -> None:
    """1 M numbers, 2 workers: 4 MB a round whole, at 1 ms and 1 GB/s 5 ms."""
    run: dict[str, Any] = {"strategy": "allreduce:compress=topk:0.01", "parameters": 1_000_000, "one_host": True}
    advice = output(measured(**run, compute=0.5, exchange=0.5), "codec-costs")
    assert advice is not None
    assert advice.numbers["speedup"] == pytest.approx(1 / (0.5 + 10 * 0.005))
    assert "leave compress=topk:0.01 out, about 1.8x as fast." in advice.text
    assert output(measured(**run, compute=1.0, exchange=0.149), "codec-costs") is None  # 1.149 / 1.05 = 1.094
    assert output(measured(**run, compute=1.0, exchange=0.156), "codec-costs") is not None
    assert output(measured(**{**run, "one_host": False}, compute=0.5, exchange=0.5), "codec-costs") is None
    assert output(measured(**{**run, "strategy": "allreduce"}, compute=0.5, exchange=0.5), "codec-costs") is None


def test_a_server_that_nobody_needs() -> None:
    """1 M numbers, 2 workers: all-reduce at 5 ms a step, and 5 % of computing for waiting."""
    run: dict[str, Any] = {"strategy": "downpour", "server": True, "parameters": 1_000_000, "one_host": True}
    advice = output(measured(**run, compute=0.5, exchange=0.3, wait=0.2), "server-costs")
    assert advice is not None
    assert advice.numbers["speedup"] == pytest.approx(1 / (0.5 + 0.05 + 0.025))
    assert "costs 50 % of the time" in advice.text
    assert "--strategy allreduce is about 1.7x as fast." in advice.text
    for silent in (
        {"compute_of_workers_s": [1.0, 1.3]},
        {"one_host": False},
        {"server": False},
        {"strategy": "downpour:compress=bf16"},
    ):
        assert output(measured(**{**run, **silent}, compute=0.5, exchange=0.3, wait=0.2), "server-costs") is None
    assert output(measured(**run, compute=1.0, exchange=0.2), "server-costs") is None  # 1.2 / 1.1 = 1.09
    assert output(measured(**run, compute=1.0, exchange=0.22), "server-costs") is not None


def test_exchange_speaks_before_what_wins_less() -> None:
    assert advise(measured(compute=0.5, exchange=0.35, wait=0.15)).kind == "exchange-bound"
    assert advise(measured(compute=0.4, exchange=0.26, wait=0.34)).kind == "stragglers"
