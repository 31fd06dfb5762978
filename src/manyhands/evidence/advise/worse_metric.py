"""Why a strategy ended with a worse metric than one process: the first cause that its numbers show."""

from __future__ import annotations

import math
from collections.abc import Callable

from manyhands.evidence.advise.comparison_facts import Contestant
from manyhands.evidence.advise.exchange_advice import bearable_period
from manyhands.evidence.advise.run_facts import Advice, times
from manyhands.server.staleness import limit
from manyhands.units import count, percent

GREW = 1.5  # times: smaller changes of batch or rate explain nothing
UNUSED_SHARE = 0.10


def explain(one: Contestant, base: Contestant) -> Advice | None:
    """Of a contestant that is worse than the reference; None where its numbers show no cause."""
    return next((advice for cause in CAUSES if (advice := cause(one, base))), None)


def _dropped(one: Contestant, base: Contestant) -> Advice | None:
    """More than 10 % of the rows had no effect: it trained on fewer rows."""
    share = one.measured.unused
    if share <= UNUSED_SHARE:
        return None
    remedy = (
        "use fewer backups"
        if one.measured.traits.drops
        else f"lower the rate, or clip the gradients{' to less' if one.measured.clipped else ''}"
    )
    return _advice(one, "unused-rows", f"{percent(share)} of its rows had no effect: {remedy}.", unused=share)


def _batch(one: Contestant, base: Contestant) -> Advice | None:
    """The global batch is at least 1.5 times as large, so that there are as many times fewer steps.

    With a rate that was not raised as much: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, Goyal et al.,
    2017: k times the batch wants k times the rate, after a warm-up; √k with Adam (On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms, Malladi, Lyu, Panigrahi, Arora, 2022). With one that was: An Empirical Model of
    Large-Batch Training,
    McCandlish, Kaplan, Amodei, 2018: beyond a critical batch, larger ones hardly save steps.
    """
    grew, raised = one.batch_size / base.batch_size, one.measured.rate / (base.measured.rate or 1.0)
    if grew < GREW:
        return None
    numbers = {"batch": grew, "rate": raised}
    found = f"its batch is {times(grew)} as large, so it made {times(1 / grew)} as many steps"
    if raised < math.sqrt(grew):
        text = f"{found} at {times(raised)} the rate: give --batch-size {base.batch_size}, or {times(grew)} the rate after a warm-up."
        return _advice(one, "batch", text, **numbers)
    text = f"{found}, which {times(raised)} the rate did not make up: more rows a step than its gradients' noise needs; give fewer."
    return _advice(one, "critical-batch", text, **numbers)


def _rate(one: Contestant, base: Contestant) -> Advice | None:
    """A global batch moves the answer at least 1.5 times as far as one process's does: N times where N workers add.

    Large Scale Distributed Deep Networks, Dean et al., 2012; DiLoCo, Douillard et al., 2023: outer_rate / (1 -
    outer_momentum) times along a steady way, which few rounds do not bear (8 % more test loss after 8 rounds; with half
    the momentum 5.8 % after 14 and 1.3 % after 60: benchmarks/slow_links.py). Late updates bear less than their share,
    limit(τ) / limit(0) of the rate (staleness.py).
    """
    far = _far(one, base)
    m = one.measured
    if far < GREW or m.traits.follows:
        return None
    if m.traits.outer_steps:
        text = (
            f"its outer steps go {times(far)} as far along a steady way, which {m.rounds:.0f} rounds may not bear: "
            "outer_rate=0.7,outer_momentum=0.5 goes 1.4x as far."
        )
        return _advice(one, "rate-too-high", text, far=far)
    lower = m.rate * min(1 / far, limit(m.late) / limit(0))
    late = f", by updates up to {count(m.late, 'version')} late" if m.late else ""
    text = f"its workers add up: a batch moves the model {times(far)} as far{late}. Lower the rate from {m.rate:.2g} to {lower:.2g}."
    return _advice(one, "rate-too-high", text, far=far, rate=lower)


