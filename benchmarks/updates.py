"""When workers pull, push and step, in five ways of training: a timeline of each, from a recorded run.

    python benchmarks/updates.py                # runs, docs/updates.json, the plots, and the table in docs/updates.md
    python benchmarks/updates.py --draw         # plots and table again, from the JSON of an earlier run

Every run is `engine="sim"`: real gradients in virtual time, so that the record is the same wherever it is made. Three
workers train `digits` on the same 288 rows; worker 2 takes 2.9 times as long as worker 0. Takes some seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple
from unittest import mock

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE, PLOTS = DOCS / "updates.json", DOCS / "updates.md", DOCS / "plots"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

WORKERS, BATCH_SIZE, STEPS = 3, 48, 6
COMPUTE, NETWORK = "row=1.25ms,1=1.3x,2=2.9x", "latency=2ms"
MEMORY = "workers_per_host=all"  # of hogwild, whose workers share memory instead of messages


class Way(NamedTuple):
    """A way of training of the page."""

    name: str
    strategy: str
    title: str
    shared: str  # what the lowest lane is
    network: str = NETWORK

    @property
    def command(self) -> str:
        """The same run on the command line."""
        return (
            f"manyhands train digits -n {WORKERS} -s {self.strategy} --batch-size {BATCH_SIZE} --max-steps {STEPS} "
            f"--compute {COMPUTE} --network {self.network}"
        )


WAYS = (
    Way("synchronous", "allreduce", "Synchronous: allreduce", "mean of\ngradients"),
    Way("periodic", "local-sgd:period=3,optimizer_state=kept", "Periodic: local-sgd:period=3", "mean of\nparameters"),
    Way("stale-synchronous", "downpour:bound=1", "Stale-synchronous: downpour:bound=1", "center"),
    Way("asynchronous", "downpour", "Asynchronous: downpour", "center"),
    Way("lock-free", "hogwild", "Lock-free: hogwild", "shared\nmemory", MEMORY),
)

Span = dict[str, Any]
"""What a worker did from `start` to `end`, in simulated milliseconds:

compute: a gradient
step: a step of its own optimizer, which takes no time here
pull: `at`, when the server read the center, whose `version` it was
push: `at`, when the server merged it; the `version` that it made; its `staleness`
gate: of stale-synchronous parallel; `waited` from `at` on
mean: of the group; `waited` from its start on
bits: as `mean`, of control bits alone
"""


def main() -> None:
    args = arguments()
    if not args.draw:
        DATA.write_text(as_json({way.name: record(way) for way in WAYS}))
    runs = json.loads(DATA.read_text())
    PLOTS.mkdir(exist_ok=True)
    for way in WAYS:
        draw(way, runs[way.name], PLOTS / f"updates-{way.name}.svg")
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{after}")
    print(table(runs))


# -- records -----------------------------------------------------------------------------------------------------------


def record(way: Way) -> list[Span]:
    """The spans of a run, in order of their starts."""
    import manyhands as mh

    spans: list[Span] = []
    with recorded(spans):
        mh.train(
            "digits",
            strategy=way.strategy,
            engine=f"sim:compute={COMPUTE!r},network={way.network!r}",
            workers=WORKERS,
            batch_size=BATCH_SIZE,
            max_steps=STEPS,
        )
    return from_zero(spans)


@contextmanager
def recorded(spans: list[Span]) -> Iterator[None]:
    """Within, what simulated workers do is appended to `spans`, in seconds of the simulation."""
    from manyhands.engines.sim.driver_client import SimDriverClient
    from manyhands.engines.sim.group import SimGroup
    from manyhands.engines.sim.server import SimServers
    from manyhands.replica.replica import Replica
    from manyhands.worker import current

    def watched(owner: type, method: str, describe: Callable[..., Span | None]) -> Any:
        plain = getattr(owner, method)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            worker = current()
            start, waited_s = worker.clock(), worker.group.waited_s
            result = plain(self, *arguments, **options)
            described = describe(*arguments, result=result, waited=worker.group.waited_s - waited_s)
            if described is not None:
                spans.append({"worker": worker.rank, "start": start, "end": worker.clock(), **described})
            return result

        return mock.patch.object(owner, method, call)

    def computed(rows: int, **_: Any) -> Span | None:
        return {"what": "compute"} if rows else None

    def stepped(result: bool, **_: Any) -> Span | None:
        return {"what": "step"} if result else None

    def called(call: Any, **_: Any) -> Span | None:
        (request,) = call.requests  # there is one shard
        match call.operation, request.answer:
            case "pull", version:
                return {"what": "pull", "at": request.handled_at, "version": version}
            case "push", applied:
                values = {"version": applied.version, "staleness": applied.staleness}
                return {"what": "push", "at": request.handled_at, **values}
            case "tick", _:
                return {"what": "gate", "at": request.handled_at, "waited": request.held_s}
        return None

    def averaged(tensor: Any, *_: Any, waited: float, **__: Any) -> Span:
        return {"what": "mean" if tensor.numel() > 1 else "bits", "waited": waited}

    with ExitStack() as stack:
        stack.enter_context(watched(SimDriverClient, "computed", computed))
        stack.enter_context(watched(Replica, "apply", stepped))
        stack.enter_context(watched(SimServers, "exchange", called))
        stack.enter_context(watched(SimGroup, "mean_", averaged))
        yield


def from_zero(spans: list[Span]) -> list[Span]:
    """In milliseconds since the first of them began, in order."""
    zero = min(span["start"] for span in spans)
    for span in spans:
        for key in span.keys() & {"start", "at", "end"}:
            span[key] = round(1e3 * (span[key] - zero), 3)
        if "waited" in span:
            span["waited"] = round(1e3 * span["waited"], 3)
    return sorted(spans, key=lambda span: (span["start"], span["end"], span["worker"]))


def as_json(runs: dict[str, list[Span]]) -> str:
    """One span a line."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(f" {json.dumps(span)}" for span in spans) + "\n]"
        for name, spans in runs.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


