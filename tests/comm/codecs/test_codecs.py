"""What holds of every codec: lengths to the byte, error feedback, what is not finite, malformed payloads; and their names."""

import math

import pytest
import torch

from manyhands.comm.codecs import CODECS, Hints, Matrix, codec_of
from manyhands.errors import BadInput, UnknownName

TEXTS = ["topk:0.2", "onebit", "threshold:0.5:none", "powersgd:2", "qsgd:4", "bf16", "int8"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
N = 45


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def vector(seed=0, n=N, dtype=torch.float64):
    return torch.randn(n, generator=draws(seed), dtype=torch.float64).to(dtype)


def hints(rank=2):
    """Two matrices in 45 elements, 5 x 6 at 1 and 2 x 2 at 40, which would not become smaller."""
    guess = torch.randn(6, rank, generator=draws(9), dtype=torch.float64)
    return Hints(draws(), [Matrix(1, 5, 6, guess), Matrix(40, 2, 2, guess[:2].clone())])


@pytest.mark.parametrize("text", TEXTS)
def test_a_codecs_name_is_that_of_the_catalogue(text):
    codec = codec_of(text)
    assert CODECS[codec.name] is type(codec)
    assert text.startswith(codec.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_decoded_has_the_vectors_shape_and_is_the_same_each_time(text, dtype):
    codec = codec_of(text)
    payloads = [codec.encode(vector(dtype=dtype), hints()) for _ in range(2)]
    assert torch.equal(*payloads)
    assert payloads[0].dtype == torch.uint8
    assert len(payloads[0]) in codec.lengths(N, dtype)
    first, second = (codec.decode(payload, N, dtype) for payload in payloads)
    assert (first.shape, first.dtype) == ((N,), dtype)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.zeros(N, dtype=dtype))


@pytest.mark.parametrize("text", TEXTS)
def test_with_error_feedback_nothing_is_lost(text):
    """CASE 16: all that was sent and the residual are the sum of the gradients."""
    codec, given = codec_of(text), hints()
    sent, total, residual = (torch.zeros(N, dtype=torch.float64) for _ in range(3))
    for step in range(20):
        gradient = vector(step)
        whole = gradient + residual
        out = codec.decode(codec.encode(whole, given), N, torch.float64)
        sent, total, residual = sent + out, total + gradient, whole - out
    assert (sent + residual - total).abs().max() < 1e-12
    assert not torch.equal(sent, total)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_is_not_finite_where_it_is_decoded(text, strange):
    for place in (0, 12, N - 1):
        values = vector()
        values[place] = strange
        codec = codec_of(text)
        assert not codec.decode(codec.encode(values, hints()), N, torch.float64)[place].isfinite()


@pytest.mark.parametrize("text", TEXTS)
def test_payloads_of_another_length_are_refused(text):
    codec = codec_of(text)
    payload = codec.encode(vector(), hints())
    for wrong in (payload[:-1], torch.cat([payload, payload[:3]]), torch.zeros(100 * N, dtype=torch.uint8)):
        with pytest.raises(BadInput):
            codec.decode(wrong, N, torch.float64)
    with pytest.raises(BadInput, match="100000000 bytes arrived"):
        codec.check_length(100000000, N, torch.float64)


@pytest.mark.parametrize("text", TEXTS)
def test_any_bytes_are_a_vector_or_refused(text):
    codec = codec_of(text)
    lengths = codec.lengths(N, torch.float32)
    for seed in range(100):
        length = lengths[seed % len(lengths)]
        payload = torch.randint(0, 256 if seed % 2 else 2, (length,), dtype=torch.uint8, generator=draws(seed))
        try:
            assert codec.decode(payload, N, torch.float32).shape == (N,)
        except BadInput:
            continue


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_is_a_vector_too(text):
    """A server may have more shards than elements."""
    codec = codec_of(text)
    payload = codec.encode(torch.zeros(0), Hints(draws()))
    assert codec.decode(payload, 0, torch.float32).shape == (0,)


@pytest.mark.parametrize("text", [text for text in TEXTS if text != "onebit"])
def test_zeros_stay_zeros(text):
    codec = codec_of(text)
    assert codec.keeps_zeros
    assert not codec.decode(codec.encode(torch.zeros(N), hints()), N, torch.float32).any()


def test_codecs_are_named_by_texts():
    assert codec_of("none") is None
    assert [codec_of(text).form for text in TEXTS] == [codec.form for codec in CODECS.values()]
    assert codec_of("threshold:1e-3").clip == 5
    with pytest.raises(UnknownName, match=r"no codec 'zip': choose none .* topk:FRACTION, onebit, .*, int8"):
        codec_of("zip")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("topk", "the codec 'topk': write it as topk:FRACTION"),
        ("onebit:3", "write it as onebit"),
        ("topk:0", "takes a fraction above 0 and up to 1; got 0"),
        ("topk:nan", "takes a fraction above 0 and up to 1; got nan"),
        ("topk:none", "write it as topk:FRACTION"),
        ("topk:a", "followed by numbers, such as topk:0.01; got 'a'"),
        ("threshold:-1", "takes a number above 0; got -1"),
        ("threshold:1:0.5", "takes a clip of at least 1, or none; got 0.5"),
        ("powersgd:1.5", "takes a whole number of at least 1; got 1.5"),
        ("qsgd:1", "takes a whole number from 2 to 8; got 1"),
        ("qsgd:9", "takes a whole number from 2 to 8; got 9"),
    ],
)
def test_numbers_that_cannot_be_are_refused(text, problem):
    with pytest.raises(BadInput, match=problem):
        codec_of(text)
