"""Which way a tensor takes, and sums on the way."""

import pytest
import torch
from meshes import mesh, ring
from threads import in_threads

from manyhands.comm.reducing import naive_mean, shares_of
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES, Direct, Ring, Swap, add_up, exchange_of


def _exchange(size, n, dtype=torch.float32):
    groups = [ring(sockets, rank) for sockets in [mesh(size)] for rank in range(size)]
    try:
        return type(exchange_of(groups[0]._transfer(torch.zeros(n, dtype=dtype))))
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize(
    ("size", "nbytes", "dtype", "way"),
    [
        (2, SWAP_BYTES, torch.float32, Swap),
        (2, SWAP_BYTES + 4, torch.float32, Ring),
        (2, SWAP_BYTES + 4, torch.bfloat16, Ring),
        (3, DIRECT_BYTES, torch.float32, Direct),
        (3, DIRECT_BYTES + 4, torch.float64, Ring),
        (3, DIRECT_BYTES + 4, torch.float16, Direct),
    ],
)
def test_the_way(size, nbytes, dtype, way):
    assert _exchange(size, -(-nbytes // dtype.itemsize), dtype) is way


@pytest.mark.parametrize("way", [Swap, Direct, Ring])
@pytest.mark.parametrize("n", [1, 5, 200_003])
def test_every_way_gives_the_mean(way, n, monkeypatch):
    size = 2 if way is Swap else 3
    monkeypatch.setattr("manyhands.comm.ring.group.exchange_of", way)
    weights, sockets = [0.0, 2.0, 1.0][:size], mesh(size)
    inputs = [torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    inputs[0].fill_(torch.nan)

    def run(rank):
        group, mine = ring(sockets, rank), inputs[rank].clone()
        group.mean_(mine, weights[rank])
        group.barrier()
        group.close()
        return mine

    results = in_threads(size, run)
    torch.testing.assert_close(results[0], naive_mean(inputs, weights), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(result, results[0]) for result in results)


def test_sixteen_bit_numbers_are_rounded_once():
    pieces = [
        torch.tensor([256.0], dtype=torch.bfloat16),
        *(torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(3)),
    ]
    into = torch.zeros(1, dtype=torch.bfloat16)
    add_up(pieces, None, into)
    assert into.item() == 260  # 256 + 1 is 256 in bfloat16, 259 is 260


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [0.0, 2.0]])
def test_two_workers_round_sixteen_bit_numbers_once_however_many(weights):
    n, sockets = SWAP_BYTES // 2 + 5, mesh(2)
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(2)]
    first, second = (tensor.float() for tensor in inputs)
    wanted = first + second if weights is None else naive_mean([first, second], weights)

    def run(rank):
        group, mine = ring(sockets, rank), inputs[rank].clone()
        if weights is None:
            group.all_reduce_(mine)
        else:
            group.mean_(mine, weights[rank])
        group.barrier()
        group.close()
        return mine

    for result in in_threads(2, run):
        assert torch.equal(result, wanted.bfloat16())


@pytest.mark.parametrize("place", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 2.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sum_may_take_the_place_of_any_piece(place, weights, dtype):
    pieces = [torch.randn(65, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    exact = [piece.double() for piece in pieces]
    wanted = (sum(exact) if weights is None else naive_mean(exact, weights)).to(dtype)
    into = torch.zeros(65, dtype=dtype) if place is None else pieces[place]
    add_up(pieces, None if weights is None else shares_of(weights, sum(weights)), into)
    torch.testing.assert_close(into, wanted)