# -- plots and table --------------------------------------------------------------------------------------------------

COLOURS = ("#2f6db5", "#c8701a", "#3c8a4f")  # of workers
PALE = ("#c9dcf2", "#f6dcc0", "#cbe6d2")
INK, GREY, LIGHT = "#333333", "#8a8a8a", "#e9e9ec"
HEIGHT = 0.5  # of a lane's bars
PULL = (0, (2, 1))  # dashes
NUMBER: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "weight": "bold", "zorder": 6}
NUMBER["bbox"] = {"fc": "white", "ec": "none", "pad": 0.6}
LEGEND: dict[str, Any] = {
    "loc": "lower center",
    "ncols": 4,
    "fontsize": 9,
    "frameon": False,
    "handlelength": 1.3,
    "columnspacing": 1.2,
}


def draw(way: Way, spans: list[Span], path: Path) -> None:
    """A lane for each worker, and below them one for what they share."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "manyhands",
        "font.size": 10,
        "svg.fonttype": "none",
        "hatch.linewidth": 0.6,
    }
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5.2, 3.5))  # 10 points stay legible where it is 360 pixels wide
    end = max(span["end"] for span in spans)
    panel.set_xlim(-0.01 * end, 1.01 * end)
    panel.set_ylim(-0.4, WORKERS + 0.6)
    panel.set_yticks(range(WORKERS + 1), [way.shared, *(f"worker {rank}" for rank in reversed(range(WORKERS)))])
    panel.set_xlabel("simulated milliseconds")
    panel.set_title(way.title, loc="left", fontsize=10, pad=5)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    for span in spans:
        _draw_span(panel, span)
    if updates := updates_of(way, spans):
        _draw_versions(panel, updates, end)
    figure.legend(handles=_legend(spans), **LEGEND)
    figure.tight_layout(rect=(0, 0.14, 1, 1), pad=0.3)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


class Update(NamedTuple):
    """One that the center, or the shared memory, got from a worker."""

    at: float
    worker: int
    sent: float
    staleness: int


def updates_of(way: Way, spans: list[Span]) -> list[Update]:
    """Pushes; of shared memory, steps, whose staleness is counted here: other workers' steps during the gradient."""
    if way.strategy != "hogwild":
        pushes = [span for span in spans if span["what"] == "push"]
        return sorted(Update(push["at"], push["worker"], push["start"], push["staleness"]) for push in pushes)
    steps = [(span["end"], span["worker"]) for span in spans if span["what"] == "step"]
    begun = {(span["end"], span["worker"]): span["start"] for span in spans if span["what"] == "compute"}
    return [
        Update(at, rank, at, sum(begun[at, rank] < other < at and by != rank for other, by in steps))
        for at, rank in steps
    ]


