"""int8: whole numbers from -127 to 127, times a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, as_uint8, computed, numbers_of
from manyhands.errors import BadInput

_MOST = 127


@dataclass(frozen=True)
class Int8(Codec):
    """Every value becomes scale·q, q the nearest whole number (half to even); scale is the largest magnitude / 127.

    Source: 8-Bit Approximations for Parallelism in Deep Learning, Tim Dettmers, 2016, whose linear form this is.
    Rounding is not at random: with error feedback nothing is lost.

    Payload of n + b bytes: the scale in the vector's dtype of b bytes, then a signed byte a value.
    """

    form: ClassVar[str] = "int8"
    source: ClassVar[str] = "8-Bit Approximations for Parallelism in Deep Learning, Dettmers, 2016"

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        values = computed(vector.detach().cpu())
        largest = values.abs().amax() if len(values) else values.new_zeros(())
        scale = (largest / _MOST).to(vector.dtype)
        codes = (values / computed(scale).clamp_min(torch.finfo(values.dtype).tiny)).nan_to_num(0, 0, 0).round_()
        return torch.cat([as_uint8(scale.reshape(1)), as_uint8(codes.clamp_(-_MOST, _MOST).to(torch.int8))])

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        scale = computed(numbers_of(payload, 0, 1, dtype))
        codes = numbers_of(payload, dtype.itemsize, n, torch.int8)
        if n and int(codes.min()) < -_MOST:
            raise BadInput(f"{self.form}: a payload's numbers must be at least -{_MOST}; got {int(codes.min())}")
        return (codes.to(scale.dtype) * scale).to(dtype)

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        return range(n + dtype.itemsize, n + dtype.itemsize + 1)
