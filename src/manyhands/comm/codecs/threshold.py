"""threshold: plus or minus one number, for the values that are beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, as_uint8, check_number, check_places_fit, numbers_of
from manyhands.comm.codecs.topk import check_places
from manyhands.errors import BadInput

_ENTRY = 4  # bytes
_NOT_FINITE = 0xFFFFFFFF


@dataclass(frozen=True)
class Threshold(Codec):
    """Values of magnitude `tau` and more are sent as +tau or -tau, all others as 0. What is left waits in the residual.

    Source: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Nikko Strom, 2015. Deeplearning4j's
    gradient sharing sends the same, and clips the residual to [-clip·tau, clip·tau], every fifth step by default, so
    that no value is sent for more than `clip` steps after its gradient; its default is 5.

    Deviations: residuals are clipped at every step; tau is fixed, where Deeplearning4j may adapt it.

    Payload of 4 bytes a value that is sent: 2·place + (1 if negative), ascending; so n is below 2^31. Where something
    is not finite: 0xFFFFFFFF, then 2·place of what is not, which comes out as NaN.
    """

    tau: float
    """In the units of what is sent. Lower it when the loss stalls, raise it where the link is slow."""
    clip: float | None = 5.0
    """The most steps for which a value may go on being sent; the rest is lost. None: nothing is lost."""

    form: ClassVar[str] = "threshold:TAU[:CLIP]"
    source: ClassVar[str] = "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Strom, 2015"

    def __post_init__(self) -> None:
        check_number(self.form, self.tau, "a number above 0", self.tau > 0)
        if self.clip is not None:
            check_number(self.form, self.clip, "a clip of at least 1, or none", self.clip >= 1)

    def clip_(self, residual: Tensor) -> None:
        """What a residual loses."""
        if self.clip is not None:
            residual.clamp_(-self.clip * self.tau, self.clip * self.tau)

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        check_places_fit(self.form, len(vector))
        vector = vector.detach().cpu()
        if not bool(vector.sum().isfinite()):
            strange = (~vector.isfinite()).nonzero().reshape(-1)
            if len(strange):
                return _bytes(torch.cat([torch.tensor([_NOT_FINITE]), strange * 2]))
        places = (vector.abs() >= self.tau).nonzero().reshape(-1)
        return _bytes(places * 2 + (vector[places] < 0))

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        entries = numbers_of(payload, 0, len(payload) // _ENTRY, torch.int32).to(torch.int64) & _NOT_FINITE
        strange = len(entries) > 0 and int(entries[0]) == _NOT_FINITE
        entries = entries[1:] if strange else entries
        places, negative = entries >> 1, (entries & 1).bool()
        check_places(places, n, self.form)
        if strange and (not len(places) or bool(negative.any())):
            raise BadInput(f"{self.form}: a payload that is not finite says where; got {len(places)} places")
        tau = torch.tensor(float("nan") if strange else self.tau, dtype=dtype)
        vector = torch.zeros(n, dtype=dtype)
        vector[places] = torch.where(negative, -tau, tau)
        return vector

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        return range(0, (n + 1) * _ENTRY + 1, _ENTRY)


def _bytes(entries: Tensor) -> Tensor:
    """int64 -> four bytes each."""
    return as_uint8(torch.where(entries >= 1 << 31, entries - (1 << 32), entries).to(torch.int32))
