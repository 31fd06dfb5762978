"""Every error that manyhands raises on purpose: each says what was expected, what came and what to do next."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Any, TypeGuard

_PACKAGE = str(Path(__file__).parent)
_TASKS = str(Path(_PACKAGE) / "tasks")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))


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
        return "".join(["Traceback (most recent call last):\n", *traceback.format_list(_users_lines(error))])
    return "".join(traceback.format_exception(type(error), error, trace or start))


def users_line(error: BaseException) -> str:
    """`train.py, line 12`: the innermost line of the user's program in an error's traceback; "" without one."""
    lines = _users_lines(error)
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else ""


def _users_lines(error: BaseException) -> list[traceback.FrameSummary]:
    return [line for line in traceback.extract_tb(error.__traceback__) if is_users(line.filename)]


def is_users(file: str) -> bool:
    """Whether code of this file is the user's: neither Python's, nor an installed package's, nor manyhands' own, but
    for its ready-made tasks."""
    if file.startswith(_TASKS):
        return True
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<frozen"))


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
