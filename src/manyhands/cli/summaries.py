"""`manyhands summary RUN`: what a directory holds of a run or a comparison, as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from manyhands import units
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.paths import AnyPath
from manyhands.errors import BadInput
from manyhands.evidence.compare.comparison import NUMBERS
from manyhands.recording import event_log
from manyhands.recording.run import Answer, Run, read_history
from manyhands.training.run_directory import CHECKPOINTS, RESULT, read_result, shapes_in

WIDTH = 100
_HEIGHTS = "▁▂▃▄▅▆▇█"
_NUMBER = 9  # columns of a number beside a curve

Curve = list[tuple[int, float]]  # (step, value)


def text_of_directory(directory: AnyPath, width: int = WIDTH) -> str:
    """Numbers and curves of the run in a directory, or a comparison's tables. BadInput for a directory without either."""
    if (directory / NUMBERS).exists() and isinstance(directory, Path):
        return _comparison(directory, width)
    files = event_log.files_in(directory) if directory.is_dir() else []
    if not files:
        what = "does not exist" if not directory.exists() else "holds no run" if directory.is_dir() else "is a file"
        raise BadInput(
            f"{directory} {what}: give the directory of a run (events.jsonl is in it) or of a comparison ({NUMBERS} is in it)"
        )
    start, found = read(directory)
    drawn = [line for name, curve in found.items() for line in _drawn(name, curve, max(map(len, found)), width)]
    told = _finished(directory) if (directory / RESULT).exists() else _unfinished(directory, start, found)
    return "\n".join([told, *([""] if drawn else []), *drawn])


def read(directory: AnyPath) -> tuple[dict[str, Any], dict[str, Curve]]:
    """(the values of the newest launch's start, {"loss": [(step, value), …], "validation_loss": …}) of the run in a
    directory; what is not finite is left out."""
    start: dict[str, Any] = {}
    found: dict[str, dict[int, float]] = {"loss": {}}
    for row in read_history(directory):
        if row["loss"] is not None:
            found["loss"][row["step"]] = row["loss"]
    for event in event_log.read(event_log.files_in(directory)[0], lambda message: None):
        if event.type == "start":
            start = event.values
        elif event.type == "validation":
            for name, value in event.values["metrics"].items():
                found.setdefault(name, {})[event.step] = value
    finite = {name: [(s, v) for s, v in sorted(curve.items()) if math.isfinite(v)] for name, curve in found.items()}
    return start, {name: curve for name, curve in finite.items() if curve}


def _drawn(name: str, curve: Curve, longest: int, width: int) -> Iterator[str]:
    """`loss   2.302 █▆▄▂▁▁ 0.4121`: first and last value, and between them the means of equally many steps."""
    columns = max(8, min(60, width - longest - 2 * _NUMBER - 6))
    values = [value for _, value in curve]
    shown = _means(values, columns)
    low, high = min(shown), max(shown)
    steps = [round((value - low) / (high - low) * (len(_HEIGHTS) - 1)) if high > low else 0 for value in shown]
    first, last = units.number(values[0]), units.number(values[-1])
    yield f"  {name:<{longest}}  {first:>{_NUMBER}} {''.join(_HEIGHTS[step] for step in steps)} {last}"


def _means(values: Sequence[float], columns: int) -> list[float]:
    """At most so many means of neighbours."""
    count = min(columns, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)]
    return [fmean(values[start:stop]) for start, stop in itertools.pairwise(cuts)]


def _finished(directory: AnyPath) -> str:
    answer = Answer(list, shapes_in(directory))
    return Run.from_json(read_result(directory, others=()), directory=directory, answer=answer).summary()


def _unfinished(directory: AnyPath, facts: dict[str, Any], found: dict[str, Curve]) -> str:
    step = max((curve[-1][0] for curve in found.values()), default=0)
    total = f" of {facts['total_steps']:,}" if facts.get("total_steps") else ""
    newest = None
    if (directory / CHECKPOINTS).is_dir():
        newest = checkpoints.newest(directory / CHECKPOINTS, lambda message: None)
    kept = "no checkpoint" if newest is None else f"the newest checkpoint is of step {newest.tick:,}"
    workers = units.count(facts.get("workers", 1), "worker")
    return (
        f"{directory}: not finished, at step {step:,}{total} on {workers}\n"
        f"  {kept}; if no process works on it any more, go on with manyhands train ... --run-dir {directory} --resume"
    )


def _comparison(directory: Path, width: int) -> str:
    from manyhands.evidence.compare.report import load, save
    from manyhands.evidence.compare.text import text

    try:
        comparison = load(directory)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BadInput(f"{directory / NUMBERS} cannot be read: {problem}") from None
    try:
        written = f"report: {save(comparison, directory).resolve()}"
    except BadInput as no_page:
        written = str(no_page)
    return f"{text(comparison, width)}\n{written}"
