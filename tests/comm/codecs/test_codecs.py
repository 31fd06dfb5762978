"""What holds of every codec, and what each does to numbers that a hand can check."""

import math
from itertools import product

import torch
from torch import Tensor

from manyhands.comm.codecs import CODECS, Hints, Matrix, codec_of
from manyhands.comm.codecs.bf16 import BF16
from manyhands.comm.codecs.int8 import Int8
from manyhands.comm.codecs.onebit import OneBit
from manyhands.comm.codecs.powersgd import PowerSGD, orthonormal
from manyhands.comm.codecs.qsgd import QSGD
from manyhands.comm.codecs.threshold import Threshold
from manyhands.comm.codecs.topk import TopK
from manyhands.errors import BadInput, UnknownName
from refusals import refused

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


def test_what_is_decoded_has_the_vectors_shape_and_is_the_same_each_time():
    for text, dtype in product(TEXTS, DTYPES):
        codec, case = codec_of(text), (text, dtype)
        payloads = [codec.encode(vector(dtype=dtype), hints()) for _ in range(2)]
        assert torch.equal(*payloads), case
        assert payloads[0].dtype == torch.uint8, case
        assert len(payloads[0]) in codec.lengths(N, dtype), case
        first, second = (codec.decode(payload, N, dtype) for payload in payloads)
        assert (first.shape, first.dtype) == ((N,), dtype), case
        assert torch.equal(first, second), case
        assert first.any(), case


def test_what_is_not_finite_is_not_finite_where_it_is_decoded():
    for text, strange, place in product(TEXTS, (math.nan, math.inf, -math.inf), (0, 12, N - 1)):
        values, codec = vector(), codec_of(text)
        values[place] = strange
        found = codec.decode(codec.encode(values, hints()), N, torch.float64)[place]
        assert not found.isfinite(), (text, strange, place)


def test_zeros_stay_zeros_and_nothing_is_a_vector_too():
    """A server may have more shards than elements."""
    for text in TEXTS:
        codec = codec_of(text)
        assert codec.decode(codec.encode(torch.zeros(0), Hints(draws())), 0, torch.float32).shape == (0,), text
        assert codec.keeps_zeros is (text != "onebit"), text
        if codec.keeps_zeros:
            assert not codec.decode(codec.encode(torch.zeros(N), hints()), N, torch.float32).any(), text


def test_any_bytes_are_a_vector_or_refused_and_those_of_another_length_are_refused():
    for text in TEXTS:
        codec = codec_of(text)
        payload, lengths = codec.encode(vector(), hints()), codec.lengths(N, torch.float32)
        for wrong in (payload[:-1], torch.cat([payload, payload[:3]]), torch.zeros(100 * N, dtype=torch.uint8)):
            refused("", codec.decode, wrong, N, torch.float64, case=(text, len(wrong)))
        refused("100000000 bytes arrived", codec.check_length, 100000000, N, torch.float64, case=text)
        for seed in range(100):
            length = lengths[seed % len(lengths)]
            data = torch.randint(0, 256 if seed % 2 else 2, (length,), dtype=torch.uint8, generator=draws(seed))
            try:
                assert codec.decode(data, N, torch.float32).shape == (N,), (text, seed)
            except BadInput:
                continue


