"""What each test costs, and which stand in the wrong place: fast, slow or nightly.

    python tools/suite_costs.py                # runs the fast tests, then the slow ones, and prints the table
    python tools/suite_costs.py --only fast

A test's cost is the CPU time of its process and of all processes below it, in seconds of one core, so that a busy machine
changes little. A fast test takes at most 2 s, a slow one at most 30 s. The first test that needs a fixture pays for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

MARKS = {"fast": "not slow and not nightly", "slow": "slow and not nightly"}
LIMITS_S = {"fast": (0.0, 2.0), "slow": (2.0, 30.0)}
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process, of those below it that live, and of all that have ended."""
    total, left = 0, [os.getpid()]
    while left:
        folder = Path("/proc") / str(left.pop())
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
            for task in (folder / "task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return total / _TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """This file is a plugin of the processes of pytest, too: it notes what each test costs, and whether it passed."""
    before, failed = cpu_seconds(), item.session.testsfailed
    result = yield
    line = json.dumps([item.nodeid, round(cpu_seconds() - before, 2), item.session.testsfailed == failed])
    with open(os.environ["SUITE_COSTS"], "a") as file:  # one write a line: several processes append
        file.write(line + "\n")
    return result


def run_suite(tree: Path, suite: str, costs: Path, *options: str, processes: int = 2) -> int:
    """Run the tests of one place, append what each costs to `costs`, and return pytest's exit code."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "SUITE_COSTS": str(costs)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "loadgroup", "-m", MARKS[suite]]
    began = time.monotonic()
    code = subprocess.run([*command, "-p", "suite_costs", *options], cwd=tree, env=environment).returncode
    print(f"{suite} tests: {time.monotonic() - began:.0f} s, exit code {code}")
    return code


def read_costs(costs: Path) -> list[tuple[str, float, bool]]:
    """(test, CPU seconds, passed)"""
    rows = map(json.loads, costs.read_text().splitlines())
    return [(plain_name(test), seconds, passed) for test, seconds, passed in rows]


def plain_name(test: str) -> str:
    """Of a test, without the group that pytest-xdist adds for `--dist loadgroup`: file::test[case], not file::test[case]@spark."""
    return re.sub(r"@[^@\]]+$", "", test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MARKS), help="one of the places")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    for suite in [given.only] if given.only else list(MARKS):
        with tempfile.TemporaryDirectory() as folder:
            costs = Path(folder) / "costs.jsonl"
            run_suite(root, suite, costs)
            rows = read_costs(costs)
        by_folder: dict[str, list[float]] = defaultdict(list)
        for test, seconds, _ in rows:
            parts = test.split("/")
            by_folder[parts[1] if len(parts) > 2 else "at the top"].append(seconds)
        print(f"\n{suite}: {len(rows)} tests, {sum(s for _, s, _ in rows):.0f} s of CPU")
        for name, costs_of in sorted(by_folder.items(), key=lambda row: -sum(row[1])):
            print(f"  {name:16} {len(costs_of):6} tests {sum(costs_of):8.1f} s")
        least, most = LIMITS_S[suite]
        print(f"\nnot between {least:g} and {most:g} s:")
        for test, seconds, _ in sorted(rows, key=lambda row: -row[1]):
            if not least <= seconds <= most:
                print(f"  {seconds:7.2f} s  {test}")


if __name__ == "__main__":
    main()
