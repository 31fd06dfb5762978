"""Comparisons made of a few numbers a variant, for tests of what follows from them."""

from collections.abc import Sequence
from typing import Any

from manyhands.evidence.compare.compare import with_findings
from manyhands.evidence.compare.comparison import Comparison, Target, Trial, Variant

Numbers = Sequence[float | None]
SOLOS = ("solo, 1 thread", "solo, 2 threads")


def found(
    rates: dict[str, Numbers],
    metrics: dict[str, Numbers] | None = None,
    targets: dict[str, Numbers] | None = None,
    *,
    failures: dict[str, str] | None = None,
    target: Target | None = None,
    **changes: Any,
) -> Comparison:
    """A comparison with its findings. By variant and repeat: rows/s, test_accuracy, seconds to the target.

    Variants are `solo…` or `SPEC on WORKERS`. A rate of None is a trial that is missing; `failures` end the last one.
    """
    variants = tuple(_variant(name) for name in rates)
    trials = [
        _trial(name, repeat, rate, (metrics or {}).get(name), (targets or {}).get(name))
        for name, given in rates.items()
        for repeat, rate in enumerate(given)
        if rate is not None
    ]
    for name, why in (failures or {}).items():
        trials.append(Trial(variant=name, repeat=len(rates[name]) - 1, seed=0, failure=why))
    made = Comparison(
        task="digits",
        parameters=100,
        variants=variants,
        trials=tuple(trials),
        repeats=max(map(len, rates.values())),
        metric="test_accuracy",
        higher=True,
        target=target,
        reference=[one.name for one in variants if one.solo][-1],
        time_margin=0.05,
        metric_margin=0.01,
        machine={"engine": "local", "device": "cpu", "cores": 2},
        seconds=12.0,
    )
    return with_findings(made.__class__(**{**vars(made), **changes}))


def _variant(name: str) -> Variant:
    if name.startswith("solo"):
        return Variant(strategy="solo", workers=1, threads=2 if "2 threads" in name else 1, name=name)
    spec, _, workers = name.partition(" on ")
    return Variant(strategy=spec, workers=int(workers.split()[0]), threads=1, name=name)


def _trial(name: str, repeat: int, rate: float, metric: Numbers | None, target: Numbers | None) -> Trial:
    seconds = None if target is None else target[repeat]
    workers = _variant(name).workers
    return Trial(
        variant=name,
        repeat=repeat,
        seed=repeat,
        rows=1000,
        steps=10,
        ticks=10,
        rounds=10,
        seconds=1000 / rate,
        rows_per_s=rate,
        metrics={"test_accuracy": 0.98 if metric is None else metric[repeat] or 0.0},
        target_seconds=seconds,
        target_rows=None if seconds is None else 100 * seconds,
        timing=({"input": 0.1, "compute": 0.6, "exchange": 0.2, "wait": 0.1},) * workers,
        bytes=0 if workers == 1 else 5_000_000,
        staleness={0: 3, 2: 7} if name.startswith("downpour") else {},
        memory=(200_000_000,) * workers,
        rate=0.1,
        effective_rate=0.1,
        batch_size=100,
        distance=0.0 if name.startswith("solo") else 0.01,
        agreement=0.987,
        agreement_of="classes",
    )
