import torch

from manyhands.comm.codecs.bf16 import BF16


def test_the_nearest_bfloat16():
    values = torch.tensor([1.0, 1 + 2**-9, -3.14159, 1e30])
    payload = BF16().encode(values)
    assert len(payload) == 8
    assert torch.equal(BF16().decode(payload, 4, torch.float32), values.bfloat16().float())
    assert BF16().decode(payload, 4, torch.float32)[1] == 1.0
