"""The real lengths of the stand-in's messages: its vector [d] stands for the real one [D'], one exchange for a codec's.

Times in the simulator depend on lengths alone. Messages of the stand-in's vector are costed with the real length; all
others (control bits, counts, barriers) with their own.
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
from manyhands.evidence.estimate.model_sizes import Matrix, Shape
from manyhands.replica.control_bits import CONTROL_BITS
from manyhands.replica.layout import ALIGNMENT_BYTES
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Strategy

CODEC = "bf16"  # of the stand-in, for every real codec: its one exchange takes as long as all of the real one's
CODEC_ITEM = 2  # bytes of a number in the stand-in's codec
_COUNT_ITEM = 8  # bytes of an optimizer's step count, which is gathered as float64
_HEAD = 4  # bytes of a number in the table of a PowerSGD payload


class Piece(NamedTuple):
    """One collective of `elements` numbers of `item` bytes each. Of words: `elements` bytes over all ranks."""

    name: Literal["mean", "all_gather", "words"]
    elements: int
    item: int = 1


class Lengths:
    """The real lengths of one strategy's messages on `workers` workers. `strategy` has its own codec."""

    def __init__(self, shape: Shape, strategy: Strategy, *, workers: int, servers: int = 1, rows: float = 1) -> None:
        """servers: requested shards, if the strategy has a server. rows: of a worker's tick.

        Raises Unsupported where messages have lengths that depend on values.
        """
        check_lengths(strategy, workers)
        spec = strategy.server()
        self._served = spec is not None
        self._shards = 1 if spec is None or spec.one_shard else servers
        self._shape, self._workers = shape, workers
        unit = max(1, ALIGNMENT_BYTES // shape.item)
        self.stand_in_length = unit * self._shards * max(1, int(getattr(strategy, "streaming", 0)))
        """d: the numbers of the stand-in's model, a multiple of its shards and fragments."""
        self.factor = shape.padded / self.stand_in_length
        self._codec = codec_of(codec_named(strategy)) if workers > 1 else None
        self._parts = [slice_of(shard, self._shards, shape.padded) for shard in range(self._shards)]
        self._payloads = [payload_bytes(self._codec, shape, *part) for part in self._parts] if self._codec else []
        self._mean = self._gradient(strategy, rows)
        part = self.stand_in_length // self._shards
        self._pulls = [{part * shape.item: (high - low) * shape.item} for low, high in self._parts]
        self._pushes = list(self._pulls)  # by shard: {bytes of the stand-in's message: real bytes}
        if self._codec:
            self._pushes = [
                {**whole, CODEC_ITEM * part: n} for whole, n in zip(self._pulls, self._payloads, strict=True)
            ]

    # -- collectives -------------------------------------------------------------------------------------------------

    def mean(self, elements: int, item: int) -> list[Piece]:
        """The real collectives, one after the other, of a mean of the stand-in."""
        if elements == self.stand_in_length and item == (CODEC_ITEM if self._codec else self._shape.item):
            return self._mean
        return [Piece("mean", self.real(elements), item)]

    def all_gathered(self, elements: int, item: int) -> int:
        """The real numbers of an all-gather. Of an optimizer's step counts: those of all parameters."""
        if item == _COUNT_ITEM and elements < self.stand_in_length:
            return elements * self._shape.parameters
        return self.real(elements)

    def real(self, elements: int) -> int:
        """The real length of a part of the stand-in's vector. A message of few numbers is no part of it."""
        return round(elements * self.factor) if elements * self._shape.item >= ALIGNMENT_BYTES else elements

    def _gradient(self, strategy: Strategy, rows: float) -> list[Piece]:
        """The real collectives of a mean of the whole vector."""
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
        if not isinstance(strategy, AllReduce):  # updates of a window have no bits for single parameters
            bits, window = 1, int(getattr(strategy, "period", 1))
        words = len(json_bytes([float(round(rows * window)), "f" * -(-bits // 4), payload]))
        return [Piece("words", self._workers * words), Piece("all_gather", payload)]

    # -- messages ----------------------------------------------------------------------------------------------------

    def message(self, source: int, target: int, nbytes: int) -> int:
        """The real bytes of a message. Nodes are numbered as in `NetworkState`."""
        node = source if source < target else target
        if node >= 0:
            return self._bytes(nbytes)
        known = self._pushes if target < 0 else self._pulls
        return known[-1 - node].get(nbytes) or self._bytes(nbytes)

    def counted_bytes(self, operation: str, nbytes: int) -> int:
        """The real bytes of an operation that is no collective, for a ledger."""
        if operation == "push" and self._codec and nbytes == CODEC_ITEM * self.stand_in_length:
            return sum(self._payloads)
        return self._bytes(nbytes)

    def _bytes(self, nbytes: int) -> int:
        return round(nbytes * self.factor) if nbytes >= ALIGNMENT_BYTES else nbytes

    # -- seconds -----------------------------------------------------------------------------------------------------

    def compute(self, compute: Compute) -> Compute:
        """Compute costs with which the stand-in's shards and codec take as long as the real ones."""
        codecs = {} if self._codec is None else {CODEC: self._coding(self._codec, compute)}
        return replace(compute, merge=compute.merge * self.factor, codecs=codecs)

    def _coding(self, codec: Codec, compute: Compute) -> Coding:
        coding, shape = compute.coding(codec.name, -1), self._shape
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
        return Coding(encode / self.stand_in_length, decode / self.stand_in_length)


def check_lengths(strategy: Strategy, workers: int) -> None:
    """Raise Unsupported where workers post what no codec makes."""
    if strategy.needs.mailbox and workers > 1:
        raise Unsupported(
            f"the messages of strategy {strategy.name} have lengths that depend on the updates' values, so only training shows "
            "them: train with it on engine sim and this profile, on fewer workers"
        )


def payload_bytes(codec: Codec, shape: Shape, low: int, high: int) -> int:
    """Bytes of the codec's payload for [low, high) of the flat vector. Raises Unsupported if they depend on values."""
    if isinstance(codec, PowerSGD):
        matrices = _within(shape.matrices, low, high)
        table = 1 + 3 * len(_smaller(codec, matrices))
        return _HEAD * table + sum(_factors(codec, matrices, high - low)) * shape.item
    lengths = codec.lengths(high - low, shape.dtype)
    if len(lengths) > 1:
        raise Unsupported(
            f"the messages of compress={codec.name} have lengths that depend on the gradients' values, so only training "
            "shows them: train with it on engine sim and this profile, on fewer workers, or use a codec of fixed "
            "length such as topk:0.01"
        )
    return lengths[0]


def _smaller(codec: PowerSGD, matrices: tuple[Matrix, ...]) -> list[Matrix]:
    """The matrices that PowerSGD makes smaller; it sends the others as they are."""
    return [m for m in matrices if codec.rank * (m[1] + m[2]) < m[1] * m[2]]


def _factors(codec: PowerSGD, matrices: tuple[Matrix, ...], n: int) -> tuple[int, int]:
    """Lengths of PowerSGD's two means for [n]: all P and what it sends as it is, then all Q."""
    smaller = _smaller(codec, matrices)
    rest = n - sum(rows * columns for _, rows, columns in smaller)
    p, q = sum(rows for _, rows, _ in smaller), sum(columns for _, _, columns in smaller)
    return codec.rank * p + rest, codec.rank * q


def _within(matrices: tuple[Matrix, ...], low: int, high: int) -> tuple[Matrix, ...]:
    """The parts of matrices in [low, high): of a matrix that is cut, its whole rows."""
    found = []
    for start, rows, columns in matrices:
        first, last = max(0, -(-(low - start) // columns)), min(rows, (high - start) // columns)
        if first < last:
            found.append((start + first * columns, last - first, columns))
    return tuple(found)


def codec_named(strategy: Strategy) -> str:
    """The value of the option `compress`; none if the strategy has no such option."""
    return str(getattr(strategy, "compress", "none"))
