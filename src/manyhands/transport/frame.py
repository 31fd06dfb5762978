"""A frame: a fixed header of HEADER_BYTES, a small blob, and the raw bytes of a tensor. No pickle, no schema that
grows.

Header (little-endian): magic, version, kind, dtype, a zero, blob length, four zeros, generation, sequence, elements,
weight, two numbers. All of it is checked by `unpack` before any memory is taken; the receiver compares kind, dtype and
elements with what it expects.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import BadInput

HEADER_BYTES = 64
MAX_BLOB_BYTES = 1 << 20  # bits of a million parameters' worth, a hello, a list of peers; never a tensor
MAX_TENSOR_BYTES = 1 << 40

_MAGIC, _VERSION = b"MHnd", 1
_HEADER = struct.Struct("<4sBBBBIIQQQdqq")
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
)
_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
_ITEMSIZE = tuple(dtype.itemsize for dtype in DTYPES)


class FrameError(Exception):
    """The bytes are no valid frame here. The connection is closed, and the peer is logged once."""


@dataclass(slots=True, kw_only=True)
class Frame:
    """A frame without its tensor bytes."""

    kind: int  # what it means: each protocol has its own numbers, 0..255; 0 is the hello's
    dtype: torch.dtype = torch.uint8
    elements: int = 0  # of the tensor that follows
    generation: int = 0
    sequence: int = 0
    weight: float = 0.0
    a: int = 0  # two signed 64-bit numbers of the protocol's
    b: int = 0
    blob: bytes = b""  # bits, or JSON

    @property
    def tensor_bytes(self) -> int:
        """Bytes that follow the blob."""
        return self.elements * self.dtype.itemsize


def pack(frame: Frame) -> bytes:
    """The header; the blob and the tensor's bytes follow it. BadInput for what no header can say."""
    return header(frame, frame.dtype, frame.elements, frame.generation)


def header(frame: Frame, dtype: torch.dtype, elements: int, generation: int) -> bytes:
    """As `pack`, with these instead of the frame's own."""
    number = _NUMBER.get(dtype)
    if number is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise BadInput(f"a frame can carry tensors of {names}; got {dtype}: convert or view it as one of these first")
    size = len(frame.blob)
    if size > MAX_BLOB_BYTES or elements * _ITEMSIZE[number] > MAX_TENSOR_BYTES or not math.isfinite(frame.weight):
        raise BadInput(
            f"a frame can carry a blob of at most {MAX_BLOB_BYTES} bytes, a tensor of at most {MAX_TENSOR_BYTES} and a "
            f"finite weight; got {size} and {elements * _ITEMSIZE[number]} bytes, weight {frame.weight}"
        )
    try:
        return _HEADER.pack(
            *(_MAGIC, _VERSION, frame.kind, number, 0, size, 0),
            *(generation, frame.sequence, elements, frame.weight, frame.a, frame.b),
        )
    except struct.error as error:
        raise BadInput(f"a number of {frame} does not fit into a frame's header: {error}") from error


def unpack(header: bytes | bytearray | memoryview) -> tuple[Frame, int]:
    """The frame without its blob, and the blob's length, at most MAX_BLOB_BYTES.

    FrameError for a wrong magic or version, an unknown dtype, a length beyond its limit or a weight that is not finite.
    """
    if len(header) != HEADER_BYTES:
        raise FrameError(f"a frame's header must have {HEADER_BYTES} bytes; got {len(header)}")
    magic, version, kind, number, zero, size, zeros, *numbers = _HEADER.unpack(header)
    generation, sequence, elements, weight, a, b = numbers
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(f"expected a frame of manyhands, version {_VERSION}; it began with {bytes(header[:5])!r}")
    if number >= len(DTYPES) or zero or zeros:
        raise FrameError(
            f"a frame's header must hold a dtype below {len(DTYPES)} and zeros; got {number}, {zero}, {zeros}"
        )
    if size > MAX_BLOB_BYTES or elements * _ITEMSIZE[number] > MAX_TENSOR_BYTES:
        raise FrameError(f"a frame of {size} bytes and {elements} {DTYPES[number]} is beyond the limits of a frame")
    if not math.isfinite(weight):
        raise FrameError(f"a frame's weight must be finite; got {weight}")
    frame = Frame(
        kind=kind,
        dtype=DTYPES[number],
        elements=elements,
        generation=generation,
        sequence=sequence,
        weight=weight,
        a=a,
        b=b,
    )
    return frame, size


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype and shape, without a copy. BadInput for any other tensor.

    `Channel` takes such a view in place of the tensor: for slices that travel again and again, make it once.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise BadInput(
            f"a channel can carry only contiguous tensors on the CPU; got strides {tensor.stride()} on "
            f"{tensor.device}: give tensor.cpu().contiguous()"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def to_json(value: Any) -> bytes:
    """A blob. BadInput for what JSON cannot say (NaN too)."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"a frame's blob is JSON; {error} in {value!r:.200}") from error


def from_json(blob: bytes | memoryview) -> dict[str, Any]:
    """The object in a blob. FrameError for whatever is none."""
    try:
        value = json.loads(bytes(blob))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"expected a JSON object; got {bytes(blob[:40])!r} ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise FrameError(f"expected a JSON object; got {bytes(blob[:40])!r}")
    return value
