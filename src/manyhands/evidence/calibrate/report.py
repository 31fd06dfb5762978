"""A calibration as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from manyhands.evidence.calibrate.calibrate import Calibration, Prediction
from manyhands.evidence.calibrate.coding import CodecTimes
from manyhands.evidence.calibrate.fit import Terms
from manyhands.evidence.calibrate.measure import bandwidth_of
from manyhands.evidence.text_table import text_table
from manyhands.units import count, duration, short

WIDTH = 120
GOOD = 0.15  # the text points out predictions with a larger error


def text(calibration: Calibration, task: str, path: Path) -> str:
    """What was measured, the errors of predictions, and how to use the profile at `path`."""
    parts = [_measured(calibration), _coded(calibration.codecs), _predicted(calibration.predictions)]
    return "\n\n".join("\n".join(lines) for lines in [*parts, _next(calibration, task, path)] if lines)


def _measured(calibration: Calibration) -> list[str]:
    profile, compute, server = calibration.profile, calibration.compute, calibration.server
    machine = profile.machine
    head = (
        f"{profile.task} on {count(profile.workers, 'worker')} at the same time, "
        f"{count(int(machine['threads_per_worker']), 'thread')} each, {count(int(machine['cores']), 'core')} "
        f"({calibration.seconds:.0f} s)"
    )
    speed = f"{duration(compute.row)} a row + {duration(compute.step)}, jitter {compute.jitter:.1%}"
    fitted = ", ".join(f"{error:+.0%} at {count(rows, 'row')}" for rows, error in sorted(compute.residuals.items()))
    request = f"{duration(server.request)} a request, {duration(server.pull)} a pull, {duration(server.push)} a push"
    busy = f"{duration(profile.compute.request)} more a request, {duration(profile.compute.lease)} a lease"
    rows = [
        ("step", f"{speed}; fitted {fitted}"),
        ("shared memory", _link(calibration.memory)),
        ("sockets", _link(calibration.sockets)),
        ("server", f"{request} ({count(server.bytes, 'byte')}), {duration(server.lease)} a lease"),
        ("while computing", busy),
    ]
    width = max(len(name) for name, _ in rows)
    return [head, *(f"  {name:<{width}}  {text}" for name, text in rows)]


def _link(terms: Terms) -> str:
    bandwidth = bandwidth_of(terms)
    rate = "bytes cost nothing" if bandwidth == float("inf") else f"{short(bandwidth / 1e9)} Gbit/s"
    return f"{duration(terms.first)} latency, {rate}; fitted within {terms.worst:.0%}"


def _coded(codecs: Sequence[CodecTimes]) -> list[str]:
    """Times for the task's own vector. In the simulator each received payload is decoded."""
    if not codecs:
        return []
    table = {
        "codec": [one.codec for one in codecs],
        "bytes": [f"{one.nbytes:,}" for one in codecs],
        "ms to encode": [short(1e3 * one.encode_s) for one in codecs],
        "ms to decode one payload": [short(1e3 * one.decode_s) for one in codecs],
    }
    return [text_table(table, WIDTH)]


def _predicted(predictions: Sequence[Prediction]) -> list[str]:
    if not predictions:
        return ["No strategy was compared."]
    table = {
        "strategy": [one.strategy for one in predictions],
        "real ms a step": [f"{1e3 * one.real_s:.2f}" for one in predictions],
        "in the slowest run": [f"{1e3 * one.slowest_s:.2f}" for one in predictions],
        "simulated ms": [f"{1e3 * one.simulated_s:.2f}" for one in predictions],
        "error": [f"{one.error:+.1%}" for one in predictions],
    }
    lines = [text_table(table, WIDTH)]
    if any(abs(one.error) > GOOD or one.slowest_s > (1 + GOOD) * one.real_s for one in predictions):
        lines.append(
            f"Errors above {GOOD:.0%}, or runs that differ by more, mostly mean that the machine had other work to do: "
            "calibrate again when it is idle."
        )
    return lines


def _next(calibration: Calibration, task: str, path: Path) -> list[str]:
    workers = calibration.profile.workers
    options = f"-n {16 * workers} -s diloco --engine sim --profile {shlex.quote(str(path))}"
    command = f"manyhands train {shlex.quote(task)} {options}"
    return [
        f"Written to {path}. 16 such machines side by side, and the same in a slower network:",
        f"  {command}",
        f"  {command} --network latency=1ms,bandwidth=1Gbit",
    ]
