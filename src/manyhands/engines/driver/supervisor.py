"""`manyhands train … --max-restarts N`: a small process that starts the command's driver, and starts it again where it
was killed (SIGKILL, out of memory, a crash). It imports nothing beside the standard library, so that it needs little
memory and outlives what kills a driver.

Signals pass through to the driver, and its exit code back. Whoever asked for the end gets it: after SIGTERM, Ctrl-C,
SIGHUP or SIGQUIT nothing is started again. The driver dies with its supervisor.

What the next driver has to know, the one before has sent over a pipe: how often the run has started again, and where
other hosts find it. It gets that in the variable `VARIABLE`, see `DriverLink`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "MANYHANDS_SUPERVISED"
CREDENTIALS = "MANYHANDS_CREDENTIALS"
END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask for the end of the run."""
_PASSED = END | {signal.SIGUSR1, signal.SIGUSR2}
_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
_PR_SET_PDEATHSIG = 1
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); sys.argv[:] = sys.argv[1:]; "
    "from manyhands.__main__ import main; main()"
)

command: list[str] | None = None
"""The words of this process's own command, once that may be supervised."""


@dataclass
class DriverLink:
    """A driver's end: what the drivers before have reported, for the run that goes on, and where to report to."""

    made: list[int] = field(default_factory=list)  # restarts, each with the step from which it went on
    why: str = ""  # this driver was started again; "": it is the first
    port: int | None = None  # on which other hosts look for the driver
    _pipe: int = -1

    def take_restarts(self) -> tuple[str, list[int]]:
        """`why` and `made`, once: another run of this process has nothing to do with them."""
        taken, self.why, self.made = (self.why, self.made), "", []
        return taken

    def take_port(self) -> int | None:
        """Once, too."""
        port, self.port = self.port, None
        return port

    def report(self, **values: Any) -> None:
        """To the supervisor, if there is one. It survives this process."""
        if self._pipe >= 0:
            with suppress(BrokenPipeError):
                os.write(self._pipe, json.dumps(values).encode() + b"\n")


_link: DriverLink | None = None


def link() -> DriverLink:
    """This process's; made of the variable, which is gone then: it is no other process's business."""
    global _link
    if _link is None:
        given = json.loads(os.environ.pop(VARIABLE, "{}"))
        pipe = given.pop("pipe", -1)
        _link = DriverLink(**given, _pipe=pipe)
        if pipe >= 0:
            os.set_inheritable(pipe, False)
    return _link


def is_wanted() -> bool:
    """Whether this process is a command's, on its own, which a supervisor may start."""
    return sys.platform == "linux" and command is not None and VARIABLE not in os.environ and _link is None


def supervise(most: int, run_dir: str, *, more: Sequence[str] = (), hosts: bool = False) -> int:
    """Run this process's command in another one, at most 1 + `most` times; the exit code.

    more: words to add to the command. hosts: others join the run, with credentials that outlive its drivers.
    """
    assert command is not None
    words, folder = [*command, *more], None
    environment = dict(os.environ)
    if hosts and CREDENTIALS not in environment:
        folder = tempfile.mkdtemp(prefix="manyhands-")
        environment[CREDENTIALS] = str(Path(folder) / f"manyhands-{os.getpid()}.pem")
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored would not be waited for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED | {signal.SIGCHLD})
    try:
        return _drivers(words, environment, most, run_dir, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, handler)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _drivers(
    words: list[str], environment: dict[str, str], most: int, run_dir: str, mask: set[int | signal.Signals]
) -> int:
    """One driver after the other."""
    state: dict[str, Any] = {"made": [], "port": None}
    asked: set[signal.Signals] = set()
    why = ""
    while True:
        resuming = ["--resume"] if why and "--resume" not in words else []
        made = list(state["made"])
        code = _driver([*words, *resuming], environment, {**state, "why": why}, mask, state, asked)
        if code >= 0:
            return code
        number = signal.Signals(-code)
        if asked or number in END:
            return _CODES.get(next(iter(asked), number), 128 + number)
        if why and state["made"] == made:  # it was killed before it knew from where to go on
            state["made"] = [*made, made[-1] if made else 0]
        why = f"the driver was killed by signal {number.value} ({number.name})"
        if len(state["made"]) >= most:
            _say(f"{why}, and max_restarts is {most}: --resume --run-dir {run_dir} goes on from the newest checkpoint")
            return 1
        _say(f"{why}: it starts again (restart {len(state['made']) + 1} of {most})")


def _driver(
    words: list[str],
    environment: dict[str, str],
    given: dict[str, Any],
    mask: set[int | signal.Signals],
    state: dict[str, Any],
    asked: set[signal.Signals],
) -> int:
    """Run one; its return code. state gets what it reports, asked the signals that ask for the end."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def begin() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), *words],
            env={**environment, VARIABLE: json.dumps({**given, "pipe": theirs})},
            pass_fds=[theirs],
            preexec_fn=begin,  # this process has one thread
        )
        os.close(theirs)
        theirs = -1
        os.set_blocking(ours, False)
        received = b""
        while process.poll() is None:
            info = signal.sigtimedwait(_PASSED | {signal.SIGCHLD}, 1.0)
            received += _read(ours)
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            number = signal.Signals(info.si_signo)
            asked |= {number} & END
            if info.si_code <= 0:  # else it is the terminal's, and the driver has it, too
                process.send_signal(number)
        received += _read(ours)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    for line in received.splitlines():
        with suppress(ValueError):  # half a line
            state.update(json.loads(line))
    return process.returncode


def _read(pipe: int) -> bytes:
    """What is there."""
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(pipe, 1 << 16):
            found += part
    return found


def _say(text: str) -> None:
    sys.stderr.write(f"manyhands: {text}\n")
    sys.stderr.flush()
