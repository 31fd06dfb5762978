"""How a Run reads: a block of text for terminals, a table for notebooks. Pure functions of the run's facts."""

from __future__ import annotations

import html as escape
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from manyhands import units
from manyhands.evidence.advise import Advice
from manyhands.recording.history import PARTS
from manyhands.server.staleness import limit, quantile

WIDTH = 100
LABEL = 11
BAR = 24  # characters of a full bar
SHOWN = 8  # workers by name
_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS = "·▁▂▃▄▅▆▇█"

Lines = list[tuple[str, str]]  # (label, text); an empty label goes on with the one before


def text(facts: dict[str, Any], advice: Advice) -> str:
    """The summary of a run. facts: the fields of Run without tensors and history, and `ticks`, its length."""
    body = [
        line
        for label, content in lines(facts)
        for line in textwrap.wrap(
            content,
            WIDTH,
            initial_indent=f"  {label:{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
        or [""]
    ]
    return "\n".join([headline(facts), *body, f"Advice: {advice.text}"])


def html(facts: dict[str, Any], advice: Advice) -> str:
    """The same as a small table."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape.escape(label)}</th><td style="text-align:left"><pre style="margin:0">{escape.escape(content)}</pre></td></tr>'
        for label, content in lines(facts)
    )
    return f"<div><b>{escape.escape(headline(facts))}</b><table>{rows}</table><p><b>Advice:</b> {escape.escape(advice.text)}</p></div>"


def headline(facts: dict[str, Any]) -> str:
    """`digits: allreduce on 2 workers (engine local, cpu, 1 thread each)`"""
    info = facts["info"]
    workers, threads = info.get("workers", 1), info.get("threads", 1)
    each = "" if workers == 1 else " each"
    place = f"engine {info.get('engine', 'local')}, {info.get('device', 'cpu')}, {units.count(threads, 'thread')}{each}"
    simulated = "simulated " if "simulated" in info else ""
    return f"{info.get('task', 'task')}: {info.get('strategy', '')} on {units.count(workers, simulated + 'worker')} ({place})"


def lines(facts: dict[str, Any]) -> Lines:
    """All lines between headline and advice; those with nothing to say are left out."""
    return [
        *_result(facts),
        *_speed(facts),
        *_simulated(facts),
        *_cores(facts),
        *_batch(facts),
        *_input(facts),
        *_cells(facts),
        *_sparsity(facts),
        *_stages(facts),
        *_plan(facts),
        *_time(facts),
        *_exchanged(facts),
        *_survived(facts),
        *_staleness(facts),
        *_unusual(facts),
        *([("directory", str(facts["directory"]))] if facts["directory"] is not None else []),
    ]


def _result(facts: dict[str, Any]) -> Lines:
    metrics = [f"{name} {units.number(value)}" for name, value in facts["metrics"].items()]
    found = [("result" if i == 0 else "", "   ".join(metrics[i : i + 3])) for i in range(0, len(metrics), 3)]
    if not metrics and facts.get("last_loss") is not None:
        found.append(
            ("result", f"training loss {units.number(facts['last_loss'])} in the last step (no validation_data)")
        )
    if kept := facts["info"].get("kept"):
        found.append(
            (
                "kept",
                f"the parameters after {units.count(kept['epoch'], 'epoch')} (step {kept['step']:,}), the best by {kept['metric']}",
            )
        )
    return found


def _speed(facts: dict[str, Any]) -> Lines:
    loop_s, total = sum(facts["timing"].values()), facts["rows"]["total"]
    rate = f"{units.number(total / loop_s)} rows/s in the loop" if loop_s else ""
    info = facts["info"]
    whose = " of worker 0" if info.get("own_pace") and info.get("workers", 1) > 1 else ""
    parts = (
        f"{units.seconds(facts['seconds'])} in all",
        rate,
        units.count(facts["steps"], "step") + whose,
        units.count(facts["rounds"], "round") + whose,
        units.count(total, "row"),
    )
    return [("speed", "   ".join(part for part in parts if part))]


def _input(facts: dict[str, Any]) -> Lines:
    """What was read of files that do not lie in memory, and how often."""
    found, info = facts.get("input"), facts["info"]
    whole = [f"every worker reads the whole stream ({info['workers']}×)"] if info.get("reads_whole_stream") else []
    if not found:
        return [("input", whole[0])] if whole else []
    blocks = found["hits"] + found["misses"]
    parts = [
        f"read {units.size(found['bytes'])} of {units.size(found['stored_bytes'])}",
        *([f"{units.times(found['amplification'])} what one worker reads"] if found.get("amplification") else []),
        *([f"{100 * found['hits'] / blocks:.0f} % of {units.count(blocks, 'block')} from the cache"] if blocks else []),
        *([f"{units.count(found['retries'], 'read')} made again"] if found["retries"] else []),
        *whole,
    ]
    return [("input", "   ".join(parts))]


def _cells(facts: dict[str, Any]) -> Lines:
    """Into how many cells a strategy has cut the rows, and how evenly."""
    cells = facts["info"].get("cells")
    if not cells:
        return []
    uneven = f"the slowest worker of each step has {units.number(cells['imbalance'])} times its share of the rows"
    blocks = cells["blocks"]
    return [("cells", f"{blocks * blocks:,} of {units.count(blocks, 'block')} of each field; {uneven}")]


def _sparsity(facts: dict[str, Any]) -> Lines:
    """HOGWILD!'s numbers, where workers step without locks."""
    found = facts["info"].get("sparsity")
    if not found:
        return []
    rho = units.number(found["rho"])
    if found["rho_at_most"] > found["rho"]:
        rho = f"{rho} to {units.number(found['rho_at_most'])}"
    whose = f" (of the first {found['rows']:,} rows)" if found["rows"] < facts["info"].get("rows", 0) else ""
    return [("sparsity", f"Ω {found['omega']:,}   Δ {units.number(found['delta'])}   ρ {rho}{whose}")]


def _stages(facts: dict[str, Any]) -> Lines:
    """Where the stages of a replica begin, what each holds, and what it cost."""
    stages, workers = facts["info"].get("stages"), facts["info"].get("workers", 1)
    if not stages:
        return []
    found = [("stages", f"{units.count(workers // len(stages), 'replica')} of {units.count(len(stages), 'worker')}")]
    for stage, one in enumerate(stages):
        timing = facts["timing_of_workers"][stage :: len(stages)]
        wait_s, total_s = sum(own["wait"] for own in timing), sum(sum(own.values()) for own in timing)
        parts = [
            f"{one['parameters']:,} parameters",
            *([f"waited {100 * wait_s / total_s:.0f} %"] if total_s else []),
            *([f"sent {units.size(one['bytes'])}"] if "bytes" in one else []),
            *([f"peak {units.size(one['memory'])}"] if "memory" in one else []),
        ]
        found.append(("", f"{stage} from {one['begins'] or 'the beginning'}: {', '.join(parts)}"))
    return found


def _plan(facts: dict[str, Any]) -> Lines:
    """What a plan predicted, and what came."""
    return [("plan", facts["plan"]["message"].removeprefix("plan: "))] if facts.get("plan") else []


def _survived(facts: dict[str, Any]) -> Lines:
    """Lost workers, and what they and other changes of the members cost."""
    found: Lines = []
    if losses := facts.get("losses"):
        causes = Counter(loss["cause"] for loss in losses)
        listed = ", ".join(f"{cause} {number}" for cause, number in causes.items())
        found.append(("lost", f"{units.count(len(losses), 'worker')} ({listed}); the run went on without them"))
    if restarts := facts.get("restarts"):
        steps = ", ".join(f"{one['step']:,}" for one in restarts)
        found.append(("restarts", f"{len(restarts)}, from step {steps}"))
    if goodput := facts.get("goodput"):
        names = [name for name in ("absent", "paused", "repeated") if goodput[f"{name}_s"] > 0]
        costs = "   ".join(f"{name} {units.seconds(goodput[f'{name}_s'])}" for name in names)
        used = f"{100 * goodput['goodput']:.1f} % of the workers' time"
        found.append(("goodput", used + (f"; not used, in worker-seconds: {costs}" if costs else "")))
    return found


def _simulated(facts: dict[str, Any]) -> Lines:
    """That nothing of this was timed on a real cluster, and what cluster it is."""
    info = facts["info"]
    if "simulated" not in info:
        return []
    options = "   ".join(f"{name} {value}" for name, value in info["simulated"].items())
    computed = f"; computed in {units.seconds(info['computed_s'])}" if "computed_s" in info else ""
    return [
        ("simulated", f"all seconds are virtual, of a cluster that is not there{computed}"),
        ("", options),
    ]


def _cores(facts: dict[str, Any]) -> Lines:
    """Where workers have more threads than cores: several workers, or joined hosts, may share one machine."""
    info = facts["info"]
    if not info.get("device", "cpu").startswith("cpu"):
        return []
    return [
        (
            "cores",
            f"{units.count(one['workers'], 'worker')} with {units.count(one['threads'], 'thread')} on "
            f"{units.count(one['cores'], 'core')} of {one['host']}: they wait for each other",
        )
        for one in info.get("machines", [])[:1]
        if one["threads"] > one["cores"]
    ]


def _batch(facts: dict[str, Any]) -> Lines:
    info = facts["info"]
    if "batch_size" not in info:
        return []
    total = "not known (a stream)" if info.get("total_steps") is None else f"{info['total_steps']:,}"
    rates = f"rate {units.number(info['rate'])}   effective rate {units.number(info['effective_rate'])}"
    return [
        (
            "batch",
            f"{units.count(info['batch_size'], 'row')}, {units.number(info['batch_size_per_worker'])} a {'replica' if info.get('stages') else 'worker'}   "
            f"{rates}",
        ),
        ("planned", f"total steps {total}   parameters {info['parameters']:,}"),
    ]


def _time(facts: dict[str, Any]) -> Lines:
    total = sum(facts["timing"].values())
    if not total:
        return []
    # what is left of a difference of virtual times is not shown
    timing = {part: value if abs(value) > 1e-9 * total else 0.0 for part, value in facts["timing"].items()}
    return [
        (
            "time" if part == PARTS[0] else "",
            f"{part:<9}{units.seconds(timing[part], 2):>11} {100 * timing[part] / total:5.1f} %  {bar(timing[part] / total)}".rstrip(),
        )
        for part in PARTS
    ]


def bar(share: float) -> str:
    """`share` in [0, 1] as block characters, to an eighth of one."""
    eighths = round(share * BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _exchanged(facts: dict[str, Any]) -> Lines:
    ledger = facts["ledger"]
    sent = sum(entry["bytes"] for entry in ledger.values())
    if not sent:
        return []
    messages = sum(entry["messages"] for entry in ledger.values())
    parts = ", ".join(
        f"{name.rstrip('_')} {units.size(entry['bytes'])}" for name, entry in ledger.items() if entry["bytes"]
    )
    return [("exchanged", f"{units.size(sent)} by all workers in {units.count(messages, 'message')}: {parts}")]


def _staleness(facts: dict[str, Any]) -> Lines:
    """How late the pushes to the server were, and whether the workers differ in that."""
    histogram, workers = facts["staleness"], facts["staleness_of_workers"]
    if not histogram:
        return []
    middle, largest = quantile(histogram, 0.5), max(histogram)
    found = [
        (
            "staleness",
            f"0 {blocks(histogram)} {largest}   median {middle}   largest {largest}   of {units.count(sum(histogram.values()), 'push', 'pushes')}",
        )
    ]
    late = quantile(histogram, 0.9)
    if "gain" in facts["info"] and late:
        text = f"rate x curvature of a push {units.number(facts['info']['gain'])}; {units.count(late, 'version')} late bears up to {limit(late):.3g}"
        found.append(("", text))
    medians = {rank: quantile(one, 0.5) for rank, one in enumerate(workers) if one}
    if len(set(medians.values())) > 1 and len(medians) <= SHOWN:
        each = "   ".join(f"{rank}: {median}" for rank, median in medians.items())
        found.append(("", f"medians by worker: {each}"))
    elif len(set(medians.values())) > 1:
        least, most = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
        text = f"medians of the workers from {medians[least]} (worker {least}) to {medians[most]} (worker {most})"
        found.append(("", text))
    return found


def blocks(histogram: Mapping[int, int]) -> str:
    """A column for each staleness, as high as its count; several share one where there are more than BAR."""
    width = -(-(max(histogram) + 1) // BAR)
    columns = [0] * (max(histogram) // width + 1)
    for versions, pushes in histogram.items():
        columns[versions // width] += pushes
    return "".join(_HEIGHTS[-(-8 * pushes // max(columns))] for pushes in columns)


def _unusual(facts: dict[str, Any]) -> Lines:
    info, unused = facts["info"], facts["rows"]["unused"]
    found: Lines = []
    if unused:
        found.append(("unused", f"{units.count(unused, 'row')} whose gradient was dropped or skipped"))
    if partial := facts["rows"].get("partial"):
        why = "which only some shards of the server have: their worker was lost between two"
        found.append(("partial", f"{units.count(partial, 'row')} {why}"))
    if facts["generations"] > 1:
        found.append(("members", f"changed {units.count(facts['generations'] - 1, 'time')}"))
    if info.get("stopped"):
        found.append(("stopped", f"before the end: {info['stopped']}"))
    found += [("warning", message) for message in info.get("warnings", [])]
    return found
