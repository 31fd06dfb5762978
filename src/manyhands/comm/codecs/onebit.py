"""onebit: the signs, and one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, as_uint8, computed, numbers_of


@dataclass(frozen=True)
class OneBit(Codec):
    """Every value becomes +scale or -scale, by its sign (0 counts as positive); scale is the mean magnitude.

    Source: 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs,
    Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, 2014: one bit a value, with error feedback.

    Deviation: one scale for all, as in Error Feedback Fixes SignSGD and other Gradient Compression Schemes, Sai
    Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi, 2019, where the paper has two for each
    column.

    Payload of ceil(n/8) + b bytes: the scale in the vector's dtype of b bytes, then a bit a value, 1 for a negative
    one.
    """

    form: ClassVar[str] = "onebit"
    keeps_zeros: ClassVar[bool] = False
    source: ClassVar[str] = "1-Bit Stochastic Gradient Descent, Seide, Fu, Droppo, Li, Yu, 2014"

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        scale = computed(vector).abs().sum() / max(1, len(vector))
        signs = np.packbits((vector < 0).cpu().numpy(), bitorder="little")
        return torch.cat([as_uint8(scale.to(vector.dtype).reshape(1)), torch.from_numpy(signs)])

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        scale = numbers_of(payload, 0, 1, dtype)
        signs = np.unpackbits(payload[dtype.itemsize :].numpy(), count=n, bitorder="little")
        return torch.where(torch.from_numpy(signs).bool(), -scale, scale)

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        length = dtype.itemsize + -(-n // 8)
        return range(length, length + 1)
