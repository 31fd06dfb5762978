"""Advice about what replicas exchange in one run: how often, how many bytes, and through whom."""

from __future__ import annotations

from manyhands.evidence.advise.remedies import (
    CODECS,
    DILOCO_FROM,
    LEAST_BYTES,
    CodecCost,
    bearable_period,
    bytes_left,
    compressed_round_s,
    period_for,
    share_won,
    speedup,
)
from manyhands.evidence.advise.run_facts import Advice, RunMeasurements, ms, percent, times
from manyhands.units import count

EXCHANGE_SHARE = 0.25
WORTH = 1.10  # times as fast: below it a change of strategy is not worth the trouble
ROUND_S, BYTES_PER_S = 1e-3, 1e9  # of an exchange on one host: at most, and at least

COMPRESSING = ("allreduce", "quorum", "diloco", "downpour", "agn", "dynsgd", "distance")
NO_CODEC_WITH = ("overlap", "streaming")  # options that refuse one
PERIODS = {
    **dict.fromkeys(("local-sgd", "diloco", "gossip", "easgd", "eamsgd"), "period"),
    **dict.fromkeys(("agn", "dynsgd", "distance"), "window"),
    "downpour": "push_every and pull_every",
}
"""What strategies call the steps between exchanges."""


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
        return "Rounds are as rare as can be: take fewer workers, or a faster link."
    if m.name in PERIODS:
        way = f"Raising {PERIODS[m.name]} from {m.period:.0f} to {period}"
    elif period < DILOCO_FROM:
        way = f"--strategy local-sgd:period={period},optimizer_state=kept"
    else:
        way = f"--strategy diloco:period={period}"
    return f"{way} is about {times(faster)} as fast; {_price(m, period)}."


def _price(m: RunMeasurements, period: int) -> str:
    """What so long a period may cost in accuracy."""
    if m.name == "downpour":
        return "windows add up, so lower the rate as well"
    if m.name not in PERIODS and period >= DILOCO_FROM:
        return f"that is {count(-(-m.steps // period), 'round')}, and few may cost accuracy"
    bears = bearable_period(m.steps)
    return (
        f"{m.steps:,} steps bear about {bears}, so it may cost accuracy" if period > bears else "compare its accuracy"
    )


def compress(m: RunMeasurements) -> Advice | None:
    """A codec would make it 1.1 times as fast: the bytes it leaves, at the link's measured rate, and what it computes.

    Seconds a number: bf16 37 ns, powersgd:2 18 ns, topk:0.01 81 ns (benchmarks/slow_links.py), so that no link above
    0.5 GB/s gains. A round of less than 1 MB a worker is mostly delay (benchmarks/ring.py). Sources of the codecs:
    docs/strategies.md.
    """
    takes_one = m.name in COMPRESSING and not any(option in m.strategy for option in NO_CODEC_WITH)
    if not (m.worth_sharing and takes_one and m.codec == "none" and m.parameters):
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
