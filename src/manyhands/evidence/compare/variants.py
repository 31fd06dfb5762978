"""What is compared, in which order: solo and every strategy on each number of workers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.engines.base import Engine, LaunchSpec
from manyhands.errors import BadInput
from manyhands.evidence.compare.comparison import Variant
from manyhands.evidence.compare.trial import TrialEntry, TrialSetup
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.strategies.solo import Solo
from manyhands.training.config import TrainConfig

DEFAULT = ("solo", "allreduce", "local-sgd:period=8", "gossip", "downpour", "dynsgd", "hogwild")
"""One of each kind: mean of gradients, periodic means, neighbours, server, staleness-aware, shared memory."""
_TRIES = 200  # orders that are drawn for a repeat, of which the best is taken


@dataclass(frozen=True, kw_only=True)
class Threads:
    """How many threads variants have."""

    solo: Mapping[str, int]  # {name of a variant of solo: its threads}, ascending
    each: int | None = None  # of each worker of the others; None: cores // workers, at least 1
    cores: int = 1

    def of(self, workers: int) -> int:
        return self.each or max(1, self.cores // workers)


def threads_of(engine: Engine, on_gpu: bool, cores: int, wanted: int | None) -> Threads:
    """Solo has one thread, and all; where that changes nothing (a simulated cluster, a GPU) it has one variant only."""
    if engine.capabilities.simulated:
        return Threads(solo={Solo.name: wanted or 1}, each=wanted or 1)
    if on_gpu:
        return Threads(solo={Solo.name: cores}, each=wanted, cores=cores)
    named = {f"{Solo.name}, {count} thread{'' if count == 1 else 's'}": count for count in sorted({1, cores})}
    return Threads(solo=named, each=wanted, cores=cores)


def entries_of(
    strategies: Iterable[Strategy | str],
    workers: Sequence[int],
    threads: Threads,
    partitions: Sequence[str] = ("none",),
) -> list[TrialEntry]:
    """Solo, then every other strategy at each number of workers above 1 (at 1 where there is no other), with each partition.

    A strategy that is given twice is two variants.
    """
    entries = [_entry(Solo.name, Solo(), 1, count, name) for name, count in threads.solo.items()]
    counts = [count for count in dict.fromkeys(workers) if count > 1] or [1]
    names: Counter[str] = Counter()
    for given in strategies:
        strategy = strategy_of(given)
        spec = given.strip() if isinstance(given, str) else spec_of(strategy)
        for count, partition in itertools.product(counts, partitions) if strategy.name != Solo.name else []:
            name = f"{spec} on {count}" + ("" if partition == "none" else f", {partition} partition")
            names[name] += 1
            name += "" if names[name] == 1 else f" ({names[name]})"
            entries.append(_entry(spec, strategy, count, threads.of(count), name, partition))
    return entries


def _entry(spec: str, strategy: Strategy, workers: int, threads: int, name: str, partition: str = "none") -> TrialEntry:
    variant = Variant(strategy=spec, workers=workers, threads=threads, name=name, partition=partition)
    return TrialEntry(variant=variant, strategy=strategy)


def refusals(entries: Iterable[TrialEntry], setting: TrialSetup, engine: Engine) -> dict[str, str]:
    """{variant: why it cannot be}, by what `train` checks before anything starts. BadInput where solo cannot."""
    found = {}
    for entry in entries:
        try:
            workers = entry.variant.workers
            asked = TrainConfig(
                task=setting.task,
                strategy=entry.strategy,
                engine=engine,
                workers=workers,
                directory=None,
                partition=entry.variant.partition,
            )
            timeout_s = setting.timeout_s
            asked.check(servers=setting.servers, nonfinite="raise", max_seconds=None, timeout_s=timeout_s, resume=False)
            launch = LaunchSpec(
                workers=workers,
                server=entry.strategy.server(),
                servers=setting.servers,
                threads_per_worker=entry.variant.threads,
                device=setting.device,
                timeout_s=timeout_s,
                rejoins=False,
            )
            engine.check(launch)
        except BadInput as error:
            if entry.variant.solo:
                raise
            found[entry.variant.name] = str(error)
    return found


def orders(count: int, repeats: int, seed: int) -> list[list[int]]:
    """For each repeat a permutation of range(count), drawn so that as far as possible none is first twice, and none
    comes twice after the same one: a drift of the machine, or what one trial leaves to the next, hits all alike.
    """
    generator = np.random.default_rng(seed)
    pairs: Counter[tuple[int, int]] = Counter()  # (-1, i): i was first
    drawn = []
    for _ in range(repeats):
        tries = (generator.permutation(count).tolist() for _ in range(_TRIES))
        order = min(tries, key=lambda order: sum(pairs[pair] for pair in _pairs(order)))
        pairs.update(_pairs(order))
        drawn.append(order)
    return drawn


def _pairs(order: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([-1, *order]))
