"""compressed_mean_ between processes: the same bits on all ranks, and its traffic to the byte."""

import pytest
import torch
from harness import on_gloo, on_shared_memory, values
from test_hierarchical_integration import on_hosts
from test_ring_integration import on_ring

from manyhands.comm.codecs import Hints, Matrix, codec_of
from manyhands.comm.compressed import compressed_mean_
from manyhands.comm.reducing import naive_mean
from residuals import MANY, check_feedback, feedback

N = 1000
WEIGHTS = [3.0, 4.0, 5.0, 6.0]  # none under half the average, where a bf16 mean holds back a part of its own rounding


def program(text):
    def run(group):
        codec = codec_of(text)
        mine = torch.randn(N, generator=torch.Generator().manual_seed(group.rank))
        guess = torch.randn(25, 2, generator=torch.Generator().manual_seed(7))
        hints, own = Hints(torch.Generator().manual_seed(group.rank), [Matrix(0, 30, 25, guess)]), torch.empty(N)
        total = compressed_mean_(group, codec, mine, WEIGHTS[group.rank], 1 << group.rank, hints, own)
        return mine, own, (total.weight, total.bits), group.ledger.total_bytes

    return run


def check(outcomes, sent, limit=1e-6):
    got = values(outcomes)
    wanted = naive_mean([own for _, own, _, _ in got], WEIGHTS[: len(got)])
    for mean, _, total, _ in got:
        assert torch.equal(mean, got[0][0])
        assert (mean - wanted).abs().max() <= limit
        assert total == (sum(WEIGHTS[: len(got)]), (1 << len(got)) - 1)
    assert sum(nbytes for *_, nbytes in got) == sent


# Over all ranks of 4: a payload from each to each of 3 for those that are gathered, 2·3 times it for a mean.
SENT = {
    "topk:0.01": 4 * 3 * 10 * (4 + 4),
    "onebit": 4 * 3 * (125 + 4),
    "qsgd:4": 4 * 3 * (500 + 2 * 4),
    "int8": 4 * 3 * (1000 + 4),
    "bf16": 2 * 3 * 2 * 1000,
    "powersgd:2": 2 * 3 * 4 * (2 * (30 + 25) + 250),
}


@pytest.mark.parametrize("text", SENT)
def test_traffic_through_shared_memory(text):
    """CASE 17: top-k sends k·(b + 4) bytes to each other worker, one-bit ceil(D/8) and the scale."""
    check(on_shared_memory(4, program(text)), SENT[text], 1e-5)


@pytest.mark.parametrize("text", SENT)
def test_traffic_of_a_ring(text):
    """CASE 17"""
    check(on_ring(4, program(text)), SENT[text], 1e-5)


def test_payloads_of_no_fixed_length_are_padded_to_the_longest():
    sizes = [int((torch.randn(N, generator=torch.Generator().manual_seed(rank)).abs() >= 2).sum()) for rank in range(3)]
    assert len(set(sizes)) > 1
    check(on_shared_memory(3, program("threshold:2")), 3 * 2 * 4 * max(sizes))


def test_over_gloo(tmp_path):
    check(on_gloo(2, program("topk:0.01"), tmp_path), 2 * 10 * (4 + 4))


# -- over many steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"), [pytest.param("bf16", MANY, marks=pytest.mark.slow), ("int8", 100), ("powersgd:1", 100)]
)
def test_nothing_is_lost_through_shared_memory(text, steps):
    """The rounding of the mean waits in a residual, too."""
    check_feedback(values(on_shared_memory(2, feedback(text, [3.0, 1.0], steps))), [3.0, 1.0], steps)


@pytest.mark.parametrize(
    ("weights", "steps"), [pytest.param([1.0, 1.0], MANY, marks=pytest.mark.slow), ([3.0, 1.0, 2.0], 100)]
)
def test_nothing_is_lost_round_a_ring(weights, steps):
    check_feedback(values(on_ring(len(weights), feedback("bf16", weights, steps))), weights, steps)


@pytest.mark.slow
def test_nothing_is_lost_between_hosts():
    weights = [3.0, 1.0, 2.0]
    check_feedback(values(on_hosts(((0,), (1, 2)), feedback("bf16", weights, MANY))), weights, MANY)


def test_nothing_is_lost_over_gloo(tmp_path):
    check_feedback(values(on_gloo(2, feedback("bf16", [1.0, 1.0], 100), tmp_path)), [1.0, 1.0], 100)
