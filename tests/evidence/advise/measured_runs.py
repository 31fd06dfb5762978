"""Measurements with planted numbers, for the tests of advice."""

import re
from dataclasses import replace
from typing import Any

from manyhands.evidence.advise import Compared, Contestant, Ratio, RunMeasurements
from manyhands.strategies import described, strategy_of

LINE = 200 - len("Advice: ")  # two lines of a summary


def measured(
    *,
    input: float = 0.0,
    compute: float = 0.0,
    exchange: float = 0.0,
    wait: float = 0.0,
    steps: int = 10,
    workers: int = 2,
    **more: Any,
) -> RunMeasurements:
    """Of two workers on two cores that are known to be on one host."""
    seconds = {"input_s": input, "compute_s": compute, "exchange_s": exchange, "wait_s": wait}
    strategy = described(more.get("strategy", "allreduce"))
    return RunMeasurements(**{"workers": workers, "steps": steps, "cores": 2, **strategy, **seconds, **more})


def contestant(
    name: str,
    of: RunMeasurements,
    speed: float | None = 1.0,
    *,
    quality: str = "same",
    outcome: str = "",
    effective_rate: float | None = None,
    batch_size: int = 64,
    reached: float | None = None,
) -> Contestant:
    """Its speed's interval is a tenth wide on each side; without an `outcome` better or worse where 1 is not in it."""
    ratio = None
    if speed is not None:
        said = outcome or ("better" if 0.9 * speed > 1 else "worse" if 1.1 * speed < 1 else "unclear")
        ratio = Ratio(middle=speed, low=0.9 * speed, high=1.1 * speed, outcome=said)
    rated = of if of.rate else replace(of, rate=0.1)
    rates = {"effective_rate": rated.rate if effective_rate is None else effective_rate, "batch_size": batch_size}
    return Contestant(name=name, measured=rated, speed=ratio, quality=quality, reached=reached, **rates)


def solo(threads: int = 2, **more: Any) -> Contestant:
    """The reference."""
    of = measured(compute=10.0, workers=1, threads_per_worker=threads, one_host=True, strategy="solo", **more)
    return replace(contestant("solo", of), speed=None, quality="")


def compared(*contestants: Contestant, **more: Any) -> Compared:
    return Compared(**{"contestants": contestants, "reference": "solo", "metric": "test_accuracy", **more})


def reads_well(text: str, length: int = LINE) -> None:
    """One line, that a terminal wraps once at most, without words of the code alone; a strategy that it names exists."""
    assert len(text) <= length, text
    assert "\n" not in text
    assert text.endswith(".")
    assert not re.search(r"Amdahl|_s\b|_per_|None|nan|inf\b|  |\d{7}", text), text
    for spec in re.findall(r"--strategy (\S+)", text):
        if ".py" not in spec:
            strategy_of(spec.rstrip(".;,"))
