"""Advice about exchange: periods, codecs and servers, with hand-computed predictions."""

import re
from typing import Any

import pytest
import torch
from measured_runs import measured

from manyhands.comm.codecs import Hints, Matrix, codec_of
from manyhands.evidence.advise import Advice, RunMeasurements, all_advice
from manyhands.evidence.advise.exchange_advice import (
    CODECS,
    LOW_RANK,
    bearable_period,
    bytes_left,
    compressed_round_s,
    low_rank,
    period_for,
    share_won,
    speedup,
)


def output(run: RunMeasurements, kind: str) -> Advice | None:
    return next((one for one in all_advice(run) if one.kind == kind), None)


def test_the_smallest_period_that_leaves_a_tenth() -> None:
    served = {"server": True}
    for exchange, compute, more, says in (
        (0.25, 0.75, {}, r"\(25 ms a step\). --strategy local-sgd:period=3,optimizer_state=kept .* 1.2x"),
        (0.4, 0.6, {}, "local-sgd:period=6,optimizer_state=kept .* 1.5x"),
        (0.4, 0.6, {"steps": 10}, "10 steps .* about 3, .* cost accuracy"),
        (4.0, 6.0, {"steps": 100}, "period=6,.* 1.5x as fast; compare its accuracy"),
        (0.76, 0.24, {}, "period=29,"),
        (0.77, 0.23, {"steps": 23}, "diloco:period=31 .* 3.9x as fast; that is 1 round"),
        (77.0, 23.0, {"steps": 700}, "23 rounds"),
        (0.4, 0.6, {"epoch_steps": 4}, "local-sgd:period=4,.* 1.4x"),
        (0.4, 0.6, {"strategy": "local-sgd:period=4", "period": 4.0}, "Raising period from 4 to 24 .* 1.5x"),
        (0.4, 0.6, {"strategy": "agn", "period": 4.0, **served}, "Raising window from 4 to 24"),
        (0.4, 0.6, {"strategy": "downpour", **served}, "push_every and pull_every from 1 to 6.* lower the rate"),
        (0.4, 0.6, {"strategy": "quorum", **served}, "--strategy local-sgd:period=6"),
        (0.4, 0.6, {"strategy": "local-sgd:period=end", "period": 10.0, "epoch_steps": 10}, "as rare as can be"),
    ):
        advice = output(measured(exchange=exchange, compute=compute, **more), "exchange-bound")
        assert re.search(says, advice.text), (says, advice.text)
    assert output(measured(exchange=0.24, compute=0.76), "exchange-bound") is None  # below a quarter of the time
    assert output(measured(exchange=0.25, compute=0.75, workers=1), "exchange-bound") is None


LINK: dict[str, Any] = {"workers": 4, "steps": 10, "parameters": 3_250_000, "compute": 1.345, "exchange": 17.346}


def test_a_codec_on_a_slow_link_is_proposed_from_a_tenth_faster_on() -> None:
    """19.5 MB a step and worker at 11.2 MB/s: measured rows/s of powersgd:2 were 8.5 times allreduce's, of bf16 1.67."""
    advice = output(measured(**LINK, sent_bytes=195e6), "compress")
    assert re.search("11.2 MB/s.*allreduce:compress=powersgd:2 .* 8.5x .*; bf16, .* 1.7x", advice.text)
    round_s = 1.7346 * 0.015 + 3_250_000 * 18e-9
    assert advice.numbers["speedup"] == pytest.approx(18.691 / (1.345 + 10 * round_s))
    assert advice.wins == pytest.approx(1 - 1 / advice.numbers["speedup"])
    for change in (
        {"exchange": 0.01},  # 20 GB/s
        {"sent_bytes": 9.9e6},  # less than 1 MB a round
        {"parameters": 0},
        {"strategy": "local-sgd", "period": 8.0},
        {"strategy": "allreduce:overlap=true"},
        {"strategy": "diloco:streaming=4", "period": 4.0},
        {"strategy": "allreduce:compress=int8"},
        {"compute": 0.05},  # too short a step
        {"compute": 200.0},  # exchange hardly counts
    ):
        assert output(measured(**{**LINK, "sent_bytes": 195e6, **change}), "compress") is None, change
    served = output(measured(**LINK, sent_bytes=260e6, strategy="agn:window=1", server=True), "compress")
    assert "--strategy agn:window=1,compress=powersgd:2" in served.text
    round_s = 1.7346 * (1 + 0.015) / 2 + 3_250_000 * 18e-9  # pulls of a server are not compressed
    assert served.numbers["speedup"] == pytest.approx(18.691 / (1.345 + 10 * round_s))
    vector: dict[str, Any] = {"parameters": 1_000_000, "shapes": [(1_000_000,)]}
    run = {**vector, "workers": 2, "steps": 10, "sent_bytes": 4e7}
    least = (4 * (1 - 1 / 1.1) + 0.81) / 0.98
    advice = output(measured(**run, exchange=least + 0.001, compute=4 - least - 0.001), "compress")
    assert advice.numbers["codec"] == "topk:0.01"
    assert output(measured(**run, exchange=least - 0.001, compute=4 - least + 0.001), "compress") is None
    # topk goes to all 63 others, 0.64 of the bytes; a vector is no matrix; 5 - 0.37 s of 11 are won
    many = output(measured(**vector, workers=64, sent_bytes=1e8, exchange=10.0, compute=1.0), "compress")
    assert re.search("10 MB/s.*compress=bf16 is about 1.7x as fast.$", many.text)


