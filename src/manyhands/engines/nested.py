"""The engine of a process that is a worker already: `train()` called by a script under `manyhands run` or `launch`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from typing_extensions import override

from manyhands.comm.group import Group, Ledger
from manyhands.data.leases import End, Lease, Segment
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import Capabilities, Engine, LaunchSpec
from manyhands.engines.driver.run_monitor import USER
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.worker import DriverClient, Worker

T = TypeVar("T")


class NestedDriverClient(DriverClient):
    """Connects to the observer in rank 0's process: other ranks' events wait for `collect`, which is a collective.

    `here` connects to this process's observer. On other ranks than 0 it gets this rank's events alone, as they happen
    (`Observer.own_event`), and may request a stop: SIGTERM may reach any process. `outer` connects to the launcher,
    which still receives this worker's progress and may request a stop, too.
    """

    def __init__(self, rank: int, here: InProcessDriverClient, outer: DriverClient) -> None:
        self._rank, self._here, self._outer = rank, here, outer
        self._waiting: list[Event] = []
        self._pieces: list[RowPiece] = []

    @override
    def progress(self, phase: str, step: int) -> None:
        self._here.progress(phase, step)
        self._outer.progress(phase, step)

    @override
    def emit(self, event: Event) -> None:
        if self._rank == 0:
            self._here.emit(event)
        else:
            self._here.emit_own(event)
            self._waiting.append(event)

    @override
    def ask(self, event: Event) -> dict[str, Any]:
        return self._here.ask(event)

    @override
    def collect(self, group: Group) -> None:
        everyone = group.all_gather_json([event.to_json() for event in self._waiting])
        self._waiting.clear()
        if self._rank == 0:
            for lines in everyone:
                for line in lines:
                    self._here.emit(Event.from_json(line))
        self._collect_rows(group)

    @override
    def deliver(self, piece: RowPiece) -> None:
        self._pieces.append(piece)

    def _collect_rows(self, group: Group) -> None:
        """All ranks' pieces, to the observer of each."""
        headers = group.all_gather_json([[piece.header(), len(piece.data)] for piece in self._pieces])
        longest = max(sum(size for _, size in own) for own in headers)
        if longest:
            mine = torch.zeros(longest, dtype=torch.uint8)
            data = b"".join(piece.data for piece in self._pieces)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
            everyone = group.all_gather(mine).numpy()  # [N, longest]
        self._pieces.clear()
        for rank, own in enumerate(headers):
            at = 0
            for header, size in own:
                data = everyone[rank, at : at + size].tobytes() if size else b""
                self._here.deliver(RowPiece(rank=rank, data=data, **header))
                at += size

    @override
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        raise Unsupported(
            "strategies whose workers go at their own pace need an engine that starts the workers: call train() outside "
            "manyhands run, launch and torchrun, with engine local or hosts"
        )

    @override
    def should_stop(self) -> str:
        return self._outer.should_stop() or self._here.should_stop()


@dataclass(frozen=True, kw_only=True)
class Nested(Engine):
    """Runs the program on this worker, together with its peers, who make the same call.

    `launch` returns this rank's value in its place and None for the others. Errors pass as they are.
    """

    name: ClassVar[str] = "inside"
    capabilities: ClassVar[Capabilities] = Capabilities(spmd=True)
    worker: Worker

    @override
    def default_workers(self) -> int:
        return self.worker.size

    @override
    def own_rank(self) -> int:
        return self.worker.rank

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self._check(spec)
        outer, here = self.worker.driver, InProcessDriverClient(spec.observer, poll_s=0)
        worker = replace(self.worker, driver=NestedDriverClient(self.worker.rank, here, outer))
        values: list[Any] = [None] * worker.size
        before, worker.group.ledger = worker.group.ledger, Ledger()  # within, the group counts from 0
        try:
            values[worker.rank] = program(worker)
        except BadInput:
            outer.progress(USER, here.step)  # a script may catch it and go on
            raise
        finally:
            for operation, counts in worker.group.ledger.as_dict().items():
                before.add(operation, counts["bytes"], counts["messages"])
            worker.group.ledger = before
            gc.collect()  # a replica refers to itself, and the group's memory that it lay in is the next one's
        outer.progress(USER, here.step)
        return cast(list[T], values)

    def _check(self, spec: LaunchSpec) -> None:
        """Raise BadInput for what the launcher has decided, and asks otherwise."""
        size = self.worker.size
        if self.worker.shares_process:
            raise Unsupported(
                "train() was called by a worker of engine sim, which shares its process with the others: call "
                "train(engine=...) directly, outside of launch"
            )
        if spec.workers != size:
            raise BadInput(
                f"workers={spec.workers} was given inside a run with workers={size}: leave workers out. To train in "
                "this process alone, "
                'give engine="local", workers=1'
            )
        if spec.device != "auto":
            raise BadInput(
                f"device={spec.device!r} inside a run: leave device out, this worker has {self.worker.device} already"
            )
        if spec.threads_per_worker is not None:
            raise BadInput(
                f"threads_per_worker={spec.threads_per_worker} was given inside a run: leave it out, and give it to "
                "the launcher (manyhands run --threads-per-worker, launch(threads_per_worker=...))"
            )
        if spec.server is not None:
            raise Unsupported(
                "a parameter server needs an engine that starts it (local, hosts): call train() outside manyhands run and torchrun"
            )
