"""Rows leased through a real driver: by processes, each at its own pace."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
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
    """Counts events; wants a stop after so many."""

    def __init__(self, after: int) -> None:
        self.count, self.after = 0, after

    @override
    def event(self, event: Event) -> None:
        self.count += 1

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        self.count += 1
        return {}

    @override
    def stopping(self) -> str:
        return "callback" if self.count >= self.after else ""


def leased(worker: Worker, of: Segment) -> tuple[list[Lease], End]:
    """All that this worker gets of a segment."""
    leases = []
    while isinstance(answer := worker.lease(of), Lease):
        leases.append(answer)
        worker.emit("step", step=len(leases))
    return leases, answer


@pytest.mark.parametrize("workers", [1, 3])
def test_every_slice_is_leased_exactly_once_in_each_epoch(local: Local, workers: int) -> None:
    """The first worker is slow: the others take what nobody has begun. CASE 18"""

    def program(worker: Worker) -> list[tuple[list[Lease], End]]:
        if worker.rank == 0 and worker.size > 1:
            worker.lease(segment())
            worker.group.barrier()
        else:
            worker.group.barrier()
        epochs = []
        for epoch in range(2):
            epochs.append(leased(worker, segment(epoch)))
            worker.group.barrier()
        return epochs

    values = local.launch(program, LaunchSpec(workers=workers))
    for epoch in range(2):
        slices = [(lease.index, lease.part) for value in values for lease in value[epoch][0]]
        first = [(0, 0)] if epoch == 0 and workers > 1 else []
        assert sorted(slices + first) == ALL
        assert all(value[epoch][1].reason == "" for value in values)


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


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stop_in_the_middle_ends_everybodys_leases(local: Local, workers: int) -> None:
    def program(worker: Worker) -> tuple[int, End]:
        leases = []
        while isinstance(answer := worker.lease(segment(until=100_000)), Lease):
            leases.append(answer)
            if len(leases) == 5:
                worker.ask("step")  # the driver has heard of it
            time.sleep(0.002)  # a run of one worker asks ten times a second whether to stop
        assert worker.lease(segment(until=100_000)) == answer
        return len(leases), answer

    values = local.launch(program, LaunchSpec(workers=workers, observer=Stopping(after=workers)))
    assert {end.reason for _, end in values} == {"callback"}
    left = values[0][1].left
    assert sum(back - front for front, back in left) == 100_000 * PARTS - sum(count for count, _ in values)


def test_worker_0_trains_alone_first(local: Local) -> None:
    def program(worker: Worker) -> list[Lease]:
        worker.group.barrier()  # the others ask, and wait, while worker 0 trains
        return leased(worker, segment(until=400, rank0_warmup_ticks=1000))[0]

    values = local.launch(program, LaunchSpec(workers=3))
    slices = [(lease.index, lease.part) for leases in values for lease in leases]
    assert sorted(slices) == [(index, part) for index in range(400) for part in range(PARTS)]
    assert [lease.handed for lease in values[0][:1000]] == list(range(1000))


def test_whoever_waits_for_worker_0_hears_of_a_stop(local: Local) -> None:
    def program(worker: Worker) -> End | Lease:
        if worker.rank == 0:
            worker.group.barrier()
            worker.ask("step")
            while not worker.driver.should_stop():
                time.sleep(0.01)
        else:
            worker.group.barrier()
        return worker.lease(segment(rank0_warmup_ticks=1000))

    values = local.launch(program, LaunchSpec(workers=2, observer=Stopping(after=1)))
    assert [value.reason for value in values if isinstance(value, End)] == ["callback"] * 2
