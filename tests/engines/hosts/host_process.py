"""A host, or a driver, in a process that a test may stop or kill. Forked from one that has loaded torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manyhands.engines.hosts.join import Join, join
from manyhands.engines.local import fork_client, fork_server
from manyhands.errors import ManyhandsError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*fork_server._PRELOAD, "manyhands.engines.hosts.join", "manyhands.engines.hosts.engine"])

Say = Callable[[str], None]


class HostProcess:
    """Runs `main(say, *arguments)`, all of whose descendants are of its session."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self._lines, said = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_begin, args=(main, said, arguments))
        self.process.start()
        said.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def line(self) -> str:
        """The next one that it says; "" when there is none any more."""
        try:
            return str(self._lines.recv())
        except EOFError:
            return ""

    def until(self, text: str) -> str:
        """The next line that contains it."""
        while text not in (line := self.line()):
            assert line, f"it ended with {self.process.exitcode}"
        return line

    def processes(self) -> list[int]:
        """Everything of it that lives, itself included."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._ours(entry)]

    def _ours(self, entry: Path) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            return state != "Z" and int(session) == self.pid
        return False

    def signal(self, number: int) -> None:
        """To all of it."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, timeout_s: float = 60.0) -> tuple[int, list[str]]:
        """(exit code, what else it said)"""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, "it has not ended"
        return self.process.exitcode, list(iter(self.line, ""))


def agent(say: Say, address: str, workers: int, tls: bool = True) -> None:
    """`manyhands join`."""
    try:
        join(Join(address=address, workers=workers, wait_s=30, tls=tls), say)
    except ManyhandsError as error:
        say(str(error))
        sys.exit(error.exit_code)


def _begin(main: Callable[..., None], said: Connection, arguments: Sequence[Any]) -> None:
    os.setsid()
    fork_client._start = _Forked  # type: ignore[assignment]
    main(said.send, *arguments)


class _Forked:
    """Instead of the subprocess.Popen of a fork server: it need not load torch, since this process has."""

    def __init__(self, there: int, leftovers: Sequence[str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, there)
            os.closerange(there + 1, os.sysconf("SC_OPEN_MAX"))
            fork_server.main(there, leftovers)
            os._exit(1)
        os.close(there)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float = 10.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
