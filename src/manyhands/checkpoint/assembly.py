"""Makes checkpoints of the parts that workers report, on the driver: it acts on what CheckpointParts decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.part_writer import WrittenPart, what_happened
from manyhands.checkpoint.parts import Attempt, CheckpointParts, Drop, Fail, Files, Finish
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.errors import ManyhandsError


@dataclass
class CheckpointAssembly:
    """Of one launch. Every method may raise ManyhandsError, which ends the run.

    flush: write to the disk what a checkpoint counts, before its manifest. warn: tell users. written: a checkpoint is
    whole (attempt, path). claim: of this launch, may be set until the first checkpoint.
    """

    folder: AnyPath
    flush: Callable[[], None]
    warn: Callable[[str], None]
    written: Callable[[Attempt, AnyPath], None]
    claim: Claim | None = None
    parts: CheckpointParts = field(default_factory=CheckpointParts)
    _partials: dict[Attempt, AnyPath] = field(default_factory=dict, init=False)  # where the parts of each are

    def begin(self, tick: int, generation: int, worker_ids: tuple[int, ...]) -> str:
        """Make the folder for the parts; the token in its name, "" where that failed and the run goes on."""
        attempt = Attempt(tick, generation, worker_ids)
        self.parts.begin(attempt)
        self._act()
        try:
            token = checkpoints.begin(self.folder, tick, self.claim, self.warn)
        except OSError as problem:
            self._failed(attempt, problem)
            self._act()
            return ""
        self._partials[attempt] = checkpoints.partial_of(self.folder, tick, token)
        return token

    def part(self, worker_id: int, tick: int, generation: int, part: WrittenPart) -> None:
        """A worker has written its part, or could not."""
        if part.error:
            self.parts.failed(tick, generation, f"worker {worker_id}: {part.error}")
        else:
            self.parts.part(worker_id, tick, generation, part.files)
        self._act()

    def lost(self, worker_id: int) -> None:
        self.parts.lost(worker_id)
        self._act()

    def settle(self, tick: int) -> bool:
        """See CheckpointParts."""
        whole = self.parts.settle(tick)
        self._act()
        return whole

    def close(self) -> None:
        """All workers are gone: what they wrote of checkpoints that are not whole can be removed."""
        if self._partials:
            checkpoints.remove_unfinished(self.folder, self.warn)

    def _act(self) -> None:
        while actions := self.parts.decide():
            for action in actions:
                match action:
                    case Finish(attempt, parts):
                        self._finish(attempt, parts)
                    case Drop(attempt, message):
                        self._discard(attempt)
                        self.warn(message)
                    case Fail(message):
                        raise ManyhandsError(message)

    def _finish(self, attempt: Attempt, parts: tuple[Files, ...]) -> None:
        partial = self._partials[attempt]
        named = [dict(zip(checkpoints.names_of(rank), files, strict=True)) for rank, files in enumerate(parts)]
        if isinstance(partial, RemotePath):
            for worker_id, files in zip(attempt.worker_ids, named, strict=True):
                checkpoints.check_sizes(partial, files, f"worker {worker_id}", "the driver")
        together = {name: file for files in named for name, file in files.items()}
        try:
            self.flush()
            path = checkpoints.finish(self.folder, attempt.tick, partial, len(parts), together, self.claim, self.warn)
        except OSError as problem:
            self._failed(attempt, problem)
            return
        del self._partials[attempt]
        self.parts.finished(attempt)
        self.written(attempt, path)

    def _failed(self, attempt: Attempt, problem: OSError) -> None:
        self.parts.failed(attempt.tick, attempt.generation, f"the driver: {what_happened(problem)}")

    def _discard(self, attempt: Attempt) -> None:
        """Some may still write there, and are not waited for: the rest goes at the next checkpoint, or at the end."""
        if attempt in self._partials:
            checkpoints.remove(self._partials[attempt], lambda message: None)
