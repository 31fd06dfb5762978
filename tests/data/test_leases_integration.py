"""Rows leased through a real driver: by processes, each at its own pace."""

import time
from dataclasses import replace
from typing import Any

from typing_extensions import override

from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.events import Event
from manyhands.worker import Mesh, Worker

PARTS, BATCHES = 3, 40
ALL = [(index, part) for index in range(BATCHES) for part in range(PARTS)]


def segment(epoch: int = 0, **changes: Any) -> Segment:
    return Segment(**{"epoch": epoch, "first": 0, "until": BATCHES, "parts": PARTS, **changes})


class Stopping(Observer):
    """Wants a stop once it was asked something."""

    asked = False

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        self.asked = True
        return {}

    @override
    def stopping(self) -> str:
        return "callback" if self.asked else ""


def leased(worker: Worker, of: Segment) -> tuple[list[Lease], End]:
    """All that this worker gets of a segment."""
    leases = []
    while isinstance(answer := worker.lease(of), Lease):
        leases.append(answer)
        worker.emit("step", step=len(leases))
    return leases, answer


def test_every_slice_is_leased_exactly_once_in_each_epoch(local: Local) -> None:
    """The first worker is slow: the others take what nobody has begun. Then it trains alone first. CASE 18"""

    def program(worker: Worker) -> list[tuple[list[Lease], End]]:
        epochs = []
        if worker.rank == 0:
            worker.lease(segment())
        for epoch in range(2):
            worker.group.barrier()
            epochs.append(leased(worker, segment(epoch)))
        worker.group.barrier()  # the others ask, and wait, while worker 0 trains
        epochs.append(leased(worker, segment(2, rank0_warmup_ticks=100)))
        return epochs

    values = local.launch(program, LaunchSpec(workers=3))
    for epoch in range(3):
        slices = [(lease.index, lease.part) for value in values for lease in value[epoch][0]]
        assert sorted(slices + [(0, 0)] * (epoch == 0)) == ALL
        assert all(value[epoch][1].reason == "" for value in values)
    assert [lease.handed for lease in values[0][2][0][:100]] == list(range(100))


def test_the_workers_of_a_replica_get_the_same_slices(local: Local) -> None:
    """Replicas (0, 1) and (2, 3): the first worker of each asks, and replica 0 trains two slices alone."""

    def program(worker: Worker) -> tuple[list[Lease], End]:
        replica, member = divmod(worker.rank, 2)
        model, data = worker.make_group([2 * replica, 2 * replica + 1]), worker.make_group([member, member + 2])
        mesh = Mesh(world=worker.group, data=data, model=model, rows=(replica, 2))
        found = leased(replace(worker, mesh=mesh), segment(size=2, rank0_warmup_ticks=2))
        for group in (model, data):
            group.close()
        return found

    values = local.launch(program, LaunchSpec(workers=4))
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert sorted((lease.index, lease.part) for value in values[::2] for lease in value[0]) == ALL
    assert [lease.handed for lease in values[0][0][:2]] == [0, 1]
    assert values[2][0][0].part == 1  # its own queue: replica 0 reads parts 0 and 2


def test_whoever_waits_for_worker_0_hears_of_a_stop(local: Local) -> None:
    def program(worker: Worker) -> End | Lease:
        worker.group.barrier()
        if worker.rank == 0:
            worker.ask("step")
            while not worker.driver.should_stop():
                time.sleep(0.01)
        return worker.lease(segment(rank0_warmup_ticks=1000))

    values = local.launch(program, LaunchSpec(workers=2, observer=Stopping()))
    assert [value.reason for value in values if isinstance(value, End)] == ["callback"] * 2