def test_codecs_are_named_by_texts():
    assert codec_of("none") is None
    for text in TEXTS:
        codec = codec_of(text)
        assert CODECS[codec.name] is type(codec), text
        assert text.startswith(codec.name), text
    assert [codec_of(text).form for text in TEXTS] == [codec.form for codec in CODECS.values()]
    assert codec_of("threshold:1e-3").clip == 5
    for text, problem in [
        ("topk", "the codec 'topk': write it as topk:FRACTION"),
        ("onebit:3", "write it as onebit"),
        ("topk:0", "fraction above 0 and up to 1; got 0"),
        ("topk:1.5", "fraction above 0 and up to 1; got 1.5"),
        ("topk:nan", "fraction above 0 and up to 1; got nan"),
        ("topk:none", "write it as topk:FRACTION"),
        ("topk:a", "followed by numbers, such as topk:0.01; got 'a'"),
        ("threshold:-1", "number above 0; got -1"),
        ("threshold:1:0.5", "clip of at least 1, or none; got 0.5"),
        ("powersgd:1.5", "whole number of at least 1; got 1.5"),
        ("qsgd:1", "whole number from 2 to 8; got 1"),
        ("qsgd:9", "whole number from 2 to 8; got 9"),
    ]:
        refused(problem, codec_of, text)
    refused("no codec 'zip': choose none .* topk:FRACTION, .*, int8", codec_of, "zip", kind=UnknownName)


F32, F64 = torch.float32, torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def numbers(*given: int, extra: int = 0) -> Tensor:
    """uint8: int32 numbers, from unsigned ones too, and zeros behind them."""
    signed = torch.tensor([one - (1 << 32) if one >= 1 << 31 else one for one in given], dtype=torch.int32)
    return torch.cat([signed.view(torch.uint8), torch.zeros(extra, dtype=torch.uint8)])


def scale(value: float) -> list[int]:
    return torch.tensor([value]).view(torch.uint8).tolist()


# -- rounding: bf16, int8, onebit, qsgd --------------------------------------------------------------------------------


def test_the_nearest_bfloat16():
    values = torch.tensor([1.0, 1 + 2**-9, -3.14159, 1e30])
    payload = BF16().encode(values)
    assert len(payload) == 8
    assert torch.equal(BF16().decode(payload, 4, F32), values.bfloat16().float())
    assert BF16().decode(payload, 4, F32)[1] == 1.0


def test_int8_has_whole_numbers_of_a_scale_off_by_half_a_step_at_most():
    payload = Int8().encode(torch.tensor([12.7, -12.7, 0.1, 0.26, -0.04]))
    assert len(payload) == 5 + 4
    assert payload[4:].view(torch.int8).tolist() == [127, -127, 1, 3, 0]
    assert torch.allclose(Int8().decode(payload, 5, F32), torch.tensor([12.7, -12.7, 0.1, 0.3, 0.0]))
    values = random(1000)
    decoded = Int8().decode(Int8().encode(values), 1000, F64)
    assert (decoded - values).abs().max() <= values.abs().max() / 127 / 2 * (1 + 1e-12)
    payload[4] = 0x80
    refused("at least -127; got -128", Int8().decode, payload, 5, F32)


def test_onebit_has_signs_and_the_mean_magnitude():
    """CASE 17: ceil(n/8) bytes and the scale."""
    payload = OneBit().encode(torch.tensor([1.0, -5.0, 0.0, 3.0, -2.0, 1.0, 1.0, 1.0, -4.0]))
    assert payload.tolist() == [*scale(2.0), 0b00010010, 0b1]
    assert OneBit().decode(payload, 9, F32).tolist() == [2.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 2.0, -2.0]
    lengths = [len(OneBit().encode(torch.ones(n, dtype=F64))) - 8 for n in (1, 8, 9, 1000)]
    assert lengths == [1, 1, 2, 125]


def by_qsgd(values, bits, seed=0):
    codec = QSGD(bits)
    payload = codec.encode(values, Hints(torch.Generator().manual_seed(seed)))
    return payload, codec.decode(payload, len(values), values.dtype)


def test_qsgd_leaves_values_on_a_level_and_has_a_scale_for_each_bucket():
    """3 bits have levels 0 to 3."""
    values = torch.tensor([3.0, -1.0, 0.0, 2.0, -3.0])
    payload, decoded = by_qsgd(values, 3)
    assert decoded.tolist() == values.tolist()
    packed = sum(code << 3 * i for i, code in enumerate([3, 4 + 1, 0, 2, 4 + 3]))
    assert payload.tolist() == [*scale(3.0), packed & 255, packed >> 8]
    values = torch.cat([torch.full((512,), 1e-3), torch.full((88,), 1e3)])
    payload, decoded = by_qsgd(values, 4)
    assert torch.equal(decoded, values)
    assert len(payload) == 2 * 4 + 600 // 2


