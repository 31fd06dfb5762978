"""Codecs: a gradient or an update as fewer bytes. `codec_of("topk:0.01")` is one; their names are in CODECS."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, LinearCodec, Matrix
from manyhands.comm.codecs.bf16 import BF16
from manyhands.comm.codecs.int8 import Int8
from manyhands.comm.codecs.onebit import OneBit
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.comm.codecs.qsgd import QSGD
from manyhands.comm.codecs.threshold import Threshold
from manyhands.comm.codecs.topk import TopK
from manyhands.errors import BadInput, UnknownName

__all__ = ["CODECS", "NO_HINTS", "Codec", "Hints", "LinearCodec", "Matrix", "codec_of"]

CODECS: dict[str, type[Codec]] = {
    "topk": TopK,
    "onebit": OneBit,
    "threshold": Threshold,
    "powersgd": PowerSGD,
    "qsgd": QSGD,
    "bf16": BF16,
    "int8": Int8,
}
"""All codecs by name."""


@lru_cache(maxsize=64)
def codec_of(text: str) -> Codec | None:
    """The codec that a text names, its numbers behind colons; None for "none". UnknownName, BadInput."""
    name, *numbers = text.split(":")
    if text == "none":
        return None
    kind = CODECS.get(name)
    if kind is None:
        raise UnknownName(
            f"no codec {name!r}: choose none (no compression) or one of "
            f"{', '.join(codec.form for codec in CODECS.values())}"
        )
    try:
        return kind(*map(_number, numbers))
    except TypeError:  # too many numbers, too few, or none where one belongs
        raise BadInput(f"cannot read the codec {text!r}: write it as {kind.form}") from None


def _number(text: str) -> float | int | None:
    if text == "none":
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise BadInput(f"a codec's name is followed by numbers, such as topk:0.01; got {text!r}")
