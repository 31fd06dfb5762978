"""What a gradient and a codec cost: seconds a row, jitter, stragglers, the parts of stages; seconds a number that is encoded
or decoded."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Self

from manyhands.comm.codecs import CODECS
from manyhands.engines.quantities import expect_number, read_factor, read_items, read_seconds, shown, unknown
from manyhands.errors import BadInput, is_whole, whole_of
from manyhands.spec import convert
from manyhands.units import count

_JITTERS = "none, lognormal:SIGMA, exponential, uniform:SHARE, quantiles:A/B/…"
_MOST_WORKERS = 1_000_000  # far beyond what a machine's memory simulates
_SECONDS = ("row", "step", "lease", "request", "merge")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long workers compute: (step + row · rows) · factor · jitter seconds a tick with rows, 0 without.

    Where a replica spans several workers, that is what one worker would take for all of it. A stage takes its share of it, a
    micro-batch its share of the rows, a pass forward `forward` of that, and a pass back the rest.

    Codecs, by name, take what their `Coding` says, times the worker's factor; those that are not named take none.
    `str()` gives what `parse` reads. Raises BadInput where a number makes no sense.
    """

    row: float = 1e-4  # seconds a row of a batch
    step: float = 0.0  # seconds a tick with rows, whatever their number
    jitter: str = "none"
    """A factor of mean 1, drawn for each tick: none; lognormal:SIGMA (of the logarithm); exponential; uniform:SHARE
    (between 1 - SHARE and 1 + SHARE); quantiles:A/B/… (measured, at equal distances from least to greatest)."""
    factors: Mapping[int, float] = field(default_factory=dict, hash=False)  # {rank: so many times slower}
    lease: float = 0.0  # seconds a lease takes
    request: float = 0.0  # seconds that each call of the server takes its worker beside messages and merging
    merge: float = 0.0  # seconds a byte that a server shard merges or hands out
    codecs: Mapping[str, Coding] = field(default_factory=dict, hash=False)  # {name: what it takes}
    forward: float = 1 / 3  # of a gradient's seconds, the share that going forward takes; back takes the rest
    stages: str = "parameters"
    """How a gradient's seconds divide among the stages of a replica: parameters (as many as each uses), equal, or
    2/1/1 (by stage, so many parts)."""

    def __post_init__(self) -> None:
        for name in _SECONDS:
            expect_number(getattr(self, name), f"compute: {name} (seconds)", least=0)
        for rank, factor in self.factors.items():
            if not is_whole(rank, least=0):
                raise BadInput(
                    f"compute: a factor is given by rank, a whole number of at least 0, such as 3=5x; got {rank!r}"
                )
            expect_number(factor, f"compute: the factor of worker {rank}", above=0)
        for name in self.codecs:
            if name not in CODECS:
                raise unknown(name, "compute", CODECS)
        _draw(self.jitter)
        expect_number(self.forward, "compute: forward (the share of a gradient's time)", least=0)
        if self.forward > 1:
            raise BadInput(
                f"compute: forward must be at most 1, since it is a share of a gradient's time; got {self.forward:g}: write forward=0.33"
            )
        _parts(self.stages)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`row=1e-4,step=1ms,jitter=lognormal:0.2,3=5x,8-15=2x,topk=15ns/1ns`

        Times are seconds, or 2s, 10ms, 50us. `3=5x`: worker 3 takes 5 times as long; `8-15=2x`: so do workers 8 to 15.
        `merge` is seconds a byte. `topk=15ns/1ns`: that codec encodes in 15 ns a number, and decodes in 1 ns.
        `stages=2/1/1`: of a replica in three stages the first one takes half of a gradient's time. Raises BadInput, and
        UnknownName for an option.
        """
        return cls().with_text(text)

    def with_text(self, text: str) -> Self:
        """This one where `text`, written as for `parse`, says nothing else. Raises as `parse` does."""
        changes: dict[str, Any] = {}
        factors, codecs = dict(self.factors), dict(self.codecs)
        for name, value in read_items(text, "compute"):
            if found := re.fullmatch(r"(\d+)(?:-(\d+))?", name):
                first, last = whole_of(found[1]), whole_of(found[2] or found[1])
                if first is None or last is None or not first <= last < _MOST_WORKERS:
                    raise BadInput(
                        "compute: give a factor for one worker (3=5x) or for several (8-15=2x), with ranks below "
                        f"{_MOST_WORKERS:,}; got {name!r}"
                    )
                factors.update(dict.fromkeys(range(first, last + 1), read_factor(value, f"compute: {name}")))
            elif name in _SECONDS:
                changes[name] = read_seconds(value, f"compute: {name}")
            elif name in CODECS:
                codecs[name] = Coding.parse(value, f"compute: {name}")
            elif name in ("jitter", "stages"):
                changes[name] = value
            elif name == "forward":
                changes[name] = convert("compute: forward", value, float)
            else:
                valid = [entry.name for entry in fields(self) if entry.name not in ("factors", "codecs")]
                raise unknown(name, "compute", [*valid, "RANK=5x", "RANK-RANK=5x", *CODECS])
        return replace(self, **changes, factors=factors, codecs=codecs)

    def __str__(self) -> str:
        parts = [f"{name}={shown(getattr(self, name))}" for name in _SECONDS if name == "row" or getattr(self, name)]
        if self.jitter != "none":
            parts.append(f"jitter={self.jitter}")
        if self.forward != 1 / 3:
            parts.append(f"forward={shown(self.forward)}")
        if self.stages != "parameters":
            parts.append(f"stages={self.stages}")
        parts += [f"{rank}={shown(factor)}x" for rank, factor in sorted(self.factors.items())]
        return ",".join([*parts, *(f"{name}={coding}" for name, coding in self.codecs.items())])

    def check(self, workers: int, stages: int = 1) -> None:
        """BadInput if a factor is of a worker that a simulation of so many does not have, or parts are of other stages.

        stages: of a replica; with 1, whoever computes it computes all of it.
        """
        beyond = [rank for rank in self.factors if rank >= workers]
        if beyond:
            raise BadInput(
                f"compute: worker {min(beyond)} has a factor, and the last worker of this run is {workers - 1}: "
                "name a worker that exists, or leave the factor out"
            )

        parts = _parts(self.stages)
        if parts is not None and len(parts) != stages > 1:
            raise BadInput(
                f"compute: stages={self.stages} gives the parts of {count(len(parts), 'stage')}, and this run's replicas have {stages}: "
                "give a number for each, or stages=equal"
            )

    def stage_share(self, stage: int, sizes: Sequence[int]) -> float:
        """Of a gradient's seconds, those of one stage. sizes: how many parameters each stage uses."""
        parts = [1.0] * len(sizes) if self.stages == "equal" or len(sizes) == 1 else _parts(self.stages) or sizes
        return parts[stage] / sum(parts)

    def coding(self, codec: str, node: int) -> Coding:
        """What a codec, by name, takes on a worker, by rank, or on a server shard, -1 - s, which has no factor."""
        return self.codecs.get(codec, FREE).times(self.factors.get(node, 1.0))


