"""Frames: what a header says, and that garbage says nothing but FrameError."""

import dataclasses
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadInput
from manyhands.transport.frame import (
    DTYPES,
    HEADER_BYTES,
    MAX_BLOB_BYTES,
    MAX_TENSOR_BYTES,
    Frame,
    FrameError,
    bytes_of,
    from_json,
    pack,
    to_json,
    unpack,
)

PLAIN = bytearray(pack(Frame(kind=1)))


def changed(offset: int, layout: str, value: object) -> bytes:
    """The header of a plain frame with one field overwritten."""
    head = PLAIN.copy()
    struct.pack_into(layout, head, offset, value)
    return bytes(head)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_field_comes_back(dtype):
    frame = Frame(
        kind=255, dtype=dtype, elements=7, generation=2**64 - 1, sequence=2**40, weight=-0.1, a=-1, b=-(2**63)
    )
    assert unpack(pack(frame)) == (frame, 0)
    assert frame.tensor_bytes == 7 * dtype.itemsize


def test_the_layout_is_fixed():
    assert HEADER_BYTES == len(PLAIN) == 64
    assert bytes(PLAIN[:16]) == b"MHnd\x01\x01\x08\x00" + bytes(8)
    assert pack(Frame(kind=0, blob=b"xyz"))[8:12] == (3).to_bytes(4, "little")


def test_the_blob_travels_behind():
    frame = Frame(kind=3, blob=b"bits")
    received, length = unpack(pack(frame))
    assert received == dataclasses.replace(frame, blob=b"")
    assert length == 4
    received.blob = b"bits"
    assert received == frame


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "64 bytes"),
        (bytes(PLAIN) + b"x", "64 bytes"),
        (changed(0, "4s", b"GET "), "began with b'GET"),
        (changed(4, "B", 2), "version 1"),
        (changed(6, "B", len(DTYPES)), "dtype"),
        (changed(7, "B", 1), "zeros"),
        (changed(12, "<I", 1), "zeros"),
        (changed(8, "<I", MAX_BLOB_BYTES + 1), "beyond the limits"),
        (changed(32, "<Q", MAX_TENSOR_BYTES + 1), "beyond the limits"),
        (changed(32, "<q", -1), "beyond the limits"),
        (changed(40, "<d", float("nan")), "finite"),
        (changed(40, "<d", float("inf")), "finite"),
    ],
)
def test_a_wrong_header_is_refused(head, message):
    with pytest.raises(FrameError, match=message):
        unpack(head)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.binary(max_size=200))
def test_garbage_is_a_frame_error(data):
    with pytest.raises(FrameError):  # 2^-40 of all headers would pass
        unpack(data)


@given(st.binary(min_size=58, max_size=58))
def test_behind_a_right_beginning_garbage_is_an_error_or_within_the_limits(data):
    head = bytes(PLAIN[:6]) + data
    try:
        frame, length = unpack(head)
    except FrameError:
        return
    assert frame.tensor_bytes <= MAX_TENSOR_BYTES
    assert length <= MAX_BLOB_BYTES
    assert unpack(pack(dataclasses.replace(frame, blob=bytes(length)))) == (frame, length)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": 256},
        {"kind": -1},
        {"elements": -1},
        {"elements": MAX_TENSOR_BYTES + 1},
        {"a": 2**63},
        {"weight": float("nan")},
        {"dtype": torch.float8_e5m2},
        {"blob": bytes(MAX_BLOB_BYTES + 1)},
    ],
)
def test_what_no_header_can_say_is_bad_input(fields):
    with pytest.raises(BadInput, match="frame"):
        pack(Frame(**{"kind": 1, **fields}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_of_a_tensor_is_not_copied(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    view = bytes_of(tensor)
    assert view.nbytes == len(view) == tensor.nbytes
    view[:] = bytes([1]) * len(view)
    assert bool(tensor.ne(0).all())


def test_the_memory_of_nothing_of_one_number_and_of_a_leaf():
    assert len(bytes_of(torch.zeros(0))) == 0
    assert len(bytes_of(torch.tensor(1.0))) == 4
    assert len(bytes_of(torch.nn.Parameter(torch.zeros(3)))) == 12


@pytest.mark.parametrize("tensor", [torch.zeros(4)[::2], torch.zeros(2, device="meta"), torch.zeros(2).cfloat().conj()])
def test_other_memory_is_bad_input(tensor):
    with pytest.raises(BadInput, match="contiguous"):
        bytes_of(tensor)


def test_json_there_and_back():
    assert from_json(to_json({"é": [1, None]})) == {"é": [1, None]}


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": torch.zeros(1)}])
def test_what_is_no_json_is_bad_input(value):
    with pytest.raises(BadInput, match="JSON"):
        to_json(value)


@pytest.mark.parametrize(
    "blob",
    [b"", b"{", b"[1]", b"3", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"],
)
def test_a_blob_that_is_no_object_is_a_frame_error(blob):
    with pytest.raises(FrameError, match="JSON object"):
        from_json(blob)


@given(st.binary(max_size=200))
def test_any_blob_is_an_object_or_a_frame_error(blob):
    try:
        assert from_json(blob) == json.loads(blob)
    except FrameError:
        return
