"""Ways through an epoch: workers in step, and workers at their own pace with leased rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import plain
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.training.plan import Outcome, WorkerPlan
from manyhands.training.worker_main import work
from manyhands.worker import SoloDriverClient, Worker


class LeaseServer:
    """The driver's side: leases for all, and every event."""

    def __init__(self, stop_after: int | None = None, slow: int | None = None) -> None:
        self.lock = threading.Condition()
        self.leases = Leases()
        self.events: list[Event] = []
        self.answers: dict[int, Lease | End] = {}
        self.stop_after, self.slow = stop_after, slow
        self.handed = 0
        self.served: list[int] = []  # replicas that got a lease, in order

    def lease(self, rank: int, segment: Segment) -> Lease | End:
        with self.lock:
            if self.stop_after is not None and self.handed >= self.stop_after:
                self.leases.stop("enough")
            answer = self.leases.take(rank, segment)
            self.answers |= dict(self.leases.released)
            self.leases.released.clear()
            self.lock.notify_all()
            if answer is None:
                assert self.lock.wait_for(lambda: rank in self.answers, timeout=20)
                answer = self.answers.pop(rank)
            self.handed += isinstance(answer, Lease)
            self.served.append(rank)
            self.lock.notify_all()
            return answer


class Line(SoloDriverClient):
    def __init__(self, lease_server: LeaseServer, rank: int, hindrance: Callable[[int], None] | None) -> None:
        super().__init__()
        self.lease_server, self.rank, self.hindrance = lease_server, rank, hindrance

    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        if self.hindrance:
            self.hindrance(self.rank)
        return self.lease_server.lease(replica, segment)

    def progress(self, phase: str, step: int) -> None:
        if self.rank == self.lease_server.slow:
            sum(range(100_000))  # work that lets the others go ahead

    def emit(self, event: Event) -> None:
        with self.lease_server.lock:
            self.lease_server.events.append(event)

    def ask(self, event: Event) -> dict[str, Any]:
        self.emit(event)
        return {}


def train(
    strategy: str,
    lease_server: LeaseServer,
    workers: int = 3,
    hindrance: Callable[[int], None] | None = None,
    **options: Any,
) -> Outcome:
    plan_options = {name: options.pop(name) for name in ("validate_every", "max_seconds") if name in options}
    made = strategy_of(strategy)
    spec = made.server()
    servers = InProcessServers(spec, workers, timeout_s=20) if spec is not None else None
    meeting = Meeting(workers)

    def program(rank: int) -> Outcome | None:
        worker = Worker(
            rank=rank,
            size=workers,
            group=ThreadGroup(meeting, rank),
            server=servers.clients[rank] if servers else None,
            driver=Line(lease_server, rank, hindrance),
        )
        return work(WorkerPlan(task=plain.task(**{"model": model, **options}), strategy=made, **plan_options), worker)

    with ThreadPoolExecutor(workers) as pool:
        outcomes = [future.result() for future in [pool.submit(program, rank) for rank in range(workers)]]
    assert outcomes[0] is not None
    assert not any(outcomes[1:])
    return outcomes[0]


