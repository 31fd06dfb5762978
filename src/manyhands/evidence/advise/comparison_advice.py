"""Advice about a comparison of strategies, beside its decision: what wins most comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from manyhands.evidence.advise.comparison_facts import Compared, Contestant
from manyhands.evidence.advise.exchange_advice import WORTH, share_won
from manyhands.evidence.advise.run_advice import all_advice
from manyhands.evidence.advise.run_facts import Advice, RunMeasurements, ms
from manyhands.evidence.advise.worse_metric import explain
from manyhands.units import percent, times

REASON_SHARE = 0.15  # of the time, that explains why several workers do not pay
OF_A_RUN = (
    "input-bound",
    "stragglers",
    "threads",
    "exchange-bound",
    "compress",
    "codec-costs",
    "server-costs",
    "few-rows",
)
"""Rules about one run that apply here too; what the others advise is measured here."""


def advise_comparison(compared: Compared) -> list[Advice]:
    """All advice that applies, by gain; whether to distribute is `compared.decision`. Empty without several workers."""
    if not compared.several:
        return []
    found = [advice for rule in RULES for advice in rule(compared)]
    return sorted(found, key=lambda advice: -advice.wins)


def largest_loss(c: Compared) -> str:
    """Why the one that the decision rests on is no faster, as the rules about one run see it (Amdahl, 1967); or ""."""
    best = c.decision.best
    if best is None or best.speed is None:
        return ""
    m = best.measured
    if m.too_short:
        return f" Its steps compute {ms(m.compute_per_step_s)} ms, and under 10 ms sharing rarely pays."
    losses = {"exchange": m.exchange_s, "waiting": m.wait_s, "input": m.input_s}
    largest = max(losses, key=losses.__getitem__)
    if m.share(losses[largest]) >= REASON_SHARE:
        return f" {percent(m.share(losses[largest]))} of its time is {largest}."
    if m.one_host and m.workers * m.threads_per_worker <= c.base.threads:
        return " One process already uses the same cores."
    return ""


def _of_the_best(c: Compared) -> Iterator[Advice]:
    """What the rules about one run say of the best strategy, unless it was tried."""
    best = c.best or c.several[0]
    for advice in all_advice(best.measured):
        if advice.kind in OF_A_RUN and not _tried(advice, best, c):
            yield replace(advice, text=f"{best.name}: {advice.text}")


def _tried(advice: Advice, best: Contestant, c: Compared) -> bool:
    """Whether a contestant on as many workers is what the advice proposes."""
    others = [one.measured for one in c.several if one.measured.workers == best.measured.workers and one is not best]
    match advice.kind:
        case "exchange-bound":
            return any(m.traits.period and m.period >= 0.9 * advice.numbers["period"] for m in others)
        case "compress":
            return any(m.codec != "none" for m in others)
        case "codec-costs":
            return any(m.codec == "none" and m.name == best.measured.name for m in others)
        case "server-costs":
            return any(m.traits.exact and not m.server for m in others)
        case _:
            return False


def _explained(c: Compared) -> Iterator[Advice]:
    """Why others are worse (worse_metric.py). The gain is their speed over the best that is not worse."""
    for one in c.several:
        advice = explain(one, c.base) if one.quality == "worse" else None
        if advice is not None:
            yield replace(advice, wins=share_won(max(1.0, one.times) / max(1.0, c.best.times if c.best else 1.0)))


def _compression(c: Compared) -> Iterator[Advice]:
    """A strategy with and without codecs: whether the fastest codec changes the speed 1.1-fold, beyond intervals."""
    for plain in c.several:
        coded = [one for one in c.several if one.measured.codec != "none" and _alike(one.measured, plain.measured)]
        if plain.measured.codec != "none" or not coded:
            continue
        fastest = max(coded, key=lambda one: one.times)
        ratio = fastest.times / plain.times if plain.times else 0.0
        if ratio >= WORTH and _apart(fastest, plain):
            text = f"compression helps on this link: {fastest.name} is {times(ratio)} as fast as without."
            yield Advice(kind="compress", text=text, numbers={"speedup": ratio})
        if 0 < ratio <= 1 / WORTH and _apart(plain, fastest):
            text = f"compression costs more than it saves here: {plain.name} is {times(1 / ratio)} as fast as {fastest.name}."
            yield Advice(kind="codec-costs", text=text, numbers={"speedup": 1 / ratio})


def _alike(one: RunMeasurements, other: RunMeasurements) -> bool:
    """The same strategy on as many workers, exchanging as often."""
    return (one.name, one.workers, one.threads_per_worker, round(one.period)) == (
        other.name,
        other.workers,
        other.threads_per_worker,
        round(other.period),
    )


def _apart(faster: Contestant, slower: Contestant) -> bool:
    """The intervals of their speeds do not meet."""
    return faster.speed is not None and slower.speed is not None and faster.speed.low > slower.speed.high


def _threads_or_processes(c: Compared) -> Iterator[Advice]:
    """With as many threads in all: whether the fastest on several workers is faster than one process, or slower, beyond
    the interval.

    benchmarks/step.py: two workers of one thread were 1.2 times as fast as one process with two (a CNN, a transformer),
    or 0.7 (an MLP).
    """
    rivals = [one for one in c.several if one.measured.one_host and one.threads == c.base.threads and one.times]
    if c.base.threads == 1 or c.to_target or not rivals:
        return
    rival = rivals[0]
    if rival.outcome == "better":
        alone = next((one.times for one in c.contestants if one.threads == 1), 0.0)
        gain = f", whose threads bring {times(1 / alone)}" if alone else ""
        text = f"processes use these cores better than threads: {rival.name} is {times(rival.times)} as fast as {c.reference}{gain}."
        yield Advice(kind="processes", text=text, numbers={"speedup": rival.times})
    if rival.outcome == "worse":
        text = f"threads use these cores better than processes: {c.reference} is {times(1 / rival.times)} as fast as {rival.name}."
        yield Advice(kind="threads-win", text=text, numbers={"speedup": 1 / rival.times})


RULES: tuple[Callable[[Compared], Iterator[Advice]], ...] = (
    _of_the_best,
    _explained,
    _compression,
    _threads_or_processes,
)
