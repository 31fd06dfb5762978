"""Mutation testing of src/: do the tests fail when the source is wrong?

    python tools/suite_coverage.py                                 # once: which test executes which line
    python tools/mutants.py draw > build/mutants.jsonl             # 300 mutants, drawn with a fixed seed
    python tools/mutants.py run build/mutants.jsonl > build/killed.jsonl
    python tools/mutants.py compare BEFORE.jsonl AFTER.jsonl       # which are no longer killed

A mutant is one small change of one file: a comparison or an operator replaced, a constant changed, a statement dropped,
two arguments swapped. A test that fails with it kills it. `run` tries each mutant in a scratch copy of the tree, against
the tests that execute the changed line (as suite_coverage.py recorded), those of the same folder first, then cheapest
first, within --budget seconds of their recorded time, in which what the tests of a file share counts once. A line that only
worker processes execute is tried against the tests of its folder that start processes, one that nothing is seen to execute,
such as a compiled kernel's, against all of its folder. `run --tree` takes another checkout, such as one with the tests of
an older commit. Tests that fail without a mutant, too, kill nothing: each killing test runs once more on the unchanged source.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from suite_coverage import Recorded, file_of

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
}


@dataclass(frozen=True)
class Mutant:
    """One change. function, kind, before, after and ordinal find it again when the lines around it have moved."""

    path: str  # below the tree
    function: str  # its qualified name, "" at module level
    kind: str  # comparison, operator, constant, dropped, swapped
    before: str
    after: str
    ordinal: int  # among the equal ones of the function
    line: int


@dataclass(frozen=True)
class Change:
    """Bytes [start, stop) of a file are replaced. lines: of the statement, first and last."""

    mutant: Mutant
    start: int
    stop: int
    lines: tuple[int, int]


def changes_of(tree: Path, path: str) -> list[Change]:
    """All changes of one file that can be drawn."""
    source = (tree / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Change] = []
    seen: Counter[tuple[str, ...]] = Counter()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def add(kind: str, start: int, stop: int, after: str, function: str, statement: ast.stmt) -> None:
        before = source[start:stop].decode()
        key = function, kind, before, after
        seen[key] += 1
        line = source.count(b"\n", 0, start) + 1
        last = statement.body[0].lineno - 1 if hasattr(statement, "body") and statement.body else statement.end_lineno
        lines = statement.lineno, max(statement.lineno, last or 0)
        mutant = Mutant(path, function, kind, before, after, seen[key], line)
        found.append(Change(mutant, start, stop, lines))

    def between(left: ast.expr, right: ast.expr, token: str, after: str, function: str, s: ast.stmt, kind: str) -> None:
        start, stop = span(left)[1], span(right)[0]
        at = source[start:stop].find(token.encode())
        if at >= 0:
            add(kind, start + at, start + at + len(token), after, function, s)

    def expressions(node: ast.AST, function: str, statement: ast.stmt) -> None:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                between(left, right, *COMPARISONS[type(op)], function, statement, "comparison")
            case ast.BoolOp(op=op, values=[left, right, *_]):
                token, after = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                between(left, right, token, after, function, statement, "operator")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_text(left, right):
                between(left, right, *ARITHMETIC[type(op)], function, statement, "operator")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                add("operator", span(node)[0], span(operand)[0], "", function, statement)
            case ast.Constant(value=bool(value)):
                add("constant", *span(node), str(not value), function, statement)
            case ast.Constant(value=int() | float() as value):
                add("constant", *span(node), str(value + 1), function, statement)
            case ast.Call(args=[first, second, *_]) if not any(isinstance(a, ast.Starred) for a in (first, second)):
                (a, b), (c, d) = span(first), span(second)
                texts = source[a:b].decode(), source[c:d].decode()
                if texts[0] != texts[1]:
                    swapped = texts[1] + source[b:c].decode() + texts[0]
                    add("swapped", a, d, swapped, function, statement)
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "slice") and isinstance(
                node, ast.arg | ast.AnnAssign
            ):
                continue
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST) and not isinstance(one, ast.stmt | ast.arguments | ast.JoinedStr):
                    expressions(one, function, statement)

    def statements(body: list[ast.stmt], function: str) -> None:
        for s in body:
            match s:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    statements(s.body, f"{function}.{s.name}".lstrip("."))
                    continue
                case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                    continue
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() if function:
                    add("dropped", *span(s), "pass", function, s)
                case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if function:
                    add("dropped", *span(s), "pass", function, s)
            if not (isinstance(s, ast.AnnAssign) and s.value is None):
                expressions(s, function, s)
            for name in ("body", "orelse", "finalbody"):
                statements(getattr(s, name, []), function)
            for handler in [*getattr(s, "handlers", []), *getattr(s, "cases", [])]:
                statements(handler.body, function)

    statements(ast.parse(source).body, "")
    return found


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(n, ast.JoinedStr | ast.List) or isinstance(getattr(n, "value", None), str) for n in nodes)


def draw(tree: Path, count: int, seed: int, least: int = 4) -> list[Mutant]:
    """Mutants over all folders of src/: at least `least` of each, the rest in proportion to what can be changed there."""
    by_folder: dict[str, list[Change]] = defaultdict(list)
    for file in sorted((tree / "src/manyhands").rglob("*.py")):
        path = file.relative_to(tree)
        by_folder[path.parts[2] if len(path.parts) > 3 else ""] += changes_of(tree, str(path))
    total = sum(map(len, by_folder.values()))
    rest = count - least * len(by_folder)
    shares = {name: least + int(rest * len(changes) / total) for name, changes in by_folder.items()}
    for name in sorted(by_folder, key=lambda name: -len(by_folder[name]))[: count - sum(shares.values())]:
        shares[name] += 1
    generator, drawn = random.Random(seed), []
    for name, changes in sorted(by_folder.items()):
        kinds: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            kinds[change.mutant.kind].append(change)
        for _ in range(min(shares[name], len(changes))):
            of_kind = kinds[generator.choice(sorted(kind for kind, left in kinds.items() if left))]
            drawn.append(of_kind.pop(generator.randrange(len(of_kind))).mutant)
    return drawn


def found_again(tree: Path, mutant: Mutant) -> Change | None:
    """Where the mutant's change is in this tree; None if its line is no longer there."""
    if not (tree / mutant.path).exists():
        return None
    place = {**asdict(mutant), "line": 0}
    return next((c for c in changes_of(tree, mutant.path) if {**asdict(c.mutant), "line": 0} == place), None)


