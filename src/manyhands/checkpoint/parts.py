"""When parts that workers write one by one make a checkpoint: a pure state machine, without clock, file or thread.

One checkpoint is under way at a time. What happened goes in; `decide()` gives what is to be done, each action once.

    begin ── all parts came ──> Finish
          ── a member is lost before its part came, or the next one begins ──> Drop
          ── a part cannot be written ──> Drop with a warning, or Fail where there is no older whole checkpoint

At a run's end every member has reported its part before `settle` is called. Then a checkpoint is whole, or it was
dropped and is to be written again, or the disk is full, which at the end is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.checkpoint.checkpoints import CheckpointFile

Files = Sequence[CheckpointFile]  # of one rank


@dataclass(frozen=True)
class Attempt:
    """One try to write the checkpoint of a step. worker_ids: of all members, in the order of their ranks."""

    tick: int
    generation: int
    worker_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """Write the manifest: all parts are there, in the order of ranks."""

    attempt: Attempt
    parts: tuple[Files, ...]


@dataclass(frozen=True)
class Drop:
    """Remove what was written of it, and tell users why."""

    attempt: Attempt
    message: str


@dataclass(frozen=True)
class Fail:
    """End the run with this error."""

    message: str


@dataclass
class CheckpointParts:
    """newest: the step of the newest whole checkpoint, None before the first."""

    newest: int | None = None
    _attempt: Attempt | None = field(default=None, init=False)  # that is under way
    _parts: dict[int, Files] = field(default_factory=dict, init=False)  # by worker id
    _failure: tuple[int, str] | None = field(default=None, init=False)  # of the newest attempt: its step, and why
    _actions: list[Finish | Drop | Fail] = field(default_factory=list, init=False)

    # -- what happened -----------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """These members write a checkpoint. One that is still under way lacks the part of a worker that has left."""
        self._drop("not all of its parts were written when the next checkpoint began")
        self._attempt, self._parts, self._failure = attempt, {}, None

    def part(self, worker_id: int, tick: int, generation: int, files: Files) -> None:
        """A member has written its part; what belongs to an attempt that is over is ignored."""
        attempt = self._attempt
        if attempt is None or (attempt.tick, attempt.generation) != (tick, generation):
            return
        if worker_id not in attempt.worker_ids:
            return
        self._parts[worker_id] = files
        if len(self._parts) == len(attempt.worker_ids):
            self._actions.append(Finish(attempt, tuple(self._parts[one] for one in attempt.worker_ids)))

    def finished(self, attempt: Attempt) -> None:
        """Its manifest is written."""
        self.newest = attempt.tick
        if self._attempt == attempt:
            self._attempt = None

    def failed(self, tick: int, generation: int, why: str) -> None:
        """A part, the folder or the manifest could not be written. why: who, and what the system said."""
        attempt = self._attempt
        if attempt is None or (attempt.tick, attempt.generation) != (tick, generation):
            return
        self._attempt, self._failure = None, (tick, why)
        if self.newest is None:
            self._actions.append(Fail(f"{_cannot(tick, why)}, and there is no older one. Make room, then start again"))
            return
        goes_on = f"The run goes on, and its newest checkpoint is of step {self.newest:,}: make room"
        self._actions.append(Drop(attempt, f"{_cannot(tick, why)}. {goes_on}"))

    def lost(self, worker_id: int) -> None:
        """A worker is lost. Where its part is there, nobody needs it."""
        if self._attempt is not None and worker_id in self._attempt.worker_ids and worker_id not in self._parts:
            self._drop(f"worker {worker_id} was lost before its part was written")

    def settle(self, tick: int) -> bool:
        """The run is at its end, and all members have reported their parts: whether this checkpoint, its last, is whole.

        Where it is not, it is to be written again; where that failed, `decide` gives Fail.
        """
        if self._attempt is not None:
            self._drop("not all of its parts were written when the run ended")
        if self._failure is not None and self._failure[0] == tick:
            kept = f"then resume the run from step {self.newest or 0:,} (resume=True, --resume)"
            self._actions.append(Fail(f"{_cannot(*self._failure)}, and it is the run's last one. Make room, {kept}"))
        return self.newest == tick

    # -- what to do --------------------------------------------------------------------------------------------------

    def decide(self) -> list[Finish | Drop | Fail]:
        """What is to be done by now, in this order."""
        actions, self._actions = self._actions, []
        return actions

    def _drop(self, why: str) -> None:
        if self._attempt is None:
            return
        newest = "there is no older one" if self.newest is None else f"the newest whole one is of step {self.newest:,}"
        message = f"the checkpoint of step {self._attempt.tick:,} is dropped, because {why}; {newest}"
        self._actions.append(Drop(self._attempt, message))
        self._attempt = None


def _cannot(tick: int, why: str) -> str:
    return f"the checkpoint of step {tick:,} cannot be written ({why})"
