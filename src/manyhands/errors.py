"""Every error that manyhands raises on purpose: each says what was expected, what came and what to do next."""

from __future__ import annotations

from typing import Any, TypeGuard


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


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole_of(text: str) -> int | None:
    """The whole number that a text states, else None. (`isdigit` accepts "²" and 5,000 digits; `int` does not.)"""
    try:
        return int(text)
    except ValueError:
        return None


class PeerLost(ManyhandsError):
    """A peer died, or showed no progress for `timeout_s`, while this worker waited for it in a collective."""

    def __init__(self, rank: int, host: str, operation: str, step: int, seconds: float, why: str = "is gone") -> None:
        super().__init__(
            f"worker {rank} on {host} {why}: waited {seconds:.1f} s for it in {operation} at step {step}. "
            "Its own error, if it had one, is the first in the log."
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
    """

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
