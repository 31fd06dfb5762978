"""The arithmetic behind advice: hand calculations, and bytes as the codecs make them."""

import math

import pytest
import torch

from manyhands.comm.codecs import Hints, Matrix, codec_of
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

BF16, POWERSGD, TOPK = CODECS


def test_speedup_is_amdahls() -> None:
    assert speedup(10.0, 5.0) == 2.0
    assert speedup(10.0, 0.0) == 1.0
    assert speedup(10.0, -10.0) == 0.5
    assert speedup(10.0, 10.0) == 1000.0
    assert share_won(4.0) == 0.75
    assert share_won(0.5) == 0.0


@pytest.mark.parametrize(
    ("round_s", "rest_s", "epoch", "period"),
    [
        (1.0, 9.0, None, 1),
        (1.0, 8.9, None, 2),
        (0.4, 0.6, None, 6),
        (1.0, 1.0, None, 9),
        (1.0, 1.0, 5, 5),
        (1.0, 0.0, None, 500),
        (1.0, 1e-6, None, 500),
    ],
)
def test_the_smallest_period(round_s: float, rest_s: float, epoch: int | None, period: int) -> None:
    assert period_for(round_s, rest_s, epoch) == period
    if epoch is None and period < 500:
        share = lambda p: (round_s / p) / (rest_s + round_s / p)  # noqa: E731
        assert share(period) <= 0.1 + 1e-12
        assert period == 1 or share(period - 1) > 0.1


def test_a_period_of_the_root_of_the_steps_is_borne() -> None:
    assert [bearable_period(steps) for steps in (0, 1, 700, 10_000)] == [0, 1, 26, 100]


@pytest.mark.parametrize("workers", [2, 4, 9])
def test_bytes_are_those_that_the_codecs_make(workers: int) -> None:
    n = 100_000
    whole = 2 * (workers - 1) / workers * 4 * n  # of an all-reduce, from each worker
    payload = codec_of("topk:0.01").lengths(n, torch.float32)[0]  # type: ignore[union-attr]
    assert bytes_left(TOPK, workers, (), server=False) == pytest.approx((workers - 1) * payload / whole)
    assert bytes_left(TOPK, workers, (), server=True) == pytest.approx((4 * n + payload) / (8 * n))
    assert bytes_left(BF16, workers, (), server=False) == 0.5
    assert bytes_left(BF16, workers, (), server=True) == 0.75


def test_low_rank_is_counted_parameter_by_parameter() -> None:
    shapes = [(64, 32, 3, 3), (64,), (2, 2)]
    numbers = 64 * 288 + 64 + 4
    assert low_rank(shapes) == (2 * (64 + 288) + 64 + 4) / numbers
    assert low_rank(()) == LOW_RANK == bytes_left(POWERSGD, 4, (), server=False)
    guess = torch.randn(288, 2)
    payload = codec_of("powersgd:2").encode(torch.randn(numbers), Hints(matrices=[Matrix(0, 64, 288, guess)]))  # type: ignore[union-attr]
    assert len(payload) - 4 * 4 == 4 * low_rank(shapes) * numbers  # without its table


def test_what_codecs_compute_is_what_the_benchmark_leaves_unexplained() -> None:
    """docs/benchmarks.md, slow links: 8 rows a step, {codec: (rows/s, KB a step)}; alone 59.47 rows/s, allreduce 4.28 with 19,499 KB."""
    alone_s, numbers = 8 / 59.47, 19_499e3 / 6  # 2·3/4·4 bytes a number
    bytes_per_s = 19_499e3 / (8 / 4.28 - alone_s)
    measured = {"bf16": (7.13, 9_749), "powersgd:2": (36.42, 294), "topk:0.01": (17.13, 780)}
    for codec in CODECS:
        rows_per_s, kilobytes = measured[codec.spec]
        computed_s = 8 / rows_per_s - alone_s - 1e3 * kilobytes / bytes_per_s
        assert codec.seconds_per_number == pytest.approx(computed_s / numbers, abs=0.5e-9)
    assert math.isclose(compressed_round_s(BF16, 1.0, 10**6, 0.5), 0.537)
