"""Advice about what replicas exchange in one run: how often, how many bytes, and through whom.

Where exchange takes long there are two remedies: exchange less often (a period), or send fewer bytes (a codec). By how
much they would make a run quicker is arithmetic over its measured seconds, below the rules. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.evidence.advise.run_facts import Advice, RunMeasurements, ms, times
from manyhands.strategies import takes_codec
from manyhands.units import count, percent

EXCHANGE_SHARE = 0.25
WORTH = 1.10  # times as fast: below it a change of strategy is not worth the trouble
ROUND_S, BYTES_PER_S = 1e-3, 1e9  # of an exchange on one host: at most, and at least
EXCHANGE_LEFT = 0.10  # share of the time that a longer period leaves to exchange
DILOCO_FROM = 30  # steps: with longer periods than this, an outer step instead of a plain mean
LONGEST_PERIOD = 500  # steps that language models bore: DiLoCo, Douillard et al., 2023
LEAST_BYTES = 1e6  # a round of fewer is mostly delay: 4 KB take 0.08 ms, 1 MB 0.36 ms (benchmarks/ring.py)
LOW_RANK = 0.015  # of the bytes, that powersgd:2 sends of a transformer of 3.2 M parameters (benchmarks/slow_links.py)


def exchange_bound(m: RunMeasurements) -> Advice | None:
    """Exchange takes at least 25 %: the smallest period that leaves it 10 % makes 1 / (1 - 0.25·2/3) = 1.2 times the
    speed.

    Up to 30 steps local SGD (Local SGD Converges Fast and Communicates Little, Stich, 2018), with the optimizers' state
    kept: a round then sends what an all-reduce sends. From 30 on DiLoCo: Distributed Low-Communication Training of
    Language Models, Douillard et al., 2023. The price of 700 steps in 14 rounds: 5 to 6 % more test loss
    (benchmarks/slow_links.py, a transformer). Longer windows make late pushes later: where they may not be, it is
    silent.
    """
    share = m.share(m.exchange_s)
    if not m.worth_sharing or share < EXCHANGE_SHARE or m.near_limit:
        return None
    rest_s, round_s = (m.total_s - m.exchange_s) / m.steps, m.exchange_s / m.rounds
    period = max(period_for(round_s, rest_s, m.epoch_steps), round(m.period))
    faster = speedup(m.total_s, m.exchange_s * max(0.0, 1 - m.period / period))
    text = (
        f"exchange-bound: {percent(share)} of the time is exchange ({ms(m.exchange_s / m.steps)} ms a step). "
        f"{_rarer(m, period, faster)}"
    )
    numbers = {"exchange_share": share, "period": period, "speedup": faster}
    return Advice(kind="exchange-bound", text=text, numbers=numbers, wins=share_won(faster))


def _rarer(m: RunMeasurements, period: int, faster: float) -> str:
    if period <= round(m.period):
        return "Rounds are as rare as can be: use fewer workers, or a faster link."
    if m.traits.period:
        way = f"Raising {m.traits.period} from {m.period:.0f} to {period}"
    elif period < DILOCO_FROM:
        way = f"--strategy local-sgd:period={period},optimizer_state=kept"
    else:
        way = f"--strategy diloco:period={period}"
    return f"{way} is about {times(faster)} as fast; {_price(m, period)}."


def _price(m: RunMeasurements, period: int) -> str:
    """What so long a period may cost in accuracy."""
    if m.traits.adds:
        return "windows add up, so lower the rate as well"
    if not m.traits.period and period >= DILOCO_FROM:
        return f"that is {count(-(-m.steps // period), 'round')}, and few may cost accuracy"
    bears = bearable_period(m.steps)
    return (
        f"{count(m.steps, 'step')} can bear about {bears}, so it may cost accuracy"
        if period > bears
        else "compare its accuracy"
    )


def compress(m: RunMeasurements) -> Advice | None:
    """A codec would make it 1.1 times as fast: the bytes it leaves, at the link's measured rate, and what it computes.

    Seconds a number: bf16 37 ns, powersgd:2 18 ns, topk:0.01 81 ns (benchmarks/slow_links.py), so that no link above
    0.5 GB/s gains. A round of less than 1 MB a worker is mostly delay (benchmarks/ring.py). Sources of the codecs:
    docs/strategies/compression.md.
    """
    if not (m.worth_sharing and m.codec == "none" and m.parameters and takes_codec(m.strategy)):
        return None
    if m.sent_bytes / m.rounds < LEAST_BYTES:
        return None
    found = {codec.spec: _with(codec, m) for codec in CODECS}
    best = max(found, key=found.__getitem__)
    if found[best] < WORTH:
        return None
    rate = m.sent_bytes / m.exchange_s
    spec = f"{m.strategy}{',' if ':' in m.strategy else ':'}compress={best}"
    mildest = f"; bf16, which only rounds, {times(found['bf16'])}" if found["bf16"] >= WORTH and best != "bf16" else ""
    return Advice(
        kind="compress",
        text=f"slow link: it carries {rate / 1e6:.3g} MB/s. --strategy {spec} is about {times(found[best])} as fast{mildest}.",
        numbers={"bytes_per_s": rate, "codec": best, "speedup": found[best]},
        wins=share_won(found[best]),
    )


def _with(codec: CodecCost, m: RunMeasurements) -> float:
    """How many times as fast."""
    left = bytes_left(codec, m.workers, m.shapes, m.server)
    round_s = compressed_round_s(codec, m.exchange_s / m.rounds, m.parameters, left)
    return speedup(m.total_s, m.exchange_s - m.rounds * round_s)


def codec_costs(m: RunMeasurements) -> Advice | None:
    """A codec between workers of one host, whose exchange without it, at 1 ms a round and 1 GB/s, would make it 1.1
    times as fast.

    On one host a mean of 100 MB takes 8 to 18 ms (benchmarks/all_reduce.py), a push and pull of it 29 ms
    (benchmarks/server.py), and a round 1 ms beside its bytes (benchmarks/step.py, MLP).
    """
    if not m.worth_sharing or m.codec == "none" or not m.one_host or not m.parameters:
        return None
    faster = speedup(m.total_s, m.exchange_s - m.rounds * _in_memory_s(m, m.server))
    if faster < WORTH:
        return None
    text = (
        "compression costs more than it saves here, where workers share one host's memory: leave "
        f"compress={m.codec} out, about {times(faster)} as fast."
    )
    return Advice(kind="codec-costs", text=text, numbers={"speedup": faster}, wins=share_won(faster))


def server_costs(m: RunMeasurements) -> Advice | None:
    """A server between equally fast workers of one host, where all-reduce in each step, as slow as above, would make it
    1.1 times as fast.

    A server saves waiting; equal workers of all-reduce wait 2 to 3 % of a step (benchmarks/step.py), and 5 % are
    charged.
    """
    if not m.worth_sharing or not (m.server and m.one_host and m.even and m.parameters) or m.codec != "none":
        return None
    instead_s = m.steps * _in_memory_s(m, server=False) + 0.05 * m.compute_s
    faster = speedup(m.total_s, m.exchange_s + m.wait_s - instead_s)
    if faster < WORTH:
        return None
    text = (
        f"the server costs {percent(m.share(m.exchange_s + m.wait_s))} of the time, and workers are equally fast, so that none needs "
        f"to go ahead: --strategy allreduce is about {times(faster)} as fast."
    )
    return Advice(kind="server-costs", text=text, numbers={"speedup": faster}, wins=share_won(faster))


def _in_memory_s(m: RunMeasurements, server: bool) -> float:
    """Seconds of a round on one host at worst: a push and a pull of 4 bytes a number, or a mean of them."""
    sent = 2.0 if server else 2 * (m.workers - 1) / m.workers
    return ROUND_S + 4 * m.parameters * sent / BYTES_PER_S


# -- what a remedy wins -----------------------------------------------------------------------------------------------


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


def low_rank(shapes: Sequence[Sequence[int]]) -> float:
    """The share of these parameters that PowerSGD of rank 2 sends; a transformer's where shapes are unknown.

    A parameter's first dimension is the rows; vectors are sent whole.
    """
    sent = whole = 0
    for shape in shapes:
        numbers = math.prod(shape)
        factors = 2 * (shape[0] + math.prod(shape[1:])) if len(shape) > 1 else numbers
        sent += min(factors, numbers)
        whole += numbers
    return sent / whole if whole else LOW_RANK


def compressed_round_s(codec: CodecCost, round_s: float, numbers: int, left: float) -> float:
    """Seconds of a round with a codec: the bytes that are left at the link's measured rate, and what it computes."""
    return round_s * left + numbers * codec.seconds_per_number
