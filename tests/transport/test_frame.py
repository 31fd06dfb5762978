"""Frames: what a header says, and that garbage says nothing but FrameError (test_transport_fuzzed has more of it)."""

import dataclasses
import struct

import torch

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
from refusals import refused

PLAIN = bytearray(pack(Frame(kind=1)))


def changed(offset: int, layout: str, value: object) -> bytes:
    """The header of a plain frame with one field overwritten."""
    head = PLAIN.copy()
    struct.pack_into(layout, head, offset, value)
    return bytes(head)


def test_every_field_comes_back():
    for dtype in DTYPES:
        numbers = {"generation": 2**64 - 1, "sequence": 2**40, "weight": -0.1, "a": -1, "b": -(2**63)}
        frame = Frame(kind=255, dtype=dtype, elements=7, **numbers)
        assert unpack(pack(frame)) == (frame, 0)
        assert frame.tensor_bytes == 7 * dtype.itemsize
    frame = Frame(kind=3, blob=b"bits")
    received, length = unpack(pack(frame))
    assert (received, length) == (dataclasses.replace(frame, blob=b""), 4), "the blob travels behind"
    received.blob = b"bits"
    assert received == frame


def test_the_layout_is_fixed():
    assert HEADER_BYTES == len(PLAIN) == 64
    assert bytes(PLAIN[:16]) == b"MHnd\x01\x01\x08\x00" + bytes(8)
    assert pack(Frame(kind=0, blob=b"xyz"))[8:12] == (3).to_bytes(4, "little")


def test_a_wrong_header_is_refused():
    for head, message in [
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
    ]:
        refused(message, unpack, head, kind=FrameError)


def test_what_no_header_can_say_is_bad_input():
    for name, value in [
        ("kind", 256),
        ("kind", -1),
        ("elements", -1),
        ("elements", MAX_TENSOR_BYTES + 1),
        ("a", 2**63),
        ("weight", float("nan")),
        ("dtype", torch.float8_e5m2),
        ("blob", bytes(MAX_BLOB_BYTES + 1)),
    ]:
        refused("frame", pack, Frame(**{"kind": 1, name: value}))


def test_the_memory_of_a_tensor_is_not_copied():
    for dtype in DTYPES:
        tensor = torch.zeros(2, 3, dtype=dtype)
        view = bytes_of(tensor)
        assert view.nbytes == len(view) == tensor.nbytes, dtype
        view[:] = bytes([1]) * len(view)
        assert bool(tensor.ne(0).all()), dtype
    several = (torch.zeros(0), torch.tensor(1.0), torch.nn.Parameter(torch.zeros(3)))
    assert [len(bytes_of(tensor)) for tensor in several] == [0, 4, 12]
    for tensor in (torch.zeros(4)[::2], torch.zeros(2, device="meta"), torch.zeros(2).cfloat().conj()):
        refused("contiguous", bytes_of, tensor)


def test_json_there_and_back():
    assert from_json(to_json({"é": [1, None]})) == {"é": [1, None]}
    for value in ({"x": float("nan")}, {"x": torch.zeros(1)}):
        refused("JSON", to_json, value)
    deep = (b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}")
    for blob in (b"", b"{", b"[1]", b"3", b"\xff\xfe{}", *deep):
        refused("JSON object", from_json, blob, kind=FrameError)
