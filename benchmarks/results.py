"""docs/results.md: what `manyhands compare` says of the tasks digits and chars on this machine.

    python benchmarks/results.py [--quick] [--only digits] [--reports DIRECTORY]
    python benchmarks/results.py --draw                       # findings, page and plots again, from the trials of an earlier run

Writes docs/results.md whole, its plots, and what was measured to docs/results/*.json, which `report.load` reads. Let the
machine be idle meanwhile: about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.compare import VALIDATIONS, with_findings
from manyhands.evidence.compare.comparison import NUMBERS, Comparison
from manyhands.evidence.compare.report import load, save
from manyhands.evidence.compare.text import markdown

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PLOTS, FOUND = DOCS / "results.md", DOCS / "plots", DOCS / "results"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One comparison of the page."""

    task: str
    what: str
    strategies: tuple[str, ...]
    repeats: int
    target: str
    fields: dict[str, Any]
    validations: int

    @property
    def command(self) -> str:
        """The same on the command line."""
        validations = "" if self.validations == VALIDATIONS else f" --validations {self.validations}"
        fields = validations + "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.fields.items())
        return (
            f"manyhands compare {self.task} --workers 2 --repeats {self.repeats} --target '{self.target}'{fields} \\\n"
            f"    --strategies {','.join(self.strategies)}"
        )


ALL = (
    Compared(
        task="digits",
        what="1,297 scans of handwritten digits and a small convolutional network, a step of which takes a few milliseconds: work for one process.",
        strategies=(
            *("allreduce", "local-sgd:period=8", "diloco", "gossip", "downpour", "dynsgd", "agn", "easgd", "eamsgd"),
            *("hogwild", "ensemble"),
        ),
        repeats=3,
        target="test_accuracy=0.97",
        fields={},
        validations=20,
    ),
    Compared(
        task="chars",
        what="a small transformer on the source of Python's standard library, a step of which takes about a tenth of a second.",
        strategies=("allreduce", "local-sgd:period=8", "downpour", "hogwild"),
        repeats=3,
        target="test_loss<=2.6",
        fields={"max_steps": 80},
        validations=5,
    ),
)


def main() -> None:
    args = arguments()
    FOUND.mkdir(exist_ok=True)
    for one in ALL:
        if not args.draw and one.task in args.only:
            begun = time.monotonic()
            found = measured(one, args.quick)
            keep(one, found)
            print(f"{one.task}: {time.monotonic() - begun:.0f} s", flush=True)
            if args.reports:
                print(f"report: {save(found, args.reports / one.task)}")
    found_of = {one.task: with_findings(load(FOUND / f"{one.task}.json")) for one in ALL}
    for one in ALL:
        keep(one, found_of[one.task])
    PLOTS.mkdir(exist_ok=True)
    for name, comparison in found_of.items():
        draw(comparison, PLOTS / f"results-{name}.svg")
    PAGE.write_text(page(found_of))
    print(PAGE.read_text())


def keep(one: Compared, found: Comparison) -> None:
    (FOUND / f"{one.task}.json").write_text(found.to_json() + "\n")


def measured(one: Compared, quick: bool) -> Comparison:
    fields = {"max_steps": 12} if quick else one.fields
    return mh.compare(
        one.task,
        strategies=one.strategies,
        workers=[2],
        repeats=1 if quick else one.repeats,
        target=one.target,
        validations=one.validations,
        say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        **fields,
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: dict[str, Comparison]) -> str:
    parts = [
        "# What comparing showed here",
        "Made by `make results`, from real runs of the two ready-made tasks on two cores. [Compare](compare.md) says what is measured and when two "
        f"results are called different; all numbers are in [results/](results/), in the form of `{NUMBERS}`. Yours will differ: that is what the command is for.",
    ]
    for one in ALL:
        comparison = found[one.task]
        parts += [
            f"## {one.task}",
            f"{one.what[0].upper()}{one.what[1:]} {comparison.parameters:,} parameters.",
            f"<!-- run in make test-nightly: minutes, even with few steps; `make results` makes the table from the whole of it -->\n```bash\n{one.command}\n```",
            markdown(comparison).strip(),
            f"![{comparison.metric} of {one.task} against seconds](plots/results-{one.task}.svg)",
            f"Means of {comparison.repeats} repeats at each validation, against seconds of the training loop, validations left out.",
        ]
    return "\n\n".join(parts) + "\n"


def draw(comparison: Comparison, path: Path) -> None:
    """The metric against the seconds of the loop, a line for each variant: means over repeats."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "manyhands", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 4.2))
    colours = pyplot.get_cmap("tab20").colors
    for i, variant in enumerate(comparison.variants):
        course = measures.course(comparison, variant.name, lambda point: point.metrics[comparison.metric])
        if course is None:
            continue
        panel.plot(
            course.seconds,
            [math.nan if value is None else value.middle for value in course.values],
            color="black" if variant.solo else colours[i % len(colours)],
            ls="--" if variant.solo and variant.threads == 1 else "-",
            marker=".",
            label=variant.name,
        )
    if comparison.target is not None:
        panel.axhline(comparison.target.value, color="grey", lw=1, ls=":")
    panel.set_xlabel("seconds of the loop")
    panel.set_ylabel(comparison.metric)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of few steps: whether it runs at all")
    parser.add_argument(
        "--only", nargs="+", default=[one.task for one in ALL], help="of the others the numbers that are there"
    )
    parser.add_argument(
        "--draw", action="store_true", help="only findings, page and plots, from the trials that are there"
    )
    parser.add_argument("--reports", type=Path, default=None, help="the HTML reports go there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
