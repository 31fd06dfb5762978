"""A comparison as one self-contained HTML file, from report.html.jinja: verdict, table, charts, method."""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.checkpoint.checkpoints import write_whole
from manyhands.errors import BadInput
from manyhands.evidence.compare import drawing, measures, significance, table
from manyhands.evidence.compare.charts import charts, left_out
from manyhands.evidence.compare.comparison import NUMBERS, Comparison, Trial

if TYPE_CHECKING:
    from markupsafe import Markup

PAGE = "report.html"
NEEDED = ("plotly", "jinja2")  # the extra `report`
SCRIPT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def save(comparison: Comparison, directory: str | Path) -> Path:
    """Write report.json and report.html into `directory`, which is created where it is missing; the page's path.

    Raises OSError; and BadInput, after report.json is written, where the extra `report` is not installed: the page can
    be made from that file later.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / NUMBERS, (comparison.to_json() + "\n").encode())
    if lacking := missing():
        later = (
            f"from manyhands.evidence.compare.report import load, save; save(load({str(folder)!r}), {str(folder)!r})"
        )
        raise BadInput(f"{lacking}: run pip install 'manyhands[report]', then python -c {shlex.quote(later)}")
    write_whole(folder / PAGE, html(comparison).encode())
    return folder / PAGE


def load(path: str | Path) -> Comparison:
    """The comparison in a report.json, or in a directory that has one. Raises BadInput, OSError."""
    given = Path(path)
    return Comparison.from_json((given / NUMBERS if given.is_dir() else given).read_text())


def missing() -> str:
    """What keeps the page from being made: `the report page needs plotly, which is not installed`; or ""."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    verb = "which is" if len(lacking) == 1 else "which are"
    return f"the report page needs {units.named(lacking)}, {verb} not installed" if lacking else ""


