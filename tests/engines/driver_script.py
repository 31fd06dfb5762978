"""A driver in a process of its own, for tests that kill it, and what is left of it afterwards."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARK = "MANYHANDS_TEST_MARK"


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def living(ours: Callable[[Path, int], bool]) -> list[int]:
    """The processes that are no zombies, of which this holds, given their folder in /proc and their session."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state != "Z" and ours(entry, int(session)):
                found.append(int(entry.name))
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class MarkedProcess:
    """A process, and every one that descends from it, found by a mark in their environment."""

    mark: str
    process: subprocess.Popen[str]

    def processes(self) -> list[int]:
        """Everything of it that lives, the first one included."""
        mark = f"{MARK}={self.mark}".encode()
        return living(lambda entry, _: mark in (entry / "environ").read_bytes().split(b"\0"))


class Script(MarkedProcess):
    """A driver in a process of its own, by the text of its program."""

    def __init__(self, folder: Path, text: str, *arguments: str, stdin: str | None = None) -> None:
        self.mark = uuid.uuid4().hex
        path = folder / "script.py"
        path.write_text(textwrap.dedent(text))
        source = Path(__file__).resolve().parents[2] / "src"
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-" if stdin is not None else str(path), *arguments],
            stdin=subprocess.PIPE if stdin is not None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        if stdin is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(textwrap.dedent(stdin))
            self.process.stdin.close()
            self.process.stdin = None

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err
