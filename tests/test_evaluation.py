"""The one answer's buffers."""

from __future__ import annotations

import torch
from torch import nn

from manyhands import evaluation
from manyhands.testing.threads import together
from manyhands.worker import Worker


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("floating", torch.full((2,), float(rank)))
        self.register_buffer("complex", torch.tensor([[1 + 2j, 0j]], dtype=torch.complex128) * (rank + 1))
        self.register_buffer("count", torch.tensor(10 * rank))
        self.register_buffer("seen", torch.tensor([rank == 0, False]))


def test_floating_and_complex_buffers_are_averaged_and_others_take_the_maximum() -> None:
    models = [Buffered(rank) for rank in range(3)]

    def mean(worker: Worker) -> dict[str, torch.Tensor]:
        return evaluation.mean_buffers(models[worker.rank], worker.group)

    for buffers in together(3, mean):
        assert torch.equal(buffers["floating"], torch.ones(2))
        assert torch.allclose(buffers["complex"], torch.tensor([[2 + 4j, 0j]], dtype=torch.complex128), atol=1e-15)
        assert buffers["count"] == 20
        assert buffers["seen"].tolist() == [True, False]
    assert models[0].complex[0, 0] == 1 + 2j