def test_qsgd_is_right_in_the_mean():
    """Unbiased: the mean of 500 draws is within 5 standard errors, which are at most half a level / sqrt(500)."""
    values = torch.tensor([-1, -0.61, -0.27, -0.02, 0.1, 0.33, 0.55, 0.9], dtype=F64)
    for bits in (2, 3):
        mean = sum(by_qsgd(values, bits, seed)[1] for seed in range(500)) / 500
        assert (mean - values).abs().max() < 5 / QSGD(bits).levels / 2 / 500**0.5, bits
        assert not torch.equal(by_qsgd(values, bits, 1)[1], by_qsgd(values, bits, 2)[1]), bits


def test_qsgd_draws_from_the_generator_that_it_is_given_and_wants_one():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    by_qsgd(torch.ones(5), 4)
    assert torch.equal(torch.rand(2), wanted)
    refused("rounds at random", QSGD(4).encode, torch.ones(3))


# -- few values: topk, threshold ---------------------------------------------------------------------------------------


def test_topk_has_the_largest_values_and_their_places():
    """CASE 17: k·(b + 4) bytes. 0.07·100 is 7.000000000000001 in floating point."""
    payload = TopK(0.4).encode(torch.tensor([1.0, -5.0, 0.5, 3.0, -2.0]))
    assert len(payload) == 2 * (4 + 4)
    assert payload[:8].view(F32).tolist() == [-5.0, 3.0]
    assert payload[8:].clone().view(torch.int32).tolist() == [1, 3]
    assert TopK(0.4).decode(payload, 5, F32).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]
    cases = [(0.01, 1000, 10), (0.07, 100, 7), (0.001, 5, 1), (0.5, 3, 2), (1, 4, 4), (0.3, 0, 0)]
    assert [TopK(fraction).count(n) for fraction, n, _ in cases] == [count for *_, count in cases]
    for dtype in (F64, torch.bfloat16):
        assert len(TopK(0.1).encode(torch.arange(100).to(dtype))) == 10 * (dtype.itemsize + 4), dtype
    for places in ([1, 5], [-1, 2], [3, 3], [3, 1]):
        payload = torch.cat([torch.ones(2).view(torch.uint8), numbers(*places)])
        refused(r"ascending in range\(5\)", TopK(0.4).decode, payload, 5, F32, case=places)


def test_threshold_has_plus_or_minus_tau_and_where():
    values = torch.tensor([0.4, -5.0, 0.5, 3.0, -0.5, -0.1])
    payload = Threshold(0.5).encode(values)
    assert torch.equal(payload, numbers(2 * 1 + 1, 2 * 2, 2 * 3, 2 * 4 + 1))
    assert Threshold(0.5).decode(payload, 6, F32).tolist() == [0.0, -0.5, 0.5, 0.5, -0.5, 0.0]
    assert len(Threshold(9).encode(values)) == 0
    payload = Threshold(0.5).encode(torch.tensor([1.0, math.nan, 2.0, -math.inf]))
    assert torch.equal(payload, numbers(0xFFFFFFFF, 2, 6))
    assert Threshold(0.5).decode(payload, 4, F32).isnan().tolist() == [False, True, False, True]
    finite = Threshold(0.5).encode(torch.full((4,), 3e38))  # whose sum is not finite
    assert Threshold(0.5).decode(finite, 4, F32).tolist() == [0.5] * 4
    # Out of range, out of order, twice, twice with both signs, not finite nowhere, negative and not finite.
    never = ((12,), (4, 2), (4, 4), (5, 4), (0xFFFFFFFE,), (0xFFFFFFFF,), (0xFFFFFFFF, 3), (2, 0xFFFFFFFF))
    for given in never:
        refused("threshold", Threshold(0.5).decode, numbers(*given), 6, F32, case=given)