def tests_of(change: Change, recorded: Recorded, budget_s: float) -> list[str]:
    """The tests to try: those that execute the statement, of the same folder first, then cheapest first."""
    path = Path(change.mutant.path)
    folder = f"tests/{path.parts[2]}" if len(path.parts) > 3 else "tests/"
    executing, elsewhere = recorded.executing(change.mutant.path, change.lines)
    if elsewhere:  # also, or only, in processes that tests start, or while modules are imported
        executing |= {
            test for test in recorded.seconds if test.startswith(f"{folder.rstrip('_')}") and "_integration" in test
        }
    if not executing or (elsewhere and not change.mutant.function):  # a compiled kernel's lines are seen by nobody
        executing |= {test for test in recorded.seconds if test.startswith(folder)}
    seconds, dearest = recorded.seconds, recorded.dearest
    order = sorted(
        executing, key=lambda test: (not test.startswith(folder), dearest[file_of(test)], seconds[test], test)
    )
    chosen, files, total = [], set[str](), 0.0
    for test in order:
        total += seconds[test] if file_of(test) in files else COLLECTING_S + dearest[file_of(test)]
        if chosen and total > budget_s:
            break
        files.add(file_of(test))
        chosen.append(test)
    return sorted(chosen, key=lambda test: (not test.startswith(folder), file_of(test)))


