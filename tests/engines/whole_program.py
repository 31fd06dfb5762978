"""What a program may do with its worker, in one program: for engines whose launches take seconds."""

from typing import Any

import torch
from driver_script import wait_until
from heard import Heard

from manyhands.data.row_pieces import RowPiece
from manyhands.events import Event
from manyhands.testing.engine_suite import GROUP_CHECKS
from manyhands.testing.group_suite import GROUP_SUITE


class Listening(Heard):
    """Answers questions, keeps events and rows, and asks for a stop when every worker is ready for it."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.pieces: list[RowPiece] = []
        self._workers = workers

    def answer(self, event: Event) -> dict[str, Any]:
        return {"heard": event.values["what"]}

    def take_rows(self, piece: RowPiece) -> None:
        self.pieces.append(piece)

    def must_wait(self, piece: RowPiece) -> bool:
        """Workers wait after their first piece until each has delivered one."""
        return len({one.rank for one in self.pieces}) < self._workers

    def stopping(self) -> str:
        return "enough" if sum(event.type == "ready" for event in self.events) == self._workers else ""


DATA = bytes(range(256)) * 1000


def everything(worker: Any) -> dict[str, Any]:
    """Collectives, groups of some, a server that adds, rows, events in order, questions, the stop."""
    rank, everybody = worker.rank, range(worker.size)
    for ranks in (everybody, everybody[rank % 2 :: 2], everybody[:-1] if rank < worker.size - 1 else everybody[-1:]):
        group = worker.make_group(ranks)
        for check in GROUP_CHECKS:
            GROUP_SUITE[check](group)
        group.close()
    vector = worker.group.allocate(1000, torch.float64)
    vector.fill_(rank + 1.0)
    total = worker.group.mean_(vector, weight=rank + 1.0, bits=1 << rank)
    center, server = torch.zeros(1000), worker.server
    server.initialize(center)
    server.activate()
    server.pull(center)
    server.push(torch.full_like(center, rank + 1.0))  # each in its own time
    server.tick()
    server.deactivate()
    worker.group.barrier()
    server.center(center)
    worker.group.barrier()
    server.close()
    for part in range(2):
        worker.driver.deliver(RowPiece(rank=rank, number=rank, part=part, rows=1, data=DATA))
    for step in range(20):
        worker.emit("step", step=step, loss=float("inf"))
    heard = worker.ask("question", what=rank)["heard"]
    before = worker.driver.should_stop()
    worker.group.barrier()
    worker.emit("ready")
    wait_until(worker.driver.should_stop)
    return {
        "place": (rank, worker.local_rank, worker.size, worker.threads),
        "mean": vector[:2].clone(),
        "total": (total.weight, total.bits),
        "all": worker.group.all_gather_json(rank),
        "center": [center[0].item(), center[-1].item()],
        "heard": heard,
        "stop": (before, worker.driver.should_stop()),
    }


def check_everything(values: list[dict[str, Any]], listening: Listening) -> None:
    """`place` is the caller's to check."""
    size = len(values)
    mean = sum((rank + 1) ** 2 for rank in range(size)) / sum(range(size + 1))
    for rank, value in enumerate(values):
        assert torch.allclose(value["mean"], torch.full((2,), mean, dtype=torch.float64))
        assert value["total"] == (sum(range(size + 1)), (1 << size) - 1)
        assert value["all"] == list(range(size))
        assert value["center"] == [float(sum(range(size + 1)))] * 2
        assert value["heard"] == rank
        assert value["stop"] == ("", "enough")
        steps = [event for event in listening.events if event.rank == rank and event.type == "step"]
        assert [event.step for event in steps] == list(range(20))
        assert steps[0].values == {"loss": float("inf")}
    pieces = sorted((one.rank, one.number, one.part, bytes(one.data)) for one in listening.pieces)
    assert pieces == [(rank, rank, part, DATA) for rank in range(size) for part in range(2)]
