"""What a calibration found, as the command prints it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.evidence.calibrate.calibrate import Calibration, Prediction
from manyhands.evidence.calibrate.coding import Coded
from manyhands.evidence.calibrate.fit import Terms
from manyhands.evidence.calibrate.measure import bandwidth_of

GOOD = 0.15  # of a prediction; a larger error is pointed out


def text(calibration: Calibration, task: str, path: Path) -> str:
    """A block of plain text: what was measured, how far predictions are off, and what to do with the profile at `path`."""
    parts = [_measured(calibration), _coded(calibration.codecs), _predicted(calibration.predictions)]
    return "\n\n".join("\n".join(lines) for lines in [*parts, _next(calibration, task, path)] if lines)


def _measured(calibration: Calibration) -> list[str]:
    profile, compute, server = calibration.profile, calibration.compute, calibration.server
    machine = profile.machine
    head = (
        f"{profile.task} on {profile.workers} workers at the same time, {machine['threads_per_worker']} "
        f"thread(s) each, {machine['cores']} cores ({calibration.seconds:.0f} s)"
    )
    speed = f"{1e3 * compute.row:.3g} ms a row + {1e3 * compute.step:.3g} ms, jitter {compute.jitter:.1%}"
    request = f"{_time(server.request)} a request, {_time(server.pull)} a pull, {_time(server.push)} a push"
    rows = [
        ("tick", f"{speed}; {_off_by(compute.residuals)}"),
        ("shared memory", _way(calibration.memory)),
        ("sockets", _way(calibration.sockets)),
        ("server", f"{request} ({server.bytes:,} bytes), {_time(server.lease)} a lease"),
        (
            "beside computing",
            f"{_time(profile.compute.request)} more a request, {_time(profile.compute.lease)} a lease",
        ),
    ]
    return [head, *_aligned(rows)]


def _off_by(residuals: Mapping[int, float]) -> str:
    return "fitted " + ", ".join(f"{error:+.0%} at {rows} row(s)" for rows, error in sorted(residuals.items()))


def _way(terms: Terms) -> str:
    speed = bandwidth_of(terms)
    said = "bytes cost nothing" if speed == float("inf") else f"{speed / 1e9:.3g} Gbit/s"
    return f"{_time(terms.first)} latency, {said}; fitted within {terms.worst:.0%}"


def _coded(codecs: Sequence[Coded]) -> list[str]:
    """Of the task's own vector; in the simulator each payload that comes is decoded."""
    if not codecs:
        return []
    width = max(len("codec"), *(len(one.codec) for one in codecs))
    lines = [f"{'codec':<{width}}  {'bytes':>12}  ms to encode  ms to decode one payload"]
    for one in codecs:
        encode, decode = f"{1e3 * one.encode_s:.3g}", f"{1e3 * one.decode_s:.3g}"
        lines.append(f"{one.codec:<{width}}  {one.nbytes:>12,}  {encode:>12}  {decode:>24}")
    return lines


def _predicted(predictions: Sequence[Prediction]) -> list[str]:
    if not predictions:
        return ["No strategy was compared."]
    width = max(len("strategy"), *(len(one.strategy) for one in predictions))
    lines = [f"{'strategy':<{width}}  real ms a step  in the slowest run  simulated ms  error"]
    for one in predictions:
        real, slowest, simulated = (f"{1e3 * seconds:.2f}" for seconds in (one.real_s, one.slowest_s, one.simulated_s))
        lines.append(f"{one.strategy:<{width}}  {real:>14}  {slowest:>18}  {simulated:>12}  {one.error:+.1%}")
    if any(abs(one.error) > GOOD or one.slowest_s > (1 + GOOD) * one.real_s for one in predictions):
        lines.append(
            f"Errors above {GOOD:.0%}, or runs that differ by more, mostly mean that the machine had other work to do: calibrate again when it is idle."
        )
    return lines


def _next(calibration: Calibration, task: str, path: Path) -> list[str]:
    workers = calibration.profile.workers
    command = f"manyhands train {shlex.quote(task)} -n {16 * workers} -s diloco --engine sim --profile {shlex.quote(str(path))}"
    return [
        f"Written to {path}. 16 such machines side by side, and the same in a slower network:",
        f"  {command}",
        f"  {command} --network latency=1ms,bandwidth=1Gbit",
    ]


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {said}" for name, said in rows]
