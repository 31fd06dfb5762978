"""topk: the largest values, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, as_uint8, check_number, check_places_fit, numbers_of
from manyhands.errors import BadInput

PLACE = 4  # bytes


@dataclass(frozen=True)
class TopK(Codec):
    """The k values of largest magnitude as they are, k = max(1, ceil(fraction·n)); all others are 0.

    Source: Sparsified SGD with Memory, Sebastian U. Stich, Jean-Baptiste Cordonnier, Martin Jaggi, 2018; with error
    feedback. Deep Gradient Compression, Lin, Han, Mao, Wang, Dally, 2018, sends the same, and corrects and clips
    momentum and warms up the fraction besides, which is not done here.

    Payload of k·(b + 4) bytes: k values in the vector's dtype of b bytes, then their k places as 32-bit numbers,
    ascending.
    """

    fraction: float
    """Of the values that are sent. Lower it where the link is slow, raise it when the loss falls too slowly."""

    form: ClassVar[str] = "topk:FRACTION"
    source: ClassVar[str] = "Sparsified SGD with Memory, Stich, Cordonnier, Jaggi, 2018"

    def __post_init__(self) -> None:
        check_number(self.form, self.fraction, "a fraction above 0 and up to 1", 0 < self.fraction <= 1)

    def count(self, n: int) -> int:
        """k of n values."""
        return min(n, max(1, math.ceil(Fraction(str(self.fraction)) * n)))

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        check_places_fit(self.form, len(vector))
        # Of equal ones the choice is torch's. NaN counts as largest.
        places = torch.topk(vector.abs(), self.count(len(vector)), sorted=False).indices.sort().values
        return torch.cat([as_uint8(vector[places]), as_uint8(places.to(torch.int32))])

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        count = self.count(n)
        values = numbers_of(payload, 0, count, dtype)
        places = numbers_of(payload, count * dtype.itemsize, count, torch.int32).to(torch.int64)
        check_places(places, n, self.form)
        vector = torch.zeros(n, dtype=dtype)
        vector[places] = values
        return vector

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        length = self.count(n) * (dtype.itemsize + PLACE)
        return range(length, length + 1)


def check_places(places: Tensor, n: int, form: str) -> None:
    """BadInput unless places are ascending, each once, in range(n)."""
    if len(places) and (int(places[0]) < 0 or int(places[-1]) >= n or not bool((places[1:] > places[:-1]).all())):
        raise BadInput(f"{form}: a payload's places must be ascending in range({n}), each once; got others")
