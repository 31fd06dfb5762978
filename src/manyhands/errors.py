"""Every error that manyhands raises on purpose: each says what was expected, what came and what to do next."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

_PACKAGE = str(Path(__file__).parent)
_TASKS = str(Path(_PACKAGE) / "tasks")
LIBRARIES = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where Python's own modules and installed packages lie."""


class ManyhandsError(Exception):
    """The root of manyhands' own errors; `exit_code` is what the command ends with."""

    exit_code = 1


class BadInput(ManyhandsError, ValueError):
    """An invalid value, file or combination. Raised before any process starts."""

    exit_code = 2


class UnknownName(BadInput):
    """A task, strategy, engine or option of this name does not exist; the message lists those that do."""


class Unsupported(BadInput):
    """Both choices are valid, but not together (a server strategy under torchrun, say)."""


class NotFinite(ManyhandsError):
    """A gradient with a NaN or an infinity, where such steps are not to be left out (`nonfinite`)."""


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a whole or floating-point number; True and False are none, NaN is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_of(text: str) -> int | None:
    """The whole number that a text states, else None. (`isdigit` accepts "²" and 5,000 digits; `int` does not.)"""
    try:
        return int(text)
    except ValueError:
        return None


def traceback_of(error: BaseException) -> str:
    """The text of an error's traceback from the first line of the user's program on; all of it where no line is.

    Of a PeerLost, whose cause is elsewhere, the program's lines alone.
    """
    start = trace = error.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if isinstance(error, PeerLost) and trace is not None:
        own = [line for line in traceback.extract_tb(error.__traceback__) if is_users(line.filename)]
        return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own)])
    return "".join(traceback.format_exception(type(error), error, trace or start))


class Line(NamedTuple):
    """A line of a program. Its text is `train.py:31`."""

    file: str
    number: int
    call: int  # which one of that line

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"

    @property
    def in_words(self) -> str:
        """`train.py, line 31`"""
        return f"{Path(self.file).name}, line {self.number}"


def users_line(error: BaseException) -> Line | None:
    """The innermost line of the user's program in an error's traceback."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            found = Line(frame.f_code.co_filename, number, frame.f_lasti)
    return found


def calling_line() -> Line:
    """The innermost line that runs now and is neither torch's nor this package's: the user's, or that of a library which
    runs the user's program. Where there is none, the outermost one."""
    frame, libraries = sys._getframe(1), (_PACKAGE, *_torch())
    while frame.f_back is not None and _is_inner(frame.f_code.co_filename, libraries):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)


def _is_inner(file: str, libraries: tuple[str, ...]) -> bool:
    return file.startswith(libraries) and not file.startswith(_TASKS)


def _torch() -> tuple[str, ...]:
    """Where torch lies, which may be found by PYTHONPATH; nowhere before it is loaded."""
    path = getattr(sys.modules.get("torch"), "__file__", None)
    return _folder(path) if path else ()


@cache
def _folder(path: str) -> tuple[str, ...]:
    return (f"{Path(path).parent}/",)


def is_users(file: str) -> bool:
    """Whether code of this file is the user's: neither Python's, nor an installed package's, nor manyhands' own, but
    for its ready-made tasks."""
    if file.startswith(_TASKS):
        return True
    return not file.startswith((_PACKAGE, *LIBRARIES, *_torch(), "<frozen"))


class PeerLost(ManyhandsError):
    """A peer died, or showed no progress for `timeout_s`, while this worker waited for it in a collective."""

    def __init__(self, rank: int, host: str, operation: str, step: int, seconds: float, why: str = "is gone") -> None:
        super().__init__(
            f"{f'worker {rank} on {host}' if rank >= 0 else 'another worker'} {why}. This worker waited {seconds:.1f} "
            f"s for it in {operation} at step {step}. If it raised an error, that error is the first in the log."
        )
        self.rank, self.host, self.operation, self.step, self.seconds, self.why = (
            rank,
            host,
            operation,
            step,
            seconds,
            why,
        )

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str, str, int, float, str]]:
        return type(self), (self.rank, self.host, self.operation, self.step, self.seconds, self.why)


class WorkerFailed(ManyhandsError):
    """A worker raised, died or fell silent; the message carries its own traceback or stack.

    `rank`, `host`, `phase`, `step` say where; `detail` is the worker's traceback (exception) or the table of all
    workers and their stacks (hang); `error` is the name of the exception's class, or "" for a death or a hang.
    `cause` is that of the loss, as in `Run.losses`. `final`: starting the run again would not help.
    """

    cause = ""
    final = False

    def __init__(
        self, message: str, *, rank: int, host: str, phase: str, step: int, detail: str = "", error: str = ""
    ) -> None:
        super().__init__(message + (f"\n\n{detail}" if detail else ""))
        self.rank, self.host, self.phase, self.step, self.detail, self.error = rank, host, phase, step, detail, error


class CallbackFailed(ManyhandsError):
    """A callback raised at the end of a complete run: `run` is what train() would have returned."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run


class Preempted(ManyhandsError):
    """The run stopped on request (SIGTERM), after a checkpoint where it has a run directory: it can be resumed."""

    exit_code = 75
