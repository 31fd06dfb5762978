"""A worker's part of a checkpoint, written in a thread while training goes on: from a copy, so that it stays of its step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.checkpoints import CheckpointFile
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.comm.group import Group
from manyhands.errors import ManyhandsError


@dataclass(frozen=True)
class WrittenPart:
    """What became of a worker's part: its files, or why it could not be written."""

    files: Sequence[CheckpointFile] = ()
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON, as the event `part` has it."""
        return {"files": [[file.bytes, file.sha256] for file in self.files], "error": self.error}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WrittenPart:
        """What `as_dict` gave."""
        return cls(tuple(CheckpointFile(size, digest) for size, digest in values["files"]), values["error"])


Report = Callable[[WrittenPart], None]


@dataclass
class PartWriter:
    """Of one worker: a part at a time, and one set of buffers that is kept from part to part.

    Call `wait`, then `copy`, then `start`. Only `wait` and `copy` take the caller's time, and `start` where another
    host does not see the folder. at_once: `start` writes, without a thread, as simulated workers do.
    """

    at_once: bool = field(default=False, kw_only=True)
    _copies: dict[str, Tensor] = field(default_factory=dict, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def wait(self) -> None:
        """Until the part under way is written and reported."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, into the buffers of the part before where they fit: new memory would cost more than the copy."""
        assert self._thread is None
        kept, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            own = kept.get(name)
            if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                own = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[name] = own.copy_(tensor.detach())

    def start(self, partial: AnyPath, group: Group, values: bytes, report: Report) -> None:
        """Write what was copied, and the JSON `values`, as this rank's part; a collective. report: is called once.

        Ranks that do not see the folder send their part now to the first one that does, which writes it now.
        """
        seen = group.all_gather_json(isinstance(partial, RemotePath) or partial.is_dir())
        if not any(seen):
            report(WrittenPart(error="no worker's host sees the run directory: give one that all hosts share"))
            return
        if not all(seen):
            assert isinstance(partial, Path)
            own = {} if seen[group.rank] else self._files(group.rank, values)
            size = len(values) + sum(tensor.nbytes for tensor in self._copies.values())
            sent, problem = checkpoints.send_parts(partial, group, seen, own, size)
            if problem is not None:
                report(WrittenPart(error=what_happened(problem)))
            elif sent:
                report(WrittenPart(sent))
            if sent or problem is not None:
                return
        target = partial, group.rank, values, report
        if self.at_once:
            self._write(*target)
            return
        self._thread = threading.Thread(target=self._write, args=target, name="manyhands-checkpoint", daemon=True)
        self._thread.start()

    def _files(self, rank: int, values: bytes) -> dict[str, bytes]:
        contents = b"".join(checkpoints.pieces_of(self._copies)), values
        return dict(zip(checkpoints.names_of(rank), contents, strict=True))

    def _write(self, partial: AnyPath, rank: int, values: bytes, report: Report) -> None:
        try:
            contents = checkpoints.pieces_of(self._copies), [values]
            pairs = zip(checkpoints.names_of(rank), contents, strict=True)
            files = [checkpoints.write_pieces(partial / name, pieces) for name, pieces in pairs]
        except Exception as problem:  # noqa: BLE001 - whatever it is: the driver decides, and nobody waits for this part
            report(WrittenPart(error=what_happened(problem)))
        else:
            report(WrittenPart(files))


def what_happened(problem: Exception) -> str:
    """As users are to read it: what the system said of a disk, else the error with its kind."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return str(problem) if isinstance(problem, ManyhandsError) else f"{type(problem).__name__}: {problem}"
