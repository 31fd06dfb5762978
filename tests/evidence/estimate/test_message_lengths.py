"""What the stand-in's messages stand for, beside what the real vector makes."""

from __future__ import annotations

import pytest
import torch
from both_ways import task

from manyhands.comm.codecs import Hints, Matrix, codec_of
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.engines.sim.compute import Compute
from manyhands.errors import Unsupported
from manyhands.evidence.estimate.message_lengths import Lengths, Piece, payload_bytes
from manyhands.evidence.estimate.model_sizes import Shape, shape_of
from manyhands.strategies import strategy_of


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(task())


def lengths(shape: Shape, spec: str, **more: int) -> Lengths:
    return Lengths(shape, strategy_of(spec), **{"workers": 4, **more})


def encoded(shape: Shape, text: str, low: int, high: int) -> int:
    """Bytes of a real payload."""
    codec = codec_of(text)
    matrices = []
    for start, rows, columns in shape.matrices if isinstance(codec, PowerSGD) else ():
        first, last = max(0, -(-(low - start) // columns)), min(rows, (high - start) // columns)
        if first < last:
            guess = torch.randn(columns, int(codec.rank))
            matrices.append(Matrix(start + first * columns - low, last - first, columns, guess))
    return len(codec.encode(torch.randn(high - low), Hints(torch.Generator(), matrices)))


def test_a_payload_is_as_long_as_what_the_codec_makes(shape: Shape) -> None:
    for text in ("topk:0.01", "onebit", "bf16", "int8", "qsgd:4", "powersgd:1", "powersgd:3", "powersgd:50"):
        for number, of in ((0, 1), (0, 3), (1, 3), (2, 3)):
            low, high = number * shape.padded // of, (number + 1) * shape.padded // of
            assert payload_bytes(codec_of(text), shape, low, high) == encoded(shape, text, low, high), (text, number)
    threshold = "allreduce:compress=threshold:0.1"
    with pytest.raises(Unsupported, match=r"compress=threshold .* only training shows them: .* topk:0.01"):
        lengths(shape, threshold)
    alone = Lengths(shape, strategy_of(threshold), workers=1)  # one worker compresses nothing
    assert alone.mean(alone.stand_in_length, shape.item) == [Piece("mean", shape.padded, 4)]


def test_the_vector_and_what_is_no_part_of_it(shape: Shape) -> None:
    found = lengths(shape, "local-sgd")
    assert found.stand_in_length == 32
    assert found.mean(32, 4) == [Piece("mean", shape.padded, 4)]
    assert found.mean(1, 8) == [Piece("mean", 1, 8)]  # a vote
    assert found.all_gathered(1, 8) == shape.parameters  # an optimizer's `step`
    assert found.real(0) == 0
    assert found.message(0, 1, 128) == shape.padded * 4
    assert found.message(0, 1, 8) == 8
    assert found.counted_bytes("send", 128) == shape.padded * 4


def test_what_a_codec_exchanges_for_one_mean(shape: Shape) -> None:
    whole, rows, columns = shape.padded, 40 + 10, 64 + 40
    assert lengths(shape, "allreduce:compress=bf16").mean(32, 2) == [Piece("mean", whole, 2)]
    rest = whole - 40 * 64 - 10 * 40
    assert lengths(shape, "allreduce:compress=powersgd:2").mean(32, 2) == [
        Piece("mean", 2 * rows + rest, 4),
        Piece("mean", 2 * columns, 4),
    ]
    words, all_gathered = lengths(shape, "allreduce:compress=int8", rows=6).mean(32, 2)
    assert all_gathered == Piece("all_gather", whole + 4, 1)
    assert words == Piece("words", 4 * len(f'[6.0,"7f",{whole + 4}]'))  # 3 control bits and 4 parameters


def test_messages_of_shards(shape: Shape) -> None:
    found = lengths(shape, "downpour:compress=topk:0.5", servers=2)
    part, half = found.stand_in_length // 2, shape.padded // 2
    assert found.stand_in_length == 64
    assert found.message(-1, 0, part * 4) == half * 4  # a pull's answer
    assert found.message(0, -1, part * 2) == half // 2 * 8  # a push
    assert found.message(0, -2, 0) == 0
    assert found.counted_bytes("push", found.stand_in_length * 2) == shape.padded // 2 * 8
    assert found.counted_bytes("pull", found.stand_in_length * 4) == shape.padded * 4
    assert lengths(shape, "quorum", servers=4).stand_in_length == 32  # its rule takes whole pushes: one shard


def test_seconds_a_byte_and_a_number_grow_as_the_vector_shrinks(shape: Shape) -> None:
    given = Compute.parse("row=1,merge=1e-9,int8=4ns/2ns,3=5x")
    found = lengths(shape, "allreduce:compress=int8").compute(given)
    assert found.merge * 32 == pytest.approx(1e-9 * shape.padded)
    assert found.coding("bf16", 0).encoding(32, 64) == pytest.approx(4e-9 * shape.padded)
    assert found.coding("bf16", 0).decoding(32, 64, 1) == pytest.approx(4 * 2e-9 * shape.padded)  # of four workers
    assert found.coding("bf16", 3).encoding(32, 64) == pytest.approx(5 * 4e-9 * shape.padded)
    assert (found.row, found.factors) == (given.row, given.factors)
    assert lengths(shape, "allreduce").compute(given).codecs == {}
