"""The driver's side of the fork server (see fork_server.py): start it, have it fork workers, end them, end it.

Imports nothing heavy, so that a command can start the server first and import torch beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket
from manyhands.errors import BadInput

_END_S = 10.0  # a killed process is gone in milliseconds, unless the machine itself is stuck

_BOOTSTRAP = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from manyhands.engines.local.fork_server import main
main(int(sys.argv[1]), sys.argv[3:])
"""
_LONGEST_FOLDER = 107 - len("/mh-12345678/listener-12345678")
"""Bytes: the address of a Unix socket has 107 at most."""


class Spawner:
    """One fork server, which loads torch while the caller goes on.

    leftover: a folder of this run that the server removes when this process ends, also by SIGKILL.
    """

    def __init__(self, leftover: Path | None = None) -> None:
        if not sys.executable:
            raise BadInput("sys.executable is empty, so this Python is unknown: start from a Python interpreter")
        self.wire, there = ControlSocket.pair()
        self._scratch = _folder()
        self._pids: dict[int, int] = {}  # process index -> pid of processes not known to be gone
        self._process = _start(there.detach(), [str(folder) for folder in (self._scratch, leftover) if folder])
        self.wire.sock.settimeout(_END_S)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def launch(self, shared: dict[str, Any], program: int) -> None:
        """Announce a run: what its processes share, and the descriptor of its program."""
        self._pids.clear()
        streams = [1, 2]  # standard output and error as they are now: a warm server may have inherited others
        try:
            for fd in streams:
                os.fstat(fd)
        except OSError:  # not both are open
            streams = []
        self.wire.send({"type": "launch", **shared, "scratch": self._scratch}, [program, *streams])

    def fork(self, process_index: int, descriptors: Sequence[int], own: dict[str, Any]) -> None:
        """Have a process forked, with copies of its `descriptors`; `own`: fields of ProcessPlace that are not the run's."""
        self.wire.send({"type": "fork", "process_index": process_index, "own": own}, descriptors)

    def receive(self) -> list[ControlMessage]:
        """News of the run's processes; raises `Closed` when the server died."""
        messages = self.wire.receive()
        for body, _ in messages:
            if body["type"] == "started":
                self._pids[body["process_index"]] = body["pid"]
            elif body["type"] == "exited":
                self._pids.pop(body["process_index"], None)
        return messages

    def signal(self, process_indices: Iterable[int], number: int) -> None:
        """By way of the server, so that one that is about to be forked gets it too."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wire.send({"type": "signal", "process_indices": list(process_indices), "number": number})

    def end_run(self, grace_s: float) -> None:
        """When this returns, every process of the run is gone; the server is ready for the next, or dead."""
        if self.wire.fileno() < 0:  # closed: all that was left is gone already
            return
        try:
            self.wire.send({"type": "end", "grace_s": grace_s})
            deadline, is_idle = time.monotonic() + grace_s + _END_S, False
            while not is_idle:
                if not self.wire.readable(deadline - time.monotonic()):
                    raise TimeoutError
                is_idle = any(body["type"] == "idle" for body, _ in self.receive())
            for entry in os.scandir(self._scratch) if self._scratch else ():  # the next run finds it as this one did
                if entry.is_dir(follow_symlinks=False):
                    remove(entry.path)
                else:
                    os.unlink(entry.path)
        except (Closed, BrokenPipeError, TimeoutError):
            self.kill()

    def close(self) -> int:
        """End the server, and with it whatever runs; its exit status. Idempotent."""
        self.wire.close()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            remove(self._scratch)

    def died(self) -> int:
        """The exit status of a server whose wire was closed from its side; its workers' children are ended too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self.kill()

    def kill(self) -> int:
        """As `close`, by force: also after the server was killed, when nothing else ends its workers' children."""
        self._process.kill()
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._pids.clear()
        return self.close()


def _folder() -> str:
    """A folder for multiprocessing's sockets and files, which killed processes leave there; "" if impossible."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder = "/tmp"
    try:
        return tempfile.mkdtemp(prefix="mh-", dir=folder)
    except OSError:  # a read-only machine: multiprocessing will say so, if a program needs it
        return ""


def remove(folder: str) -> None:
    """Remove such a folder and what is in it, unless somebody else has."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _start(there: int, leftovers: Sequence[str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter: its own session, so that Ctrl-C reaches the driver only; no standard input."""
    fd = fcntl.fcntl(there, fcntl.F_DUPFD_CLOEXEC, 3)  # with standard input closed, `there` may be 0
    os.close(there)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, str(fd), json.dumps(import_path()), *leftovers],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(fd)


def import_path() -> list[str]:
    """sys.path with its empty entry (a notebook's, or stdin's) spelled out: other processes have other folders."""
    return [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
