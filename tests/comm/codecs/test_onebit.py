import torch

from manyhands.comm.codecs.onebit import OneBit


def test_signs_and_the_mean_magnitude():
    """CASE 17: ceil(n/8) bytes and the scale."""
    values = torch.tensor([1.0, -5.0, 0.0, 3.0, -2.0, 1.0, 1.0, 1.0, -4.0])
    payload = OneBit().encode(values)
    assert payload.tolist() == [*torch.tensor([2.0]).view(torch.uint8).tolist(), 0b00010010, 0b1]
    assert OneBit().decode(payload, 9, torch.float32).tolist() == [2.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 2.0, -2.0]


def test_lengths():
    for n, length in ((1, 1), (8, 1), (9, 2), (1000, 125)):
        assert len(OneBit().encode(torch.ones(n, dtype=torch.float64))) == length + 8