# -- trying them -------------------------------------------------------------------------------------------------------


COLLECTING_S = 0.5  # a file of tests: its imports and fixtures
NO_TEST = "pytest's exit code"  # the mutant kept the tests from being collected
NOT_RUN = "the tests could not be run"


class FirstFailure:
    """A pytest plugin: which test failed first."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed and not self.name:  # type: ignore[attr-defined]
            self.name = report.nodeid  # type: ignore[attr-defined]


def preload() -> None:
    """Import what tests need but the source under test, so that each mutant's process begins with it."""
    import importlib

    for name in ("torch", "numpy", "pytest", "pyarrow.parquet", "pandas", "torch._dynamo", "scipy.stats"):
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"not preloaded: {name}", file=sys.stderr)


def run_tests(tree: Path, tests: list[str]) -> str:
    """In this process: the first of the tests that fails, or why none could be run, or ""."""
    os.setsid()
    os.chdir(tree)
    with (tree.parent / f"{tree.name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.path[0] = str(tree / "src")
    import pytest

    first = FirstFailure()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", "--no-header", "--fuzz", "500"]
    code = pytest.main([*options, "-m", "", *tests], plugins=[first])
    return first.name or ("" if code in (0, 5) else f"{NO_TEST} {int(code)}")


def failing_test(tree: Path, tests: list[str], limit_s: float) -> str | None:
    """The first of the tests that fails in a process of its own, or None; NO_TEST or NOT_RUN with the reason, where none
    could be run; `timeout`: no end within `limit_s`."""
    if not tests:
        return None
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        failed = ""
        try:
            failed = run_tests(tree, tests)
        except BaseException as error:  # noqa: BLE001 - it is told by the parent
            failed = f"{NOT_RUN}: {error!r}"
        finally:  # whatever happens: what follows is the parent's
            os.write(writes, failed.encode()[:2000])
            os._exit(0)
    os.close(writes)
    deadline = time.monotonic() + limit_s
    ended = False
    while not ended and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    with os.fdopen(reads) as pipe:
        failed = pipe.read()
    return failed or (None if ended else "timeout")


@contextmanager
def mutated(tree: Path, change: Change, clock: Iterator[int]) -> Iterator[None]:
    """The changed file is in the tree until the end. Its time of change is one of its own, else Python takes older bytecode."""
    file = tree / change.mutant.path
    plain = file.read_bytes()

    def write(text: bytes) -> None:
        file.write_bytes(text)
        os.utime(file, (next(clock),) * 2)

    write(plain[: change.start] + change.mutant.after.encode() + plain[change.stop :])
    try:
        yield
    finally:
        write(plain)


class Copy:
    """A scratch copy of the tree, in which mutants are tried one after another."""

    def __init__(self, tree: Path, folder: Path, budget_s: float, job: int) -> None:
        ignored = shutil.ignore_patterns(".venv", ".git", "build", ".mypy_cache", "__pycache__", ".pytest_cache")
        self.tree = Path(shutil.copytree(tree, folder / "tree", ignore=ignored))
        self._limit_s = 3 * budget_s + 90
        self._clock = iter(range(1_000_000_000 + job, 2_000_000_000, 10))
        self._fails_alone: dict[str, bool] = {}  # whether a test fails on the unchanged source

    def killer(self, change: Change, tests: list[str]) -> str | None:
        """The first of the tests that fails with the change and passes without it, or why none could end, or None."""
        left = tests
        while left:
            with mutated(self.tree, change, self._clock):
                found = failing_test(self.tree, left, self._limit_s)
            if found is None:
                return None
            if found not in tests:  # no test: pytest's exit code, no run, or no end
                if failing_test(self.tree, left, self._limit_s) == found:
                    raise RuntimeError(
                        f"{found} without a mutant, too, by {len(left)} tests from {left[0]} to {left[-1]}"
                    )
                return found
            if found not in self._fails_alone:
                self._fails_alone[found] = failing_test(self.tree, [found], 120) is not None
            if not self._fails_alone[found]:
                return found
            left = [test for test in left if test != found]
        return None


def run(mutants: list[Mutant], tree: Path, recorded: Recorded, budget_s: float, job: int, jobs: int) -> None:
    """Try every `jobs`-th mutant, and print a line of JSON for each."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Copy(tree, Path(folder), budget_s, job)
        for mutant in mutants[job::jobs]:
            began, change = time.monotonic(), found_again(copy.tree, mutant)
            tests = [] if change is None else tests_of(change, recorded, budget_s)
            killer = None if change is None else copy.killer(change, tests)
            line = {**asdict(mutant), "gone": change is None, "tests": len(tests), "killed_by": killer}
            print(json.dumps({**line, "seconds": round(time.monotonic() - began, 1)}), flush=True)


def collected(tree: Path) -> set[str]:
    """The tests that the tree has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    found = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {line for line in found.splitlines() if "::" in line}


def run_jobs(mutants: list[Mutant], tree: Path, coverage: Path, budget_s: float, jobs: int) -> None:
    recorded = Recorded(coverage)
    if gone := recorded.seconds.keys() - collected(tree):
        print(f"{len(gone)} recorded tests are gone and are left out, such as {min(gone)}", file=sys.stderr)
        for test in gone:
            del recorded.seconds[test]
    preload()
    children = []
    for job in range(jobs):
        if (child := os.fork()) == 0:
            run(mutants, tree, recorded, budget_s, job, jobs)
            os._exit(0)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            sys.exit("a job failed: see above")


def compare(before: Path, after: Path) -> None:
    """Print a table by folder, and each mutant that only the older tests kill."""
    read = [
        {tuple(list(m.items())[:6]): m for m in map(json.loads, p.read_text().splitlines())} for p in (before, after)
    ]
    both = [key for key in read[0] if key in read[1]]
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for key in both:
        for name in ((Path(read[0][key]["path"]).parts[2]).removesuffix(".py"), "all"):
            table[name][0] += 1
            for i in (0, 1):
                table[name][1 + i] += read[i][key]["killed_by"] is not None
    print("folder".ljust(16), "mutants", "before", "after")
    for name, (count, *killed) in table.items():
        print(name.ljust(16), str(count).rjust(7), str(killed[0]).rjust(6), str(killed[1]).rjust(5))
    for key in both:
        old, new = read[0][key], read[1][key]
        if old["killed_by"] and not new["killed_by"]:
            print(f"\n{new['path']}:{new['line']} {new['function']}: {new['before']!r} -> {new['after']!r}")
            print(f"  was killed by {old['killed_by']}; {new['tests']} tests tried")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print mutants, a line of JSON each")
    drawing.add_argument("--count", type=int, default=300)
    drawing.add_argument("--seed", type=int, default=40)
    running = commands.add_parser("run", help="try each, and print which test killed it")
    running.add_argument("mutants", type=Path)
    running.add_argument(
        "--coverage", type=Path, default=Path("build/coverage"), help="what suite_coverage.py recorded"
    )
    running.add_argument("--budget", type=float, default=60, help="seconds of tests tried on each mutant")
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--only", default="", help="only mutants of paths with this text")
    for one in (drawing, running):
        one.add_argument("--tree", type=Path, default=Path(), help="the checkout (default: this folder)")
    comparing = commands.add_parser("compare", help="what only the first result's tests kill")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "draw":
        for mutant in draw(given.tree, given.count, given.seed):
            print(json.dumps(asdict(mutant)))
    elif given.command == "run":
        fields = list(Mutant.__dataclass_fields__)
        lines = [json.loads(line) for line in given.mutants.read_text().splitlines()]
        mutants = [Mutant(**{name: line[name] for name in fields}) for line in lines if given.only in line["path"]]
        run_jobs(mutants, given.tree.resolve(), given.coverage, given.budget, given.jobs)
    else:
        compare(given.before, given.after)


if __name__ == "__main__":
    main()