class ComputeSpeed:
    """One worker's seconds, drawn from its own generator: they do not depend on what others do."""

    __slots__ = ("_compute", "_draw", "_generator", "_row", "_step")

    def __init__(self, compute: Compute, rank: int, seed: int) -> None:
        factor = compute.factors.get(rank, 1.0)
        self._step, self._row = compute.step * factor, compute.row * factor
        self._compute, self._draw = compute, _draw(compute.jitter)
        self._generator = random.Random(f"{seed} pace of {rank}")

    def seconds(self, rows: int) -> float:
        """Of the next tick with so many rows; 0 without rows, for which nothing is drawn."""
        if not rows:
            return 0.0
        seconds = self._step + self._row * rows
        return seconds if self._draw is None else seconds * self._draw(self._generator)

    def passes(self, rows: int, stage: int, sizes: Sequence[int]) -> tuple[float, float]:
        """(forward, back) of a stage in the next tick, over so many rows of its replica. sizes: see `Compute.stage_share`."""
        seconds = self.seconds(rows) * self._compute.stage_share(stage, sizes)
        return seconds * self._compute.forward, seconds * (1 - self._compute.forward)


def _parts(stages: str) -> list[float] | None:
    """The numbers of `2/1/1`; None for a word."""
    if stages in ("parameters", "equal"):
        return None
    try:
        parts = [float(text) for text in stages.split("/")]
    except ValueError:
        parts = []
    if not parts or not all(0 < part < math.inf for part in parts):
        raise BadInput(
            f"compute: stages must be parameters, equal, or a number above 0 for each stage, such as 2/1/1; got {stages!r}"
        )
    return parts


def _draw(jitter: str) -> Callable[[random.Random], float] | None:
    """The factor's distribution, by its name; its mean is 1."""
    name, colon, text = jitter.partition(":")
    match name:
        case "none" if not colon:
            return None
        case "exponential" if not colon:
            return lambda generator: generator.expovariate(1.0)
        case "lognormal":
            sigma = _number(jitter, text)
            return lambda generator: math.exp(sigma * generator.gauss() - sigma * sigma / 2)
        case "uniform":
            share = _number(jitter, text)
            if share > 1:
                raise BadInput(
                    "compute: SHARE in jitter=uniform:SHARE must be at most 1 (then a step takes 0 to 2 times its "
                    f"time); got {share:g}"
                )
            return lambda generator: 1 + share * (2 * generator.random() - 1)
        case "quantiles":
            return _quantiles([_number(jitter, part) for part in text.split("/")])
    raise BadInput(f"compute: jitter must be one of {_JITTERS}; got {jitter!r}: write for example jitter=lognormal:0.2")


def _number(jitter: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadInput(f"compute: jitter must be one of {_JITTERS}, with numbers of at least 0; got {jitter!r}")
    return value


def _quantiles(values: list[float]) -> Callable[[random.Random], float]:
    """Straight lines between the quantiles, scaled to a mean of 1."""
    if len(values) < 2 or sorted(values) != values or not values[-1]:
        raise BadInput(
            "compute: jitter=quantiles:A/B/… needs two or more numbers in ascending order, the last one above 0; "
            f"got {'/'.join(map(shown, values))}"
        )
    pieces = len(values) - 1
    mean = sum(low + high for low, high in pairwise(values)) / (2 * pieces)
    scaled = [value / mean for value in values]

    def draw(generator: random.Random) -> float:
        at = generator.random() * pieces
        piece = int(at)
        return scaled[piece] + (at - piece) * (scaled[piece + 1] - scaled[piece])

    return draw


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
                f"{what} must be ENCODE/DECODE (time for one number), or four times, the last two for one byte sent; "
                f"got {text!r}: write 15ns/1ns, or 1ns/0.1ns/12ns/7ns"
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
