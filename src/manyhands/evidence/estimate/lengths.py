"""What the stand-in's messages stand for: its vector [d] for the real one [D'], and one exchange for all that a codec takes.

Times in the simulator follow from lengths alone. Whatever is sent of the stand-in's vector is costed with the length of
what it stands for; numbers and words that are no part of it (votes, counts, barriers) are what they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from manyhands.comm.checks import json_bytes, slice_of
from manyhands.comm.codecs import Codec, codec_of
from manyhands.comm.codecs.base import LinearCodec
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.engines.sim.compute import Coding, Compute
from manyhands.errors import Unsupported
from manyhands.evidence.estimate.shape import Matrix, Shape
from manyhands.evidence.estimate.stand_in import CODEC, codec_named
from manyhands.replica.layout import ALIGNMENT_BYTES
from manyhands.replica.replica import CONTROL_BITS
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Strategy

CODEC_ITEM = 2  # bytes of a number of the stand-in's codec
_COUNT_ITEM = 8  # of an optimizer's counts, which are gathered as float64
_HEAD = 4  # of a number in the table of a PowerSGD payload


class Piece(NamedTuple):
    """One collective: of `elements` numbers of `item` bytes each; of words, so many bytes over all ranks."""

    name: Literal["mean", "all_gather", "words"]
    elements: int
    item: int = 1


class Lengths:
    """Of one strategy, without its stand-in's codec, on so many workers."""

    def __init__(self, shape: Shape, strategy: Strategy, *, workers: int, servers: int = 1, rows: float = 1) -> None:
        """servers: shards asked for, where the strategy has a server. rows: of a worker's tick.

        Unsupported for a codec whose messages are as long as the gradients' values have it.
        """
        spec = strategy.server()
        self._served = spec is not None
        self._shards = 1 if spec is None or spec.one_shard else servers
        self._shape, self._workers = shape, workers
        unit = max(1, ALIGNMENT_BYTES // shape.item)
        self.own = unit * self._shards * max(1, int(getattr(strategy, "streaming", 0)))
        """d: how many numbers the stand-in's model has; its shards and fragments are equally long."""
        self.factor = shape.padded / self.own
        self._codec = codec_of(codec_named(strategy)) if workers > 1 else None
        self._parts = [slice_of(shard, self._shards, shape.padded) for shard in range(self._shards)]
        self._payloads = [payload_bytes(self._codec, shape, *part) for part in self._parts] if self._codec else []
        self._mean = self._gradient(strategy, rows)
        part = self.own // self._shards
        self._pulls = [{part * shape.item: (high - low) * shape.item} for low, high in self._parts]
        self._pushes = list(self._pulls)  # by shard: bytes of the stand-in's part, and what they stand for
        if self._codec:
            self._pushes = [
                {**whole, CODEC_ITEM * part: n} for whole, n in zip(self._pulls, self._payloads, strict=True)
            ]

    # -- collectives -------------------------------------------------------------------------------------------------

    def mean(self, elements: int, item: int) -> list[Piece]:
        """What a mean of so many numbers stands for, one after the other."""
        if elements == self.own and item == (CODEC_ITEM if self._codec else self._shape.item):
            return self._mean
        return [Piece("mean", self.real(elements), item)]

    def gathered(self, elements: int, item: int) -> int:
        """Numbers that an all-gather of so many stands for: of an optimizer's counts, those of all parameters."""
        if item == _COUNT_ITEM and elements < self.own:
            return elements * self._shape.parameters
        return self.real(elements)

    def real(self, elements: int) -> int:
        """Numbers that so many of the stand-in's vector stand for; few numbers are no part of it."""
        return round(elements * self.factor) if elements * self._shape.item >= ALIGNMENT_BYTES else elements

    def _gradient(self, strategy: Strategy, rows: float) -> list[Piece]:
        """Of a mean of the whole vector; with a codec, all that it exchanges for one."""
        shape, codec = self._shape, self._codec
        if codec is None:
            overlaps = isinstance(strategy, AllReduce) and strategy.overlap
            return [Piece("mean", n, shape.item) for n in (shape.slices if overlaps else (shape.padded,))]
        if isinstance(codec, PowerSGD):
            return [Piece("mean", n, shape.item) for n in _factors(codec, shape.matrices, shape.padded)]
        if isinstance(codec, LinearCodec):
            return [Piece("mean", shape.padded, CODEC_ITEM)]
        payload = self._payloads[0]
        bits, window = CONTROL_BITS + shape.parameters, 1
        if not isinstance(strategy, AllReduce):  # updates of a window, whose bits say nothing of single parameters
            bits, window = 1, int(getattr(strategy, "period", 1))
        words = len(json_bytes([float(round(rows * window)), "f" * -(-bits // 4), payload]))
        return [Piece("words", self._workers * words), Piece("all_gather", payload)]

    # -- messages ----------------------------------------------------------------------------------------------------

    def message(self, source: int, target: int, nbytes: int) -> int:
        """Bytes that a message stands for; nodes as in `Wires`."""
        node = source if source < target else target
        if node >= 0:
            return self._bytes(nbytes)
        known = self._pushes if target < 0 else self._pulls
        return known[-1 - node].get(nbytes) or self._bytes(nbytes)

    def counted(self, operation: str, nbytes: int) -> int:
        """Bytes that a ledger is to count, of what is no collective."""
        if operation == "push" and self._codec and nbytes == CODEC_ITEM * self.own:
            return sum(self._payloads)
        return self._bytes(nbytes)

    def _bytes(self, nbytes: int) -> int:
        return round(nbytes * self.factor) if nbytes >= ALIGNMENT_BYTES else nbytes

    # -- seconds -----------------------------------------------------------------------------------------------------

    def compute(self, compute: Compute) -> Compute:
        """With it the stand-in's shards and codec take as long as the real ones."""
        codecs = {} if self._codec is None else {CODEC: self._coding(self._codec, compute)}
        return replace(compute, merge=compute.merge * self.factor, codecs=codecs)

    def _coding(self, codec: Codec, compute: Compute) -> Coding:
        coding, shape = compute.coding(codec, -1), self._shape
        if self._served:
            parts = zip(self._parts, self._payloads, strict=True)
            encode = coding.encoding(shape.padded, sum(self._payloads))
            decode = sum(coding.decoding(high - low, nbytes) for (low, high), nbytes in parts)
        else:
            payloads = 1 if isinstance(codec, LinearCodec) else self._workers
            nbytes = (
                sum(_factors(codec, shape.matrices, shape.padded)) * shape.item
                if isinstance(codec, PowerSGD)
                else self._payloads[0]
            )
            encode = coding.encoding(shape.padded, nbytes)
            decode = coding.decoding(shape.padded, nbytes * payloads, payloads)
        return Coding(encode / self.own, decode / self.own)


def payload_bytes(codec: Codec, shape: Shape, low: int, high: int) -> int:
    """Of what stands for [low, high) of the flat vector. Unsupported where that depends on the values."""
    if isinstance(codec, PowerSGD):
        matrices = _within(shape.matrices, low, high)
        table = 1 + 3 * len(_smaller(codec, matrices))
        return _HEAD * table + sum(_factors(codec, matrices, high - low)) * shape.item
    lengths = codec.lengths(high - low, shape.dtype)
    if len(lengths) > 1:
        raise Unsupported(
            f"compress={codec.name} sends what its gradients' values make it send, which only training shows: train with it on "
            "engine sim and this profile, on fewer workers, or take a codec of fixed length such as topk:0.01"
        )
    return lengths[0]


def _smaller(codec: PowerSGD, matrices: tuple[Matrix, ...]) -> list[Matrix]:
    """Those that it makes smaller."""
    return [m for m in matrices if codec.rank * (m[1] + m[2]) < m[1] * m[2]]


def _factors(codec: PowerSGD, matrices: tuple[Matrix, ...], n: int) -> tuple[int, int]:
    """Numbers of its two means of [n]: all P and what is no matrix, then all Q."""
    smaller = _smaller(codec, matrices)
    rest = n - sum(rows * columns for _, rows, columns in smaller)
    return codec.rank * sum(rows for _, rows, _ in smaller) + rest, codec.rank * sum(
        columns for _, _, columns in smaller
    )


def _within(matrices: tuple[Matrix, ...], low: int, high: int) -> tuple[Matrix, ...]:
    """What of them lies in [low, high): of a matrix that is cut, its whole rows."""
    found = []
    for start, rows, columns in matrices:
        first, last = max(0, -(-(low - start) // columns)), min(rows, (high - start) // columns)
        if first < last:
            found.append((start + first * columns, last - first, columns))
    return tuple(found)
