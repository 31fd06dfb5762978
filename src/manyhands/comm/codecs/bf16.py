"""bf16: the upper half of a float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Hints, LinearCodec, as_uint8, computed, numbers_of
from manyhands.comm.group import Group, MeanResult


@dataclass(frozen=True)
class BF16(LinearCodec):
    """Every value as the nearest bfloat16: the range of a float32, 8 bits of precision.

    Source: Mixed Precision Training, Paulius Micikevicius, Sharan Narang, Jonah Alben, Gregory Diamos, Erich Elsen, et
    al., 2018, for 16 bits; A Study of BFLOAT16 for Deep Learning Training, Kalamkar et al., 2019, for these.

    The mean is the group's own of 16-bit numbers: rounded once (twice between hosts). Whoever rounds a part of the mean
    takes what that lost from what it sent, so that error feedback makes up for it, as with the server of DoubleSqueeze:
    Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated Compression, Tang et al., 2019.

    Payload of 2·n bytes.
    """

    form: ClassVar[str] = "bf16"
    source: ClassVar[str] = "A Study of BFLOAT16 for Deep Learning Training, Kalamkar et al., 2019"

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        return as_uint8(vector.to(torch.bfloat16))

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        return numbers_of(payload, 0, n, torch.bfloat16).to(dtype)

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        return range(2 * n, 2 * n + 1)

    @override
    def mean_(
        self, group: Group, vector: Tensor, weight: float, bits: int, hints: Hints = NO_HINTS, own: Tensor | None = None
    ) -> MeanResult:
        rounded = vector.to(torch.bfloat16, copy=True)
        lost = None if own is None else torch.zeros_like(computed(vector))
        if own is not None:
            own.copy_(rounded)
        group.encoded(self.name, len(vector), rounded.nbytes)
        total = group.mean_(rounded, weight, bits, lost)
        if own is not None and lost is not None:
            if not weight:
                own.zero_()
            # The rounding is to come back in a later mean through this rank's share alone. With the same weights it
            # comes back whole. A share far below the average is taken for passing (a last, short batch): with a usual
            # share the next time, it would come back many times too large. So it counts as half the average at least.
            own.sub_(lost, alpha=min(total.weight / weight, 2.0 * group.size) if weight else group.size)
        if total.weight:
            vector.copy_(rounded)
            group.decoded(self.name, len(vector), rounded.nbytes)
        return total
