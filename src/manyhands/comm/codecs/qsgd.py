"""qsgd: a few bits a value, rounded at random so that the mean is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, as_uint8, check_number, computed, numbers_of
from manyhands.errors import BadInput

BUCKET = 512


@dataclass(frozen=True)
class QSGD(Codec):
    """In each bucket of 512 values, |v| becomes scale·level/s, level one of 0 … s = 2^(bits - 1) - 1, rounded up or
    down at random: right on average.

    Source: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, Dan Alistarh, Demjan Grubic, Jerry
    Li, Ryota Tomioka, Milan Vojnovic, 2017. Its scale here is the largest magnitude of a bucket, as in its experiments,
    where its theorems have the norm. Unbiased: it goes without error feedback, as in the paper.

    Deviation: levels are packed in as many bits as they take, where the paper's Elias code makes small ones shorter.

    Payload of b·ceil(n/512) + ceil(n·bits/8) bytes: the scales in the vector's dtype of b bytes, then the levels,
    lowest bit first, of each value the level and above it the sign.
    """

    bits: int
    """A value, from 2 to 8. Lower it where the link is slow, raise it when noise spoils the loss."""

    form: ClassVar[str] = "qsgd:BITS"
    source: ClassVar[str] = "QSGD, Alistarh, Grubic, Li, Tomioka, Vojnovic, 2017"
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number(self.form, self.bits, "a whole number from 2 to 8", 2 <= self.bits <= 8 and self.bits % 1 == 0)

    @property
    def levels(self) -> int:
        """s, the highest one."""
        return (1 << self.bits - 1) - 1

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        if hints.draws is None:
            raise BadInput(f"{self.form} rounds at random: give Hints(draws=torch.Generator().manual_seed(…))")
        n, dtype = len(vector), vector.dtype
        values = computed(vector.detach().cpu())
        buckets = torch.nn.functional.pad(values, (0, -n % BUCKET)).reshape(-1, BUCKET)  # [ceil(n/512), 512]
        scales = buckets.abs().amax(1).to(dtype)
        wide = computed(scales).clamp_min(torch.finfo(values.dtype).tiny)
        exact = (buckets.abs() / wide[:, None] * self.levels).reshape(-1)[:n]
        draws = torch.rand(n, generator=hints.draws, dtype=exact.dtype)
        levels = torch.floor(exact + draws).nan_to_num(0, 0, 0).clamp_(0, self.levels).to(torch.uint8)
        codes = levels | (values < 0).to(torch.uint8) << self.bits - 1
        lanes = np.unpackbits(codes.numpy()[:, None], axis=1, count=self.bits, bitorder="little")
        return torch.cat([as_uint8(scales), torch.from_numpy(np.packbits(lanes, bitorder="little"))])

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        count = -(-n // BUCKET)
        scales = computed(numbers_of(payload, 0, count, dtype))
        packed = payload[count * dtype.itemsize :].numpy()
        lanes = np.unpackbits(packed, count=n * self.bits, bitorder="little").reshape(n, self.bits)
        codes = torch.from_numpy(np.packbits(lanes, axis=1, bitorder="little")[:, 0] if n else np.zeros(0, np.uint8))
        top = 1 << self.bits - 1
        signs = 1 - 2 * (codes >= top).to(scales.dtype)
        levels = (codes & top - 1).to(scales.dtype) / self.levels
        return (signs * levels * scales.repeat_interleave(BUCKET)[:n]).to(dtype)

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        length = -(-n // BUCKET) * dtype.itemsize + -(-n * self.bits // 8)
        return range(length, length + 1)