def _behind(one: Contestant, base: Contestant) -> Advice | None:
    """Its server divides updates, or follows the workers, and a short run is behind (benchmarks/accuracy.py)."""
    m, far = one.measured, _far(one, base)
    if m.traits.follows and m.server:
        text = (
            "its answer follows the workers at a distance, so short runs are behind: train longer"
            f"{', or use period=1' if m.period > 1 else ''}."
        )
        return _advice(one, "behind", text, far=far)
    if m.traits.behind is None or (m.period <= 1 and not m.traits.behind_at_once):
        return None
    why, remedy = m.traits.behind
    text = f"{why}, so short runs are behind: {remedy}, or train longer."
    return _advice(one, "behind", text, far=far)


def _slow(one: Contestant, base: Contestant) -> Advice | None:
    """A global batch moves the answer at most 1 / 1.5 times as far."""
    far = _far(one, base)
    if far > 1 / GREW:
        return None
    text = f"a batch moves the model only {times(far)} as far as in one process: raise the rate to {one.measured.rate / far:.2g}."
    return _advice(one, "rate-too-low", text, far=far)


def _late(one: Contestant, base: Contestant) -> Advice | None:
    """Updates are late: τ versions bear limit(τ) / limit(0) of the rate that none bears (staleness.py)."""
    m = one.measured
    if not m.late:
        return None
    lower = m.rate * limit(m.late) / limit(0)
    text = (
        f"updates are up to {count(m.late, 'version')} late, which bears {percent(limit(m.late) / limit(0))} of the rate at most: "
        f"lower it to {lower:.2g}{', or set bound=0' if 'bound' in m.options else ''}."
    )
    return _advice(one, "late", text, late=m.late, rate=lower)


def _codec(one: Contestant, base: Contestant) -> Advice | None:
    """What it sends is not all: codecs and their sources are in docs/strategies/compression.md. bf16 just rounds."""
    codec = one.measured.codec
    if codec in ("none", "bf16"):
        return None
    text = f"what compress={codec} leaves out of each exchange costs accuracy: let it send more, or use compress=bf16."
    return _advice(one, "codec-loses", text, codec=codec)


def _drift(one: Contestant, base: Contestant) -> Advice | None:
    """Replicas drift apart between averages; √steps is the period that is surely borne, up to a constant.

    Local SGD Converges Fast and Communicates Little, Stich, 2018; ours: 5 % more loss with 50 of 700 steps
    (benchmarks/slow_links.py).
    """
    m = one.measured
    if m.period < 2:
        return None
    bears = bearable_period(m.steps)
    shorter = max(1, min(round(m.period) // 2, bears))
    found = f"replicas drift apart for {m.period:.0f} steps"
    bound = f", and {count(m.steps, 'step')} can bear about {bears}" if m.period > bears else ""
    return _advice(one, "drift", f"{found}{bound}: exchange every {count(shorter, 'step')}.", period=shorter)


def _unequal(one: Contestant, base: Contestant) -> Advice | None:
    """All-reduce equals one process to rounding (docs/guarantees.md), unless the model mixes rows."""
    if not one.measured.traits.exact:
        return None
    text = "it should compute what one process computes: `manyhands check` finds what in the model depends on the split of the rows."
    return _advice(one, "unequal", text)


def _far(one: Contestant, base: Contestant) -> float:
    """How far a step moves the answer, beside the reference's, at the rate of its own."""
    own = one.effective_rate / (one.measured.rate or 1.0)
    return own / ((base.effective_rate / (base.measured.rate or 1.0)) or 1.0)


def _advice(one: Contestant, kind: str, why: str, **numbers: object) -> Advice:
    return Advice(kind=kind, text=f"{one.name} is worse: {why}", numbers={"name": one.name, **numbers})


CAUSES: tuple[Callable[[Contestant, Contestant], Advice | None], ...] = (
    _dropped,
    _batch,
    _rate,
    _behind,
    _slow,
    _late,
    _codec,
    _drift,
    _unequal,
)
"""What makes an answer worse for sure comes before what may."""