def test_a_codec_and_a_server_cost_between_processes_of_one_host() -> None:
    """1 M numbers, 2 workers: 4 MB a round whole, at 1 ms and 1 GB/s 5 ms."""
    run: dict[str, Any] = {"strategy": "allreduce:compress=topk:0.01", "parameters": 1_000_000, "one_host": True}
    advice = output(measured(**run, compute=0.5, exchange=0.5), "codec-costs")
    assert advice.numbers["speedup"] == pytest.approx(1 / (0.5 + 10 * 0.005))
    assert re.search("leave compress=topk:0.01 out, .* 1.8x", advice.text)
    assert output(measured(**run, compute=1.0, exchange=0.149), "codec-costs") is None  # 1.149 / 1.05 = 1.094
    assert output(measured(**run, compute=1.0, exchange=0.156), "codec-costs") is not None
    assert output(measured(**{**run, "one_host": False}, compute=0.5, exchange=0.5), "codec-costs") is None
    assert output(measured(**{**run, "strategy": "allreduce"}, compute=0.5, exchange=0.5), "codec-costs") is None
    run: dict[str, Any] = {"strategy": "downpour", "server": True, "parameters": 1_000_000, "one_host": True}
    advice = output(measured(**run, compute=0.5, exchange=0.3, wait=0.2), "server-costs")
    assert advice.numbers["speedup"] == pytest.approx(1 / (0.5 + 0.05 + 0.025))
    assert re.search("50 % of the time.*--strategy allreduce .* 1.7x", advice.text)
    uneven, coded = {"compute_of_workers_s": [1.0, 1.3]}, {"strategy": "downpour:compress=bf16"}
    for silent in (uneven, coded, {"one_host": False}, {"server": False}):
        assert output(measured(**{**run, **silent}, compute=0.5, exchange=0.3, wait=0.2), "server-costs") is None
    assert output(measured(**run, compute=1.0, exchange=0.2), "server-costs") is None  # 1.2 / 1.1 = 1.09
    assert output(measured(**run, compute=1.0, exchange=0.22), "server-costs") is not None


# -- the arithmetic ---------------------------------------------------------------------------------------------------

BF16, POWERSGD, TOPK = CODECS


def test_speedup_is_amdahls_and_a_period_of_the_root_of_the_steps_is_borne() -> None:
    assert [speedup(10.0, saved) for saved in (5.0, 0.0, -10.0, 10.0)] == [2.0, 1.0, 0.5, 1000.0]
    assert (share_won(4.0), share_won(0.5)) == (0.75, 0.0)
    assert [bearable_period(steps) for steps in (0, 1, 700, 10_000)] == [0, 1, 26, 100]
    for round_s, rest_s, epoch, period in (
        *((1.0, 9.0, None, 1), (1.0, 8.9, None, 2), (0.4, 0.6, None, 6), (1.0, 1.0, None, 9), (1.0, 1.0, 5, 5)),
        *((1.0, 0.0, None, 500), (1.0, 1e-6, None, 500)),
    ):
        assert period_for(round_s, rest_s, epoch) == period, (round_s, rest_s, epoch)


def test_bytes_are_those_that_the_codecs_make_and_low_rank_is_counted_parameter_by_parameter() -> None:
    n = 100_000
    payload = codec_of("topk:0.01").lengths(n, torch.float32)[0]
    for workers in (2, 4, 9):
        whole = 2 * (workers - 1) / workers * 4 * n  # of an all-reduce, from each worker
        assert bytes_left(TOPK, workers, (), server=False) == pytest.approx((workers - 1) * payload / whole)
        assert bytes_left(TOPK, workers, (), server=True) == pytest.approx((4 * n + payload) / (8 * n))
        assert bytes_left(BF16, workers, (), server=False) == 0.5
        assert bytes_left(BF16, workers, (), server=True) == 0.75
    assert compressed_round_s(BF16, 1.0, 10**6, 0.5) == pytest.approx(0.537)
    shapes = [(64, 32, 3, 3), (64,), (2, 2)]
    numbers = 64 * 288 + 64 + 4
    assert low_rank(shapes) == (2 * (64 + 288) + 64 + 4) / numbers
    assert low_rank(()) == LOW_RANK == bytes_left(POWERSGD, 4, (), server=False)
    guess = torch.randn(288, 2)
    payload = codec_of("powersgd:2").encode(torch.randn(numbers), Hints(matrices=[Matrix(0, 64, 288, guess)]))
    assert len(payload) - 4 * 4 == 4 * low_rank(shapes) * numbers  # without its table
