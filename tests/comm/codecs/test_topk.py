import pytest
import torch

from manyhands.comm.codecs.topk import TopK
from manyhands.errors import BadInput


def test_the_largest_values_and_their_places():
    """CASE 17: k·(b + 4) bytes."""
    values = torch.tensor([1.0, -5.0, 0.5, 3.0, -2.0])
    payload = TopK(0.4).encode(values)
    assert len(payload) == 2 * (4 + 4)
    assert payload[:8].view(torch.float32).tolist() == [-5.0, 3.0]
    assert payload[8:].clone().view(torch.int32).tolist() == [1, 3]
    assert TopK(0.4).decode(payload, 5, torch.float32).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("fraction", "n", "count"), [(0.01, 1000, 10), (0.07, 100, 7), (0.001, 5, 1), (0.5, 3, 2), (1, 4, 4), (0.3, 0, 0)]
)
def test_how_many(fraction, n, count):
    """0.07·100 is 7.000000000000001 in floating point."""
    assert TopK(fraction).count(n) == count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lengths_of_other_dtypes(dtype):
    assert len(TopK(0.1).encode(torch.arange(100).to(dtype))) == 10 * (dtype.itemsize + 4)


@pytest.mark.parametrize("places", [[1, 5], [-1, 2], [3, 3], [3, 1]])
def test_places_out_of_range_or_order_are_refused(places):
    payload = torch.cat([torch.ones(2).view(torch.uint8), torch.tensor(places, dtype=torch.int32).view(torch.uint8)])
    with pytest.raises(BadInput, match=r"ascending in range\(5\)"):
        TopK(0.4).decode(payload, 5, torch.float32)
