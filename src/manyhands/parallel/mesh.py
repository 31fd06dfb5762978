"""Which workers hold the same part of the model, and which hold one replica together."""

from __future__ import annotations

from manyhands.comm.stage_channel import StageChannel
from manyhands.parallel.stage_executor import StagePlace
from manyhands.parallel.trace import Cut, ModelTrace
from manyhands.worker import Mesh, Worker

_PIECE_BYTES = 1 << 20  # in which a message between stages travels, or a quarter of it


def piece_bytes(message: int) -> int:
    """In which messages of so many bytes travel: a mailbox has room for eight pieces."""
    return max(-(-message // 4), _PIECE_BYTES)


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


def place_of(worker: Worker, trace: ModelTrace, cuts: list[Cut]) -> StagePlace:
    """Where a worker stands among the stages; a collective of its replica's workers."""
    members, stage = worker.mesh.model, worker.mesh.coordinate
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
        stage=stage, members=members, before=before, after=after, tied=tied, driver=worker.driver, clock=worker.clock
    )
