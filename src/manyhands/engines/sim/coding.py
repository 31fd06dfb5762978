"""What a codec costs: seconds a number of the vector, and seconds a byte of what stands for it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Self

from manyhands.engines.sim.quantities import expect_number, read_seconds, shown
from manyhands.errors import BadInput


@dataclass(frozen=True)
class Coding:
    """One codec's. Codecs whose payloads are always of one length need no seconds a byte.

    `str()` gives what `parse` reads. Raises BadInput for numbers that make no sense.
    """

    encode: float = 0.0  # seconds a number that is encoded, with residuals and what else the sender does for it
    decode: float = 0.0  # seconds a number, for each payload that is decoded
    encode_byte: float = 0.0  # seconds a byte of the payload
    decode_byte: float = 0.0  # seconds a byte of each payload

    def __post_init__(self) -> None:
        for entry in fields(self):
            expect_number(getattr(self, entry.name), f"a codec's {entry.name} (seconds)", least=0)

    @classmethod
    def parse(cls, text: str, what: str) -> Self:
        """`15ns/1ns`, or `1ns/0/12ns/7ns`: encode/decode, a number, then a byte. `what` names it in messages."""
        parts = text.split("/")
        if len(parts) not in (2, 4):
            raise BadInput(
                f"{what} is seconds to encode/to decode a number, and, with two more, a byte of what is sent; got {text!r}: "
                "write 15ns/1ns, or 1ns/0.1ns/12ns/7ns"
            )
        return cls(*(read_seconds(part, what) for part in parts))

    def __str__(self) -> str:
        values = astuple(self)
        return "/".join(map(shown, values if any(values[2:]) else values[:2]))

    def times(self, factor: float) -> Coding:
        """On a worker that is so many times slower."""
        return self if factor == 1 else Coding(*(factor * value for value in astuple(self)))

    def encoding(self, n: int, nbytes: int) -> float:
        """Seconds until [n] is a payload of so many bytes."""
        return self.encode * n + self.encode_byte * nbytes

    def decoding(self, n: int, nbytes: int, payloads: int = 1) -> float:
        """Seconds until so many payloads, of so many bytes together, are the mean [n]."""
        return self.decode * n * payloads + self.decode_byte * nbytes


FREE = Coding()
