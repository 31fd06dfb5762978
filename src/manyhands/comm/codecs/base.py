"""The contract of a codec: a vector as few bytes, and back. Codecs are pure: what they must remember is the caller's.

A payload is a uint8 tensor on the CPU with a layout that each codec's docstring gives, numbers little-endian. What
comes from a network is checked by `lengths` before memory is taken for it, and by `decode` before it is believed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.comm.group import Group, MeanResult
from manyhands.errors import BadInput


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a matrix lies in the vector, row after row, and PowerSGD's guess of its row space, which it overwrites."""

    start: int
    rows: int
    columns: int
    guess: Tensor  # [columns, rank]


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller keeps for codecs that need more than the vector."""

    draws: torch.Generator | None = None  # on the CPU; for codecs that round at random
    matrices: Sequence[Matrix] = ()  # in the order of `start`; for codecs that look at rows and columns


NO_HINTS = Hints()


class Codec(ABC):
    """See the module's docstring. Subclasses are frozen dataclasses: their fields are the numbers behind the name."""

    form: ClassVar[str]  # how it is written: "topk:FRACTION"
    source: ClassVar[str]  # title, authors, year
    biased: ClassVar[bool] = True  # what is decoded is not the vector in expectation: it wants error feedback
    keeps_zeros: ClassVar[bool] = True  # a vector of zeros, or its part, is decoded as zeros

    @property
    def name(self) -> str:
        """As in CODECS: what stands before the numbers."""
        return self.form.partition(":")[0]

    @abstractmethod
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        """[n] -> the payload, uint8. What is not finite in the vector is not finite in what is decoded."""

    @abstractmethod
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The payload of an [n] of this dtype -> [n], on the CPU. BadInput for what `encode` cannot have given."""

    @abstractmethod
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        """All lengths in bytes that the payload of an [n] may have."""

    def check_length(self, length: int, n: int, dtype: torch.dtype) -> None:
        """BadInput unless a payload of an [n] may have this length."""
        lengths = self.lengths(n, dtype)
        if length not in lengths:
            expected = f"{lengths[0]} bytes"
            if len(lengths) > 1:
                expected = f"{lengths[0]} to {lengths[-1]} bytes, in steps of {lengths.step}"
            raise BadInput(
                f"{self.form}: {n} elements of {dtype} must arrive as {expected}; {length} bytes arrived: use "
                "the same codec with the same numbers, and the same version of manyhands, on all workers"
            )


class LinearCodec(Codec):
    """A codec whose payloads can be averaged as they are: the mean of what is decoded is decoded from their mean."""

    @abstractmethod
    def mean_(
        self, group: Group, vector: Tensor, weight: float, bits: int, hints: Hints = NO_HINTS, own: Tensor | None = None
    ) -> MeanResult:
        """As `compressed_mean_`, which calls it on groups of several ranks, `own` included."""


def check_places_fit(form: str, n: int) -> None:
    """BadInput for a vector whose places are no 32-bit numbers."""
    if n >= 1 << 31:
        raise BadInput(
            f"{form} can send at most {(1 << 31) - 1:,} elements at once, and this vector has {n:,}: use more server "
            "shards (servers=), or another codec"
        )


def as_uint8(tensor: Tensor) -> Tensor:
    """The elements in order as uint8 [bytes], on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def numbers_of(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers of a dtype that begin at byte `start` of a payload, in memory of their own."""
    return payload[start : start + count * dtype.itemsize].clone().view(dtype)


def computed(vector: Tensor) -> Tensor:
    """The vector in the dtype in which codecs compute: 16-bit numbers in float32."""
    return vector.float() if vector.dtype.itemsize < 4 else vector


def check_number(form: str, value: object, what: str, good: bool) -> None:
    """BadInput unless `value` is a finite number for which `good` holds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not good:
        raise BadInput(f"{form} takes {what}; got {value!r}")
