"""Chunks: every element once, alike on all ranks; scratch memory is kept and cut for every dtype."""

import pytest
import torch
from meshes import mesh, ring

from manyhands.comm.ring.algorithms import CHUNK_BYTES, Scratch


@pytest.mark.parametrize("n", [0, 1, 16_384, 16_385, 1_000_003])
def test_chunks_cover_everything_once(n):
    group = ring(mesh(1), 0)
    transfer = group._transfer(torch.zeros(n))
    chunks = list(transfer.chunks((0, n)))
    assert [at for chunk in chunks for at in range(*chunk)] == list(range(n))
    assert all(4 * (stop - start) <= CHUNK_BYTES for start, stop in chunks)
    group.close()


def test_scratch_rows_do_not_overlap_and_are_kept():
    scratch = Scratch()
    for n, dtype in ((10, torch.float64), (100, torch.bfloat16), (3, torch.float32), (10, torch.float64)):
        rows = scratch.rows(3, n, dtype)
        for number, (row, view) in enumerate(rows):
            assert (row.shape, row.dtype, len(view)) == ((n,), dtype, n * dtype.itemsize)
            row.fill_(number)
        assert [int(row.sum()) for row, _ in rows] == [0, n, 2 * n]
    assert scratch.rows(3, 10, torch.float64) is rows
    for n in range(100):
        scratch.rows(1, n, torch.uint8)
