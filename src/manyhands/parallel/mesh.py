"""Which workers hold the same part of the model, and which hold one replica together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from manyhands.comm.group import Group
from manyhands.comm.lost import LostGroup
from manyhands.comm.solo import SoloGroup
from manyhands.comm.stage_channel import StageChannel
from manyhands.parallel.trace import Cut, ModelTrace
from manyhands.worker import DriverClient, Mesh, SoloDriverClient, Worker

_PIECE_BYTES = 1 << 20  # in which a message between stages travels, or a quarter of it


def piece_bytes(message: int) -> int:
    """In which messages of so many bytes travel: a mailbox has room for eight pieces."""
    return max(-(-message // 4), _PIECE_BYTES)


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Where a worker stands in its replica, and what it reaches."""

    stage: int
    members: Group
    """The workers of the replica, in the order of their stages."""
    before: StageChannel | None
    after: StageChannel | None
    tied: Mapping[tuple[int, ...], Group]
    """By the stages that hold the same parameters, this one among them."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    driver: DriverClient = field(default_factory=SoloDriverClient)
    clock: Callable[[], float] = time.perf_counter
    """The worker's, in seconds."""

    @classmethod
    def alone(cls, stage: int, stages: int, device: torch.device) -> Self:
        """Of a worker that is in no group."""
        members = LostGroup(stage, stages)
        return cls(stage=stage, members=members, before=None, after=None, tied={}, device=device)

    @property
    def stages(self) -> int:
        return self.members.size

    @property
    def channels(self) -> list[StageChannel]:
        return [channel for channel in (self.before, self.after) if channel is not None]


def mesh_of(worker: Worker, stages: int) -> Mesh:
    """The groups of a worker whose rank is replica · stages + stage; a collective of all workers."""
    (replica, stage), replicas = divmod(worker.rank, stages), worker.size // stages
    return Mesh(
        world=worker.group,
        data=worker.make_group([other * stages + stage for other in range(replicas)]),
        model=worker.make_group(range(replica * stages, (replica + 1) * stages)),
        rows=(replica, replicas),
        coordinate=stage,
    )


def mesh_of_blocks(worker: Worker) -> Mesh:
    """All workers hold one replica together, and each reads rows of its own."""
    group = worker.group
    return Mesh(
        world=group,
        data=SoloGroup(),
        model=group,
        rows=(worker.rank, worker.size),
        coordinate=worker.rank,
        own_rows=True,
    )


def mesh_alone(worker: Worker, stages: int) -> Mesh:
    """Of a worker whose members may change, while it is in no group: its place follows from its id."""
    (replica, stage), replicas = divmod(worker.worker_id, stages), worker.size // stages
    members = LostGroup(stage, stages)
    rows = replica % replicas, replicas
    return Mesh(world=worker.group, data=worker.group, model=members, rows=rows, coordinate=stage)


def place_of(worker: Worker, trace: ModelTrace, cuts: list[Cut]) -> StagePlace:
    """Where a worker stands among the stages; a collective of its replica's workers, unless it is in no group yet."""
    members, stage = worker.mesh.model, worker.mesh.coordinate
    if isinstance(members, LostGroup):
        return StagePlace.alone(stage, members.size, worker.device)
    first = worker.rank - stage

    def channel(left: int) -> StageChannel | None:
        """Between a stage and the next one."""
        if not 0 <= left < len(cuts):
            return None
        return StageChannel(worker.make_group([first + left, first + left + 1]), piece_bytes(cuts[left].nbytes))

    before, after = channel(stage - 1), channel(stage)
    holders = sorted({stages for stages in trace.stages_of(cuts).values() if len(stages) > 1 and stage in stages})
    tied = {stages: worker.make_group([first + one for one in stages]) for stages in holders}
    return StagePlace(
        stage=stage,
        members=members,
        before=before,
        after=after,
        tied=tied,
        device=worker.device,
        driver=worker.driver,
        clock=worker.clock,
    )