def test_threshold_clips_residuals_to_a_multiple_of_tau():
    """Deeplearning4j's ResidualClippingPostProcessor: [-clip·tau, clip·tau]."""
    residual = torch.tensor([1.0, -9.0, 2.6, 0.0])
    Threshold(0.5).clip_(residual)
    assert residual.tolist() == [1.0, -2.5, 2.5, 0.0]
    Threshold(0.5, None).clip_(residual := torch.tensor([9.0]))
    assert residual.tolist() == [9.0]


# -- factors: powersgd -------------------------------------------------------------------------------------------------


def of_rank(rank):
    """A matrix 6 x 5 at 2 of 35 elements."""
    return Hints(matrices=[Matrix(2, 6, 5, random(5, rank, seed=1))])


def by_powersgd(vector, rank, given):
    payload = PowerSGD(rank).encode(vector, given)
    return payload, PowerSGD(rank).decode(payload, len(vector), vector.dtype)


def test_powersgd_is_exact_for_a_matrix_of_that_rank_and_sends_as_it_is_what_is_none():
    vector = random(35)
    vector[2:32] = (random(6, 2, seed=2) @ random(2, 5, seed=3)).reshape(-1)
    payload, decoded = by_powersgd(vector, 2, of_rank(2))
    assert (decoded - vector).abs().max() < 1e-12
    assert torch.equal(decoded[:2], vector[:2])
    assert torch.equal(decoded[32:], vector[32:])
    assert len(payload) == 4 * (1 + 3) + 8 * (2 * (6 + 5) + 5)
    payload, decoded = by_powersgd(vector, 3, of_rank(3))  # the matrix would not become smaller
    assert torch.equal(decoded, vector)
    assert len(payload) == 4 + 8 * 35


def test_powersgd_finds_the_best_approximation_with_a_warm_start():
    """Power iteration: the same matrix again and again comes to its truncated singular value decomposition."""
    vector, given = random(35), of_rank(2)
    u, s, v = torch.linalg.svd(vector[2:32].view(6, 5), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    errors = [float((by_powersgd(vector, 2, given)[1][2:32].view(6, 5) - best).norm()) for _ in range(300)]
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-6
    before = given.matrices[0].guess.clone()
    for value in (0.0, math.nan):
        by_powersgd(torch.full((35,), value, dtype=F64), 2, given)
        assert torch.equal(given.matrices[0].guess, before), value


def test_powersgds_columns_are_orthonormal_and_dependent_ones_zero():
    p = random(8, 3)
    p[:, 2] = p[:, 0] - 2 * p[:, 1]
    q = orthonormal(p)
    assert (q.T @ q - torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=F64))).abs().max() < 1e-12
    assert (q[:, 0] - p[:, 0] / p[:, 0].norm()).abs().max() < 1e-15


def test_powersgd_refuses_tables_that_cannot_be():
    for case, payload in {
        "negative": numbers(-1, extra=280),
        "many": numbers(9, extra=280),
        "short": numbers(2, extra=12),
        "outside": numbers(1, 6, 6, 5, extra=128),
        "before": numbers(1, -2, 6, 5, extra=128),
        "inside out": numbers(1, 0, -6, -5, extra=128),
        "huge": numbers(1, 0, 1 << 30, 1 << 30, extra=128),
        "not smaller": numbers(1, 0, 2, 2, extra=280),
        "overlapping": numbers(2, 0, 4, 4, 15, 4, 4, extra=152),
        "bytes": numbers(1, 0, 6, 5, extra=127),
    }.items():
        refused("powersgd", PowerSGD(1).decode, payload, 35, F64, case=case)
