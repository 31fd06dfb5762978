import pytest
import torch

from manyhands.comm.codecs.base import Hints, Matrix
from manyhands.comm.codecs.powersgd import PowerSGD, orthonormal
from manyhands.errors import BadInput

F64 = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def hints(rank, rows=6, columns=5, start=2):
    return Hints(matrices=[Matrix(start, rows, columns, random(columns, rank, seed=1))])


def coded(vector, rank, given):
    codec = PowerSGD(rank)
    payload = codec.encode(vector, given)
    return payload, codec.decode(payload, len(vector), vector.dtype)


def test_a_matrix_of_that_rank_is_exact_and_what_is_none_is_sent_as_it_is():
    vector = random(35)
    vector[2:32] = (random(6, 2, seed=2) @ random(2, 5, seed=3)).reshape(-1)
    payload, decoded = coded(vector, 2, hints(2))
    assert (decoded - vector).abs().max() < 1e-12
    assert torch.equal(decoded[:2], vector[:2])
    assert torch.equal(decoded[32:], vector[32:])
    assert len(payload) == 4 * (1 + 3) + 8 * (2 * (6 + 5) + 5)


def test_with_a_warm_start_it_finds_the_best_approximation():
    """Power iteration: the same matrix again and again comes to its truncated singular value decomposition."""
    vector, given = random(35), hints(2)
    u, s, v = torch.linalg.svd(vector[2:32].view(6, 5), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    errors = [float((coded(vector, 2, given)[1][2:32].view(6, 5) - best).norm()) for _ in range(300)]
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-6


def test_a_matrix_that_would_not_become_smaller_is_sent_as_it_is():
    vector = random(35)
    payload, decoded = coded(vector, 3, hints(3))
    assert torch.equal(decoded, vector)
    assert len(payload) == 4 + 8 * 35


def test_a_gradient_of_zeros_or_nan_leaves_the_guess():
    given = hints(2)
    before = given.matrices[0].guess.clone()
    for value in (0.0, float("nan")):
        coded(torch.full((35,), value, dtype=F64), 2, given)
        assert torch.equal(given.matrices[0].guess, before)


def test_columns_are_orthonormal_and_dependent_ones_zero():
    p = random(8, 3)
    p[:, 2] = p[:, 0] - 2 * p[:, 1]
    q = orthonormal(p)
    assert (q.T @ q - torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=F64))).abs().max() < 1e-12
    assert (q[:, 0] - p[:, 0] / p[:, 0].norm()).abs().max() < 1e-15


def table(*numbers, extra=0):
    return torch.cat(
        [torch.tensor(numbers, dtype=torch.int32).view(torch.uint8), torch.zeros(extra, dtype=torch.uint8)]
    )


@pytest.mark.parametrize(
    "payload",
    [
        table(-1, extra=280),
        table(9, extra=280),
        table(2, extra=12),
        table(1, 6, 6, 5, extra=128),
        table(1, -2, 6, 5, extra=128),
        table(1, 0, -6, -5, extra=128),
        table(1, 0, 1 << 30, 1 << 30, extra=128),
        table(1, 0, 2, 2, extra=280),
        table(2, 0, 4, 4, 15, 4, 4, extra=152),
        table(1, 0, 6, 5, extra=127),
    ],
    ids=["negative", "many", "short", "outside", "before", "inside out", "huge", "not smaller", "overlapping", "bytes"],
)
def test_tables_that_cannot_be_are_refused(payload):
    with pytest.raises(BadInput, match="powersgd"):
        PowerSGD(1).decode(payload, 35, F64)
