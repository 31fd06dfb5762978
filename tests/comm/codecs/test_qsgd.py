import pytest
import torch

from manyhands.comm.codecs.base import Hints
from manyhands.comm.codecs.qsgd import QSGD
from manyhands.errors import BadInput


def coded(values, bits, seed=0):
    codec = QSGD(bits)
    payload = codec.encode(values, Hints(torch.Generator().manual_seed(seed)))
    return payload, codec.decode(payload, len(values), values.dtype)


def test_levels_of_the_largest_magnitude():
    """Values on a level stay as they are: 3 bits have levels 0 to 3."""
    values = torch.tensor([3.0, -1.0, 0.0, 2.0, -3.0])
    payload, decoded = coded(values, 3)
    assert decoded.tolist() == values.tolist()
    codes = [3, 4 + 1, 0, 2, 4 + 3]
    packed = sum(code << 3 * i for i, code in enumerate(codes))
    assert payload.tolist() == [*torch.tensor([3.0]).view(torch.uint8).tolist(), packed & 255, packed >> 8]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_mean_is_right(bits):
    """Unbiased: the mean of 4000 draws is within 5 standard errors, which are at most half a level / sqrt(4000)."""
    values = torch.tensor([-1, -0.61, -0.27, -0.02, 0.1, 0.33, 0.55, 0.9], dtype=torch.float64)
    mean = sum(coded(values, bits, seed)[1] for seed in range(4000)) / 4000
    level = 1 / QSGD(bits).levels
    assert (mean - values).abs().max() < 5 * level / 2 / 4000**0.5
    assert not torch.equal(coded(values, bits, 1)[1], coded(values, bits, 2)[1])


def test_each_bucket_has_a_scale():
    values = torch.cat([torch.full((512,), 1e-3), torch.full((88,), 1e3)])
    payload, decoded = coded(values, 4)
    assert torch.equal(decoded, values)
    assert len(payload) == 2 * 4 + 600 // 2


def test_the_process_draws_as_if_nothing_had_been():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    coded(torch.ones(5), 4)
    assert torch.equal(torch.rand(2), wanted)


def test_it_wants_a_generator():
    with pytest.raises(BadInput, match="rounds at random"):
        QSGD(4).encode(torch.ones(3))
