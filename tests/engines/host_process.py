"""A host, a driver or a rank in a process of its own, which a test may stop or kill.

It is forked from a process that has loaded torch already, and so are the fork servers that it starts: a fresh interpreter
takes 2 s of CPU until it has loaded torch, and a fork server 5 s.
"""

import ctypes
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from driver_script import living, signal_all

from manyhands.engines.hosts.join import Join, join
from manyhands.engines.local import fork_client, fork_server
from manyhands.errors import ManyhandsError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [*fork_server._PRELOAD, "manyhands.engines.hosts.join", "manyhands.engines.hosts.engine"]
)

Say = Callable[[str], None]


class HostProcess:
    """Runs `main(say, *arguments)`, all of whose descendants are of its session.

    inside: a process in whose network and under whose name it runs.
    """

    def __init__(
        self, main: Callable[..., object], *arguments: Any, variables: Mapping[str, str] | None = None, inside: int = 0
    ) -> None:
        self._lines, said = CONTEXT.Pipe(duplex=False)
        environment = {**os.environ, **(variables or {})}
        self._process = CONTEXT.Process(target=_begin, args=(main, said, arguments, environment, inside))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        said.close()

    def line(self) -> str:
        """The next one that it says; "" when there is none any more."""
        try:
            return str(self._lines.recv())
        except EOFError:
            return ""

    def until(self, text: str) -> str:
        """The next line that contains it."""
        while text not in (line := self.line()):
            assert line, f"it ended with {self.end()}"
        return line

    def processes(self) -> list[int]:
        """Everything of it that lives, itself included."""
        return living(lambda _, session: session == self.pid)

    def signal(self, number: int) -> None:
        """To everything of it."""
        signal_all(self.processes(), number)

    def end(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """(exit code, the rest of what it said)"""
        said, deadline = list[str](), time.monotonic() + timeout_s
        with suppress(EOFError):
            while self._lines.poll(max(0.0, deadline - time.monotonic())):
                said.append(self._lines.recv())
        self._process.join(max(0.0, deadline - time.monotonic()))
        assert self._process.exitcode is not None, said
        return self._process.exitcode, "\n".join(said)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(10)
        self._process.close()
        self._lines.close()


def agent(say: Say, address: str, workers: int, tls: bool = True) -> None:
    """`manyhands join`."""
    try:
        join(Join(address=address, workers=workers, wait_s=30, tls=tls), say)
    except ManyhandsError as error:
        say(str(error))
        sys.exit(error.exit_code)


def command(say: Say, folder: Path, *words: str) -> None:
    """`manyhands ...` in a folder of its own."""
    from manyhands.cli.commands import main

    os.chdir(folder)
    sys.argv = ["manyhands", *words]
    main()


class _Said(io.TextIOBase):
    """Standard output and error."""

    def __init__(self, say: Say) -> None:
        self._say, self._begun = say, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._say(line or " ")  # an empty one would be the end
        return len(text)


def _begin(
    main: Callable[..., object], said: Connection, arguments: Sequence[Any], environment: dict[str, str], inside: int
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for name in ("net", "uts") if inside else ():
        with open(f"/proc/{inside}/ns/{name}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    fork_client._start = _ForkedServer  # type: ignore[assignment]
    sys.stdout = sys.stderr = _Said(said.send)
    main(said.send, *arguments)


class _ForkedServer:
    """Instead of the subprocess.Popen of a fork server, which need not load torch, since this process has."""

    def __init__(self, there: int, leftovers: Sequence[str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, there)
            os.closerange(there + 1, os.sysconf("SC_OPEN_MAX"))
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
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