def _draw_span(panel: Any, span: Span) -> None:
    rank, start, end = span["worker"], span["start"], span["end"]
    y, colour, waits_from = WORKERS - rank, COLOURS[rank], span.get("at", start)
    shared, own = HEIGHT / 2, y - HEIGHT / 2  # where arrows begin and end
    if span["what"] == "compute":
        panel.barh(y, end - start, HEIGHT, start, color=colour, ec="white", lw=0.6)
        return
    if span["what"] == "step":
        panel.plot(end, y, "D", ms=4.5, color=INK, mec="white", mew=0.7, zorder=5)
        return
    panel.barh(y, end - start, HEIGHT, start, color=PALE[rank])
    if waited := span.get("waited"):
        panel.barh(y, waited, HEIGHT, waits_from, color="white", ec=GREY, hatch="/////", lw=0.5)
    match span["what"]:
        case "push":
            _arrow(panel, (start, own), (span["at"], shared), colour)
        case "pull":
            _arrow(panel, (span["at"], shared), (end, own), colour, ls=PULL)
        case "mean":
            until = start + span["waited"]
            _arrow(panel, (until, own), ((until + end) / 2, shared), colour)
            _arrow(panel, ((until + end) / 2, shared), (end, own), colour, ls=PULL)
            panel.barh(0, end - until, HEIGHT, until, color=GREY)


def _arrow(panel: Any, source: tuple[float, float], target: tuple[float, float], colour: str, **style: Any) -> None:
    head = "-|>,head_width=0.12,head_length=0.3"
    arrow = {"arrowstyle": head, "color": colour, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    panel.annotate("", target, source, arrowprops=arrow | style, zorder=4)


def _draw_versions(panel: Any, updates: list[Update], end: float) -> None:
    """The versions in the lowest lane, and the staleness of each update above where its worker sent it."""
    panel.barh(0, end, HEIGHT, 0, color=LIGHT)
    edges = [0.0, *(update.at for update in updates), end]
    for version, (start, until) in enumerate(pairwise(edges)):
        if until - start > 0.035 * end:
            panel.text((start + until) / 2, 0, str(version), ha="center", va="center", fontsize=8, color=INK)
    for at, rank, sent, staleness in updates:
        panel.plot([at, at], [-HEIGHT / 2, HEIGHT / 2], color=COLOURS[rank], lw=1.6, solid_capstyle="butt")
        y = WORKERS - rank + HEIGHT / 2 + 0.16
        panel.text(sent, y, str(staleness), color=COLOURS[rank], **NUMBER)


def _legend(spans: list[Span]) -> list[Any]:
    """What the spans of a run need."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    has = {span["what"] for span in spans}
    handles: list[Any] = [Patch(color=COLOURS[0], label="gradient")]
    handles.append(Line2D([], [], marker="D", ls="", ms=4.5, color=INK, label="optimizer step"))
    if any(span.get("waited") for span in spans):
        handles.append(Patch(fc="white", ec=GREY, hatch="/////", label="waits"))
    if has != {"compute", "step"}:
        given, taken = ("push", "pull") if "push" in has else ("into the mean", "from the mean")
        handles.append(Patch(color=PALE[0], label="exchanges"))
        handles.append(Line2D([], [], marker=7, ms=4, lw=0.9, color=COLOURS[0], label=given))
        handles.append(Line2D([], [], marker=6, ms=4, lw=0.9, color=COLOURS[0], ls=PULL, label=taken))
    if not has & {"mean"}:
        label = "staleness" if "push" in has else "others' steps"
        handles.append(Line2D([], [], marker="$2$", ls="", ms=5, mew=0, color=COLOURS[0], label=label))
    return handles


def table(runs: dict[str, list[Span]]) -> str:
    lines = [
        "| run | steps of workers 0, 1, 2 | until all steps are done | waiting | staleness: least, median, most |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        spans = runs[way.name]
        steps = [sum(s["what"] == "step" and s["worker"] == rank for s in spans) for rank in range(WORKERS)]
        end = max(span["end"] for span in spans)
        waited = sum(span.get("waited", 0.0) for span in spans) / (WORKERS * end)
        stale = [update.staleness for update in updates_of(way, spans)]
        staleness = f"{min(stale)}, {median_low(stale)}, {max(stale)}" if stale else "–"
        name = way.strategy.partition(",")[0]
        lines.append(
            f"| {way.name}: `{name}` | {', '.join(map(str, steps))} | {end:.0f} ms | {waited:.0%} | {staleness} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only plots and table, from the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