def model() -> torch.nn.Module:
    """Threads share one random state: the same numbers on all need a generator of their own."""
    made, generator = plain.mlp(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    return made


def slices(lease_server: LeaseServer) -> list[tuple[int, int, int]]:
    """(epoch, batch, part) of every step event."""
    return [(e.values["epoch"], *e.values["lease"][:2]) for e in lease_server.events if e.type == "step"]


def test_every_slice_is_trained_once_whoever_is_slow() -> None:
    """CASE 18 for workers of their own pace: rows are leased, each once an epoch."""
    lease_server = LeaseServer()
    gate = threading.Event()

    def hindrance(rank: int) -> None:  # worker 0 makes no tick before the others have had more than their own 8 slices
        if rank == 0 and not gate.is_set():
            assert gate.wait(20)
        elif len(slices(lease_server)) > 8:
            gate.set()

    outcome = train("downpour", lease_server, hindrance=hindrance, epochs=2)
    batches = outcome.facts["ticks_per_epoch"]
    wanted = [(epoch, batch, part) for epoch in range(2) for batch in range(batches) for part in range(3)]
    assert sorted(slices(lease_server)) == wanted
    assert sum(worker["rows"] for worker in outcome.workers) == 2 * outcome.facts["rows"]
    begun = [
        e for e in lease_server.events if e.type == "step" and e.values["epoch"] == 0 and e.values["lease"][1] == 0
    ]
    assert any(e.rank for e in begun)  # others took over what it had not begun


def test_one_worker_is_a_plain_loop() -> None:
    """CASE 7: push and pull at every step, momentum of its own, and a schedule that follows the rows."""
    lease_server = LeaseServer()
    options = {"epochs": 2, "optimizer": plain.OPTIMIZERS["momentum"], "schedule": cosine}
    outcome = train("downpour", lease_server, workers=1, **options)
    alone = train("solo", LeaseServer(), workers=1, **options)
    for name, tensor in alone.states[0][0].items():
        assert torch.allclose(outcome.states[0][0][name], tensor, atol=1e-12, rtol=0)


def cosine(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)


def test_bound_zero_is_in_step() -> None:
    """CASE 11: the same bits, whatever the workers' speeds, and staleness 0."""
    ends = []
    for slow in (0, 2):
        lease_server = LeaseServer(slow=slow)

        def hindrance(rank: int) -> None:
            raise AssertionError("nothing is leased at bound 0")

        ends.append(train("downpour:bound=0", lease_server, hindrance=hindrance, epochs=2).states[0][0])
        staleness = [value for e in lease_server.events for value in e.values.get("staleness", [])]
        assert staleness
        assert not any(staleness)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_warmup_lets_worker_0_train_alone_first() -> None:
    lease_server = LeaseServer()

    def after_the_others(rank: int) -> None:
        """Whoever is under way already leaves some to the others."""
        with lease_server.lock:
            if lease_server.served.count(rank) > (4 if rank == 0 else 0):
                assert lease_server.lock.wait_for(lambda: {1, 2} <= set(lease_server.served), timeout=20)

    train("downpour:warmup=4", lease_server, hindrance=after_the_others, epochs=1)
    steps = [e for e in lease_server.events if e.type == "step"]
    handed = sorted((e.values["lease"][2], e.rank) for e in steps)
    assert [rank for _, rank in handed[:4]] == [0] * 4
    assert {rank for _, rank in handed[4:]} >= {1, 2}


def test_a_stop_ends_all_and_says_what_is_left() -> None:
    lease_server = LeaseServer(stop_after=5)
    outcome = train("downpour", lease_server, epochs=3)
    assert outcome.reason == "enough"
    assert len(slices(lease_server)) == 5


def test_segments_end_where_validations_are_due_and_at_max_steps() -> None:
    lease_server = LeaseServer()
    outcome = train(
        "downpour", lease_server, epochs=3, validate_every=2, max_steps=5, validation_data=plain.rows(5, seed=2)
    )
    assert sorted(slices(lease_server)) == [
        (e, b, p)
        for e, b in [(t // outcome.facts["ticks_per_epoch"], t % outcome.facts["ticks_per_epoch"]) for t in range(5)]
        for p in range(3)
    ]
    assert outcome.ticks == 5
    assert "validation_loss" in outcome.metrics
    assert [e.step for e in lease_server.events if e.type == "validation"] == [2, 4, 5]  # of the run, not of worker 0


def test_a_stream_cannot_be_validated_after_so_many_batches() -> None:
    def stream() -> Any:
        class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
            def __iter__(self) -> Any:
                yield from zip(*plain.rows(9), strict=True)

        return Rows()

    with pytest.raises(BadInput, match="validate_every=2 counts global batches"):
        train(
            "downpour", LeaseServer(), workers=1, train_data=stream(), validate_every=2, validation_data=plain.rows(5)
        )


def test_warmup_counts_leases_which_a_stream_has_none_of() -> None:
    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from zip(*plain.rows(9), strict=True)

    with pytest.raises(BadInput, match="warmup=3 needs data with a length"):
        train("downpour:warmup=3", LeaseServer(), workers=1, train_data=Rows())


def test_the_newest_metrics_are_those_of_the_returned_model() -> None:
    """Windows that close after the last validation move the center once more."""
    data = plain.rows(30, seed=2)
    outcome = train("agn", LeaseServer(), epochs=1, validate_every=4, max_steps=4, validation_data=data, test_data=data)
    assert outcome.metrics["validation_loss"] == outcome.metrics["test_loss"]


def test_a_chained_schedule_follows_the_rows() -> None:
    def chained(optimizer: torch.optim.Optimizer, total: int) -> Any:
        scheduler = torch.optim.lr_scheduler
        return scheduler.ChainedScheduler(
            [scheduler.ExponentialLR(optimizer, 0.9), scheduler.ConstantLR(optimizer, 0.5, total_iters=2)]
        )

    lease_server = LeaseServer()
    train("downpour", lease_server, workers=1, epochs=1, schedule=chained)
    rates = [e.values["rate"] for e in lease_server.events if e.type == "step"]
    assert rates == pytest.approx([0.005, 0.0045, 0.0081, 0.00729])