def html(comparison: Comparison) -> str:
    """The page. Raises BadInput where the extra `report` is not installed."""
    if lacking := missing():
        raise BadInput(f"{lacking}: pip install 'manyhands[report]'")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("manyhands.evidence.compare", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["names"] = lambda sentence: names_marked(comparison, sentence)
    environment.filters["grouped"] = grouped
    environment.filters["breakable"] = breakable
    return environment.get_template("report.html.jinja").render(plotly_js=plotly_js(), **facts(comparison))


def facts(comparison: Comparison) -> dict[str, Any]:
    """What the page is made of."""
    columns = [column for column in table.columns(comparison) if column.label]
    return {
        "comparison": comparison,
        "policy": SCRIPT_POLICY,
        "numbers": NUMBERS,
        "summary": _summary(comparison),
        "notes": notes(comparison),
        "columns": columns,
        "tables": [[one for one in columns if (one.group == table.COST) is cost] for cost in (False, True)],
        "styles": drawing.styles_of(comparison),
        "dashes": drawing.DASHES,
        "failed": lambda name: failed(comparison, name),
        "outcomes": table.OUTCOMES,
        "charts": charts(comparison),
        "left_out": left_out(comparison),
        "method": method(comparison),
        "machine": machine(comparison),
        "trial_labels": list(TRIAL),
        "trial_cells": lambda trial: trial_cells(comparison, trial),
        "colours": drawing.dark_colours(),
    }


# -- above the charts ----------------------------------------------------------------------------------------------------------


def _summary(comparison: Comparison) -> str:
    """`6 variants, 3 repeats, 38,282 parameters, judged by test_accuracy`"""
    parts = (
        units.count(len(comparison.variants), "variant"),
        units.count(comparison.repeats, "repeat"),
        units.count(comparison.parameters, "parameter"),
        f"judged by {comparison.metric}",
        *([f"target {comparison.target}"] if comparison.target else []),
    )
    return ", ".join(parts)


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if comparison.simulated:
        options = ", ".join(f"{name} {value}" for name, value in comparison.simulated.items())
        found.append(f"All seconds are virtual: they are of a simulated cluster ({options}), not of a machine.")
    if comparison.optimum:
        found.append(f"The optimum, from which distances are taken: {comparison.optimum}.")
    if not comparison.complete:
        done = units.count(comparison.repeats, "whole repeat")
        found.append(f"The comparison was interrupted: it rests on {done}.")
    broken = [
        f"{one.name}{_in_some(comparison, one.name)}" for one in comparison.variants if comparison.failure(one.name)
    ]
    if broken:
        found.append(f"Failed: {units.named(broken)}.")
    return found


def _in_some(comparison: Comparison, name: str) -> str:
    """` (in 1 of 3 repeats)`, or "" where a variant failed in all."""
    return f" ({failed(comparison, name)})" if comparison.of(name) else ""


def failed(comparison: Comparison, name: str) -> str:
    """`in 1 of 3 repeats`, or "" where a variant never failed."""
    trials = [trial for trial in comparison.trials if trial.variant == name]
    broken = sum(bool(trial.failure) for trial in trials)
    return f"in {broken} of {units.count(len(trials), 'repeat')}" if broken else ""


def breakable(name: str) -> Markup:
    """The name, escaped; a line may end behind what separates its parts, and not between `on` and the workers."""
    from markupsafe import Markup, escape

    head, tail = re.fullmatch(r"(.*?)( on \d+(?: \(\d+\))?)?", name, re.DOTALL).groups("")  # type: ignore[union-attr]
    parts = Markup("<wbr>").join(escape(part) for part in re.split("(?<=[:,/_])", head))
    return parts + Markup(' <span class="whole">{}</span>').format(tail.strip()) if tail else parts


def grouped(columns: Sequence[table.TableColumn]) -> list[tuple[str, list[table.TableColumn]]]:
    """[(group, its columns)]"""
    return [(name, list(own)) for name, own in groupby(columns, key=lambda column: column.group)]


def names_marked(comparison: Comparison, sentence: str) -> Markup:
    """The sentence, escaped, with the variants' names in it set apart: many have commas and colons of their own."""
    from markupsafe import Markup, escape

    names = sorted((variant.name for variant in comparison.variants), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", sentence) if names else [sentence]
    return Markup("").join(Markup("<b>{}</b>").format(part) if part in names else escape(part) for part in parts)


# -- below the charts ------------------------------------------------------------------------------------------------------------


def method(comparison: Comparison) -> list[str]:
    """How it was measured and when a number is called different: four sentences."""
    times, metrics = units.percent(comparison.time_margin), units.percent(comparison.metric_margin)
    return [
        "Every repeat runs each variant once, in an order that is drawn anew, so that drift of the machine hits all alike.",
        "All trials of a repeat have the same seed and consume equally many rows, and each is compared with that repeat's trial of "
        f"{comparison.reference}; seconds are the training loop's own, without start-up and validations.",
        "Large numbers in the table are means over repeats, of times and rates the geometric ones: the ratio of two of them is the mean of the "
        "repeats' ratios. Below them stand the least and the most; brackets hold the 95 % interval of the mean of the pairs, from a paired "
        "bootstrap or Student's t, whichever is wider.",
        f"A number is called better or worse only where there are at least {significance.LEAST_PAIRS} repeats and the whole interval is beyond "
        f"the margin ({times} for times and rates, {metrics} of the reference's value for metrics), and the same only where all of it is "
        "within; otherwise no difference was seen (docs/compare.md has more).",
    ]


def machine(comparison: Comparison) -> list[tuple[str, str]]:
    """[(what, value)]: of `Comparison.machine`, in its order, the versions in one line, the command last."""
    given = dict(comparison.machine)
    command = given.pop("command", "")
    versions = given.pop("versions", {})
    rows = [(name, _plain(value)) for name, value in given.items() if value not in ("", None)]
    rows += [("versions", _plain(versions))] if versions else []
    rows += [("took", units.even_duration(comparison.seconds))] if comparison.seconds else []
    return rows + ([("command", str(command))] if command else [])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


TRIAL: dict[str, tuple[str, Callable[[float], str]]] = {
    "rows": ("rows", units.number),
    "seconds": ("seconds", units.even_duration),
    "in all": ("launch_seconds", units.even_duration),
    "rows/s": ("rows_per_s", units.number),
    "target": ("target_seconds", units.even_duration),
    "metric": ("", units.metric),
    "distance": ("distance", units.small),
    "bytes": ("bytes", units.size),
}
"""{title: (what `measures.number` takes, "" for the judged metric; how it is written)}"""


def trial_cells(comparison: Comparison, trial: Trial) -> list[str]:
    """What the list of trials says of one that came to its end, in the order of TRIAL."""
    found = ((measures.number(trial, of or comparison.metric), say) for of, say in TRIAL.values())
    return [table.NOTHING if value is None else say(value) for value, say in found]


def plotly_js() -> str:
    """plotly.js, as the Python package has it: gzip as Base64, two fifths of its 4.8 MB."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
