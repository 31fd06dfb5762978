"""What would make a run quicker, and by how much: arithmetic over its measured seconds. Pure.

Where exchange takes long there are two remedies: exchange less often (a period), or send fewer bytes (a codec).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

EXCHANGE_LEFT = 0.10  # share of the time that a longer period leaves to exchange
DILOCO_FROM = 30  # steps: with longer periods than this, an outer step instead of a plain mean
LONGEST_PERIOD = 500  # steps that language models bore: DiLoCo, Douillard et al., 2023
LEAST_BYTES = 1e6  # a round of fewer is mostly delay: 4 KB take 0.08 ms, 1 MB 0.36 ms (benchmarks/ring.py)
LOW_RANK = 0.015  # of the bytes, that powersgd:2 sends of a transformer of 3.2 M parameters (benchmarks/slow_links.py)


def speedup(total_s: float, won_s: float) -> float:
    """How many times as fast it is without `won_s` of its seconds (Amdahl, 1967); 1000 where nothing would be left."""
    return total_s / max(total_s - won_s, total_s / 1000)


def share_won(times_as_fast: float) -> float:
    """The share of the time that this speed-up takes away; 0 where it is none."""
    return max(0.0, 1 - 1 / times_as_fast)


# -- a period ----------------------------------------------------------------------------------------------------------


def period_for(round_s: float, rest_s: float, epoch_steps: int | None = None) -> int:
    """The smallest period that leaves exchange 10 % of the time or less; at most 500, or an epoch's steps, where a
    window ends.

    round_s: seconds of a round. rest_s: seconds of a step without it. A step then takes rest_s + round_s / period, and
    exchange is a tenth of that from period = 9·round_s / rest_s on.
    """
    needed = (1 / EXCHANGE_LEFT - 1) * round_s / rest_s if rest_s > 0 else LONGEST_PERIOD
    longest = LONGEST_PERIOD if epoch_steps is None else min(LONGEST_PERIOD, epoch_steps)
    return max(1, min(math.ceil(needed - 1e-9), longest))


def bearable_period(steps: int) -> int:
    """√steps: the longest period with which local SGD keeps its rate of convergence, up to a constant.

    Local SGD Converges Fast and Communicates Little, Stich, 2018: communication can be reduced up to a factor of √T, T
    the number of steps. Ours: 700 steps bear 26; at 50 test loss was 5 to 6 % higher (benchmarks/slow_links.py).
    """
    return math.isqrt(steps)


# -- a codec -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """A way to send fewer bytes: its spec, and what it computes."""

    spec: str
    seconds_per_number: float
    """Of the vector that is sent, in a round. What benchmarks/slow_links.py's rows/s leave beside computing and the
    bytes on the link, over 3.25 M numbers: four workers on two cores, so an upper end."""


CODECS = (
    CodecCost(spec="bf16", seconds_per_number=37e-9),
    CodecCost(spec="powersgd:2", seconds_per_number=18e-9),
    CodecCost(spec="topk:0.01", seconds_per_number=81e-9),
)


def bytes_left(codec: CodecCost, workers: int, shapes: Sequence[Sequence[int]], server: bool) -> float:
    """The share of an exchange's bytes that is sent with a codec, numbers being of 4 bytes.

    bf16: half. powersgd:2: 2·(rows + columns) numbers of each matrix of these shapes. topk:0.01: a hundredth of the
    numbers, each with its place of 4 bytes more; over the group they go to all others, (N - 1)·0.02 beside an
    all-reduce's 2·(N - 1)/N, so 0.01·N. Over a server pushes are compressed, and pulls, the other half, are not.
    """
    match codec.spec:
        case "bf16":
            left = 0.5
        case "powersgd:2":
            left = low_rank(shapes)
        case _:
            left = 0.02 if server else 0.01 * workers
    return (1 + left) / 2 if server else left


def low_rank(shapes: Sequence[Sequence[int]], rank: int = 2) -> float:
    """The share of these parameters that PowerSGD of this rank sends; a transformer's where shapes are unknown."""
    numbers = sum(prod(shape) for shape in shapes)
    if not numbers:
        return LOW_RANK
    return sum(_sent(shape, rank) for shape in shapes) / numbers


def _sent(shape: Sequence[int], rank: int) -> int:
    """Numbers that PowerSGD sends of a parameter: the first dimension is the rows; vectors are sent whole."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    return min(rank * (rows + columns), rows * columns)


def compressed_round_s(codec: CodecCost, round_s: float, numbers: int, left: float) -> float:
    """Seconds of a round with a codec: the bytes that are left at the link's measured rate, and what it computes."""
    return round_s * left + numbers * codec.seconds_per_number
