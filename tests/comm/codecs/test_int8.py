import pytest
import torch

from manyhands.comm.codecs.int8 import Int8
from manyhands.errors import BadInput


def test_whole_numbers_of_a_scale():
    values = torch.tensor([12.7, -12.7, 0.1, 0.26, -0.04])
    payload = Int8().encode(values)
    assert len(payload) == 5 + 4
    assert payload[4:].view(torch.int8).tolist() == [127, -127, 1, 3, 0]
    assert torch.allclose(Int8().decode(payload, 5, torch.float32), torch.tensor([12.7, -12.7, 0.1, 0.3, 0.0]))


def test_off_by_half_a_step_at_most():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    decoded = Int8().decode(Int8().encode(values), 1000, torch.float64)
    assert (decoded - values).abs().max() <= values.abs().max() / 127 / 2 * (1 + 1e-12)


def test_a_number_that_none_encodes_is_refused():
    payload = Int8().encode(torch.ones(3))
    payload[4] = 0x80
    with pytest.raises(BadInput, match="at least -127; got -128"):
        Int8().decode(payload, 3, torch.float32)
