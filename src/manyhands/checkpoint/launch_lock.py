"""One driver at a time works in a run directory: a lock on its `launch.json`, and a number that every checkpoint
carries.

The lock is flock's, which ends with the process that holds it, however that ends. `launch.json` says whose it is:
{number, host, pid}. Where a file system has no locks the number alone decides: the later launch has the directory, and
the earlier one ends at its next write (`Claim.check`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from manyhands.checkpoint.paths import AnyPath, RemotePath, open_regular
from manyhands.errors import BadInput, ManyhandsError, is_whole
from manyhands.transport.socket_io import close_in_forks

FILE = "launch.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_BYTES = 4096  # of a launch.json


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The launch that works in a run directory: its number, from 1, and its driver's process."""

    directory: AnyPath
    number: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"launch {self.number}, process {self.pid} on {self.host}"

    def check(self) -> None:
        """Raise ManyhandsError where another launch has the directory by now."""
        found = claim_in(self.directory)
        if found not in (None, self):
            raise ManyhandsError(
                f"another run now uses {self.directory} ({found}), so this run ({self}) stops writing there. Give each "
                "run its own directory, or stop the other run and resume this one (resume=True, --resume)"
            )


def claim_in(directory: AnyPath) -> Claim | None:
    """What the directory's launch.json says; None where there is none, or one that says nothing of the kind."""
    try:
        with open_regular(directory / FILE) as file:
            content: Any = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not (is_whole(content.get("number")) and is_whole(content.get("pid"))):
        return None
    return Claim(directory=directory, number=content["number"], host=str(content.get("host"))[:255], pid=content["pid"])


@dataclass(eq=False)
class LaunchLock:
    """The lock of one launch on a run directory that exists; `close` gives it back.

    Raises BadInput, with host and process, where another driver holds it; OSError where the file cannot be opened.
    """

    directory: AnyPath
    exclusive: bool = field(default=False, init=False)  # whether the file system keeps others out
    _descriptor: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.directory, RemotePath):
            return
        descriptor = os.open(self.directory / FILE, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadInput(f"{self.directory / FILE} must be a file, and it is not: move it away")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.exclusive = True
        except BlockingIOError:
            os.close(descriptor)
            who = claim_in(self.directory) or "another process"
            raise BadInput(
                f"another run uses the run directory {self.directory} ({who}): wait until it ends, stop it, or give "
                "another run directory"
            ) from None
        except BaseException as problem:
            if not (isinstance(problem, OSError) and problem.errno in NO_LOCKS):
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        close_in_forks(self)

    def claim(self, least: int) -> Claim:
        """Record that this process owns the run directory. Its number exceeds all earlier ones, and `least` - 1."""
        before = claim_in(self.directory)
        number = max(least, 1 if before is None else before.number + 1)
        own = Claim(directory=self.directory, number=number, host=socket.gethostname(), pid=os.getpid())
        data = json.dumps({"number": own.number, "host": own.host, "pid": own.pid}).encode() + b"\n"
        if self._descriptor is None:
            assert isinstance(self.directory, RemotePath)
            (self.directory / FILE).write_whole(BytesIO(data))
        else:  # in place: a file that replaces this one would have another lock
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, data, 0)
            os.fsync(self._descriptor)
        return own

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
