"""Line and branch coverage of src/ by the tests, processes that they start included, and what each test costs.

    python tools/suite_coverage.py                       # fast and slow tests -> build/coverage, and a table
    python tools/suite_coverage.py --only fast
    python tools/suite_coverage.py --table build/coverage    # the table again

It takes about twice as long as the tests do. build/coverage holds coverage.py's data, with the test by which each line was
executed, and `costs.jsonl`: the CPU seconds of each test and of its processes. tools/mutants.py reads both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any

from coverage import CoverageData
from coverage.data import combine_parallel_data
from suite_costs import MARKS, plain_name, read_costs, run_suite

SETTINGS = """
[run]
branch = true
source = {tree}/src
concurrency = thread, greenlet
parallel = true
data_file = {folder}/measured/{suite}
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse, dynamic-conflict
core = ctrace
"""


class Recorded:
    """What was recorded of a run of the tests. folder: that of `record`."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        for test, seconds, passed in read_costs(folder / "costs.jsonl"):
            if passed:
                self.seconds[test] = seconds
        self._file = str(folder / "coverage")
        self._measured = {file.rpartition("/src/")[2]: file for file in self._opened().measured_files()}

    @cached_property
    def dearest(self) -> dict[str, float]:
        """By file: the seconds of the test that paid for what its tests share."""
        found: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            found[file_of(test)] = max(found[file_of(test)], seconds)
        return found

    def _opened(self) -> CoverageData:
        """Opened anew each time: an object that was read before a fork erases the file when it is asked after it."""
        data = CoverageData(self._file)
        data.read()
        return data

    def executing(self, path: str, lines: tuple[int, int]) -> tuple[set[str], bool]:
        """The tests whose own process executed any of these lines of a file below src/; and whether anything else did."""
        contexts: set[str] = set()
        measured = self._measured.get(path.removeprefix("src/"), path)
        for line, names in self._opened().contexts_by_lineno(measured).items():
            if lines[0] <= line <= lines[1]:
                contexts |= set(names)
        tests = {plain_name(name.partition("|")[0]) for name in contexts if "|" in name}
        return tests & self.seconds.keys(), "" in contexts


def file_of(test: str) -> str:
    return test.partition("::")[0]


def record(tree: Path, folder: Path, suites: list[str], processes: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "measured").mkdir(parents=True)
    for suite in suites:
        settings = folder / f"{suite}.settings"
        settings.write_text(SETTINGS.format(tree=tree, folder=folder, suite=suite))
        measured = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        run_suite(tree, suite, folder / "costs.jsonl", *measured, processes=processes)
    data = CoverageData(str(folder / "coverage"))
    combine_parallel_data(data, data_paths=[str(file) for file in (folder / "measured").iterdir()], strict=True)


def percentages(tree: Path, folder: Path) -> dict[str, dict[str, float]]:
    """By folder of src/manyhands, and of "all": lines, covered lines, branches, covered branches, in percent together."""
    report = folder / "report.json"
    settings = folder / "report.settings"
    settings.write_text("[run]\nbranch = true\n")
    command = [sys.executable, "-m", "coverage", "json", f"--rcfile={settings}", f"--data-file={folder / 'coverage'}"]
    subprocess.run([*command, "-q", "-o", str(report)], cwd=tree, check=True)
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(int))
    for path, file in json.loads(report.read_text())["files"].items():
        below = Path(path.rpartition("/manyhands/")[2] if "/manyhands/" in path else Path(path).name).parts
        for name in (below[0] if len(below) > 1 else "modules at the top", "all"):
            for key in ("num_statements", "covered_lines", "num_branches", "covered_branches"):
                sums[name][key] += file["summary"].get(key, 0)
    table = {}
    for name, s in sums.items():
        covered, total = s["covered_lines"] + s["covered_branches"], s["num_statements"] + s["num_branches"]
        table[name] = {
            "lines": round(100 * s["covered_lines"] / max(1, s["num_statements"]), 2),
            "branches": round(100 * s["covered_branches"] / max(1, s["num_branches"]), 2),
            "together": round(100 * covered / max(1, total), 2),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MARKS), help="one of the suites")
    parser.add_argument("--out", type=Path, default=Path("build/coverage"))
    parser.add_argument("--tree", type=Path, default=Path(), help="the checkout (default: this folder)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", type=Path, help="print the table of what was recorded there")
    given = parser.parse_args()
    folder, tree = (given.table or given.out).resolve(), given.tree.resolve()
    if given.table is None:
        record(tree, folder, [given.only] if given.only else list(MARKS), given.processes)
    table = percentages(tree, folder)
    (folder / "table.json").write_text(json.dumps(table, indent=1))
    print("folder".ljust(20), "lines", "branches", "together (percent)")
    for name, row in sorted(table.items()):
        print(name.ljust(20), f"{row['lines']:5.1f} {row['branches']:8.1f} {row['together']:8.2f}")


if __name__ == "__main__":
    main()
