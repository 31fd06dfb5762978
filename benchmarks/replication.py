"""What a backup of a server shard costs, and what a lost primary costs with one.

    python benchmarks/replication.py push [--repeats 20] [--pushes 200] [--size 4MB] [--json FILE]
    python benchmarks/replication.py kill [--kills 200] [--size 4MB] [--json FILE]

All runs are launches of engine `local` with one shard; with a backup means `survive="copies=2"`, without `copies=1`.

**push.** One worker pushes an update of --size and pulls the center twice, --pushes times in a launch: at the first pull the
backup still takes up the push, at the second nobody does anything else. Launches with and without a
backup alternate, over shared memory (`memory`, as on one host) and with all bytes through the sockets (`socket`, as
between hosts: the primary forwards the update). The table has the median over launches of each launch's median, and the median of
the ratios of neighbouring launches.

**kill.** Two workers push without a pause, each push into an element of its own. At random moments, about every second, the shard's
primary gets SIGKILL. At the end each element of the center must be 1: 0 is a push that was answered and lost, more is one that
entered twice. From the kill to the next answered push: until a worker's first push that the next primary answered.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.local.engine import Local
from manyhands.engines.survive import Survive
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker

SPEC = ServerSpec(rule="add")
NAMES = ("push", "pull after it", "pull")
GOALS = {"memory": 1.8, "socket": 2.6, "pull": 1.1}
GOAL_S = 0.5
EVERY_S = 1.2


def through_sockets(server: Any) -> None:
    """As to a shard of another host: no vector goes through memory that both map."""
    for connection in server._connections:
        connection._reaches = False


def timed(worker: Worker, elements: int, pushes: int, path: str) -> dict[str, list[float]]:
    """Seconds of each push, of the pull right after it, and of another one, without the first tenth."""
    server = worker.server
    assert server is not None
    if path == "socket":
        through_sockets(server)
    center, update = torch.zeros(elements), torch.full((elements,), 1e-3)
    server.initialize(center)
    server.activate()
    pushing, pulling = partial(server.push, update), partial(server.pull, center)
    took: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(pushes):
        for name, act in zip(NAMES, (pushing, pulling, pulling), strict=True):
            began = time.perf_counter()
            act()
            took[name].append(time.perf_counter() - began)
    server.deactivate()
    return {name: values[pushes // 10 :] for name, values in took.items()}


def push(options: argparse.Namespace, local: Local) -> dict[str, Any]:
    elements = machine.bytes_of(options.size) // 4
    medians: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(options.repeats):
        for path in ("memory", "socket"):
            for copies in (1, 2):
                survive = Survive(copies=copies)
                spec = LaunchSpec(workers=1, server=SPEC, survive=survive, timeout_s=60.0)
                (took,) = local.launch(
                    partial(joined, timed, elements=elements, pushes=options.pushes, path=path), spec
                )
                for name, values in took.items():
                    medians.setdefault((path, copies, name), []).append(statistics.median(values))
    found: dict[str, Any] = {}
    print(f"{'':8}{'':14}{'without, ms':>13}{'with, ms':>11}{'ratio':>8}{'goal':>7}")
    for path in ("memory", "socket"):
        for name in NAMES:
            without, backed = medians[path, 1, name], medians[path, 2, name]
            ratio = statistics.median(b / a for a, b in zip(without, backed, strict=True))
            goal = GOALS[path if name == "push" else "pull"]
            row = [1e3 * statistics.median(without), 1e3 * statistics.median(backed), ratio, goal]
            found[f"{path} {name}"] = dict(zip(("without_ms", "with_ms", "ratio", "goal"), row, strict=True))
            print(f"{path:8}{name:14}{row[0]:13.3f}{row[1]:11.3f}{row[2]:8.2f}{row[3]:7.1f}")
    return found


def joined(program: Any, worker: Worker, **options: Any) -> Any:
    """Where members may change, a worker begins alone."""
    if worker.elastic and not worker.join(blank=True):
        return None
    return program(worker, **options)


def counted(worker: Worker, elements: int, until_s: float) -> tuple[list[tuple[float, int]], list[int]]:
    """When each push was answered, and by which primary; how often each element that was pushed is in the center."""
    server: Any = worker.server
    half = elements // 2
    first, most = worker.rank * half, half
    center, update = torch.zeros(elements), torch.zeros(elements)
    server.initialize(center)
    server.activate()
    worker.group.barrier()
    notes: list[tuple[float, int]] = []
    began = time.monotonic()
    while time.monotonic() - began < until_s and len(notes) < most:
        worker.driver.progress("compute", len(notes))
        update[first + len(notes)] = 1
        server.push(update)
        update[first + len(notes)] = 0
        notes.append((time.monotonic(), server._connections[0].primaries))
    worker.driver.progress("end", 1)
    server.deactivate()
    made = worker.group.all_gather_json([len(notes), notes])
    server.center(center)
    worker.group.barrier()
    times = [int(center[rank * half + index]) for rank, (number, _) in enumerate(made) for index in range(number)]
    everyone = [tuple(note) for _, one in made for note in one]
    return everyone, times


class Kills:
    """Kills primaries from the driver's loop, each a random time after the shard has two copies again."""

    def __init__(self, most: int) -> None:
        self.at: list[float] = []
        self._most, self._draw, self._due = most, random.Random(1), 0.0
        self._plain = ElasticDriver._inject_faults

    def inject(self, driver: ElasticDriver) -> None:
        self._plain(driver)
        now, copies = time.monotonic(), driver.copies
        under_way = driver.monitor.processes[0].phase == "compute" and copies.copy_of(0, "backup") is not None
        if not under_way or len(self.at) == self._most:
            self._due = 0.0
        elif not self._due:
            self._due = now + 0.1 + 0.5 * self._draw.random()
        elif now >= self._due:
            self.at.append(time.monotonic())
            driver._signal(copies.copy_of(0, "primary"), signal.SIGKILL)  # type: ignore[arg-type]
            self._due = 0.0


def kill(options: argparse.Namespace, local: Local) -> dict[str, Any]:
    elements = machine.bytes_of(options.size) // 4
    seen = Kills(options.kills)
    ElasticDriver._inject_faults = lambda driver: seen.inject(driver)  # type: ignore[method-assign]
    spec = LaunchSpec(workers=2, server=SPEC, survive=Survive(copies=2), timeout_s=60.0)
    program = partial(counted, elements=elements, until_s=EVERY_S * options.kills)
    notes, counts = local.launch(program, spec)[0]
    pauses = []
    for at in seen.at:
        before = max((view for when, view in notes if when <= at), default=0)
        later = [when for when, view in notes if when > at and view > before]
        if later:
            pauses.append(min(later) - at)
    lost, twice = sum(one == 0 for one in counts), sum(one > 1 for one in counts)
    found = {
        "kills": len(seen.at),
        "answered": len(counts),
        "lost": lost,
        "twice": twice,
        "median_s": statistics.median(pauses),
        "longest_s": max(pauses),
        "measured": len(pauses),
        "goal_s": GOAL_S,
    }
    print(
        f"{len(seen.at)} kills, {len(counts)} answered pushes: {lost} lost, {twice} twice. To the next answered push "
        f"{found['median_s']:.3f} s (longest {found['longest_s']:.3f}, goal {GOAL_S} s for all; {len(pauses)} measured)"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("push", "kill"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--pushes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--size", default="4MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Local() as local:
        found = (push if options.what == "push" else kill)(options, local)
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": machine.facts(), options.what: found}, indent=1))


if __name__ == "__main__":
    main()
