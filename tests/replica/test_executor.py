"""The contract of executors, by two of their own: one that moves parameters without gradients, and one of half a replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import Point
from torch import Tensor, nn

from executors import Half, MovesToRows, distance
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.errors import Unsupported
from manyhands.replica.executor import Allocate, AutogradExecutor
from manyhands.replica.replica import Replica
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Change, Strategy
from manyhands.testing.threads import together
from manyhands.worker import Mesh, Worker

# -- without gradients -------------------------------------------------------------------------------------------------


ROWS = [torch.tensor([[2.0, 4.0]], dtype=torch.float64), torch.tensor([[6.0, 0.0]], dtype=torch.float64)]
MEAN = torch.tensor([4.0, 2.0], dtype=torch.float64)


def ticks(strategy: Strategy, replica: Replica, worker: Worker, batches: list[Any]) -> Tensor:
    """[2] the answer after as many ticks as there are batches."""
    state = strategy.start(replica, worker)
    strategy.synchronize(replica, worker, state, Change())
    if worker.server is not None:
        worker.server.activate()
    worker.group.barrier()
    for tick, batch in enumerate(batches):
        replica.begin_tick()
        replica.tick = tick
        strategy.before_backward(replica, worker, state)
        replica.backward(batch)
        strategy.exchange(replica, worker, state)
        if worker.server is not None:
            worker.server.tick(0)
    worker.group.barrier()
    strategy.finish(replica, worker, state)
    if worker.server is not None:
        worker.server.deactivate()
    worker.group.barrier()
    return strategy.consensus(replica, worker, state).joined().clone()


def moved(spec: str, steps: int = 2) -> list[Tensor]:
    """[2] the answer of each of two workers that have a row each."""
    strategy = strategy_of(spec)
    server = strategy.server()
    clients = InProcessServers(server, 2, timeout_s=20.0).clients if server is not None else ()

    def program(worker: Worker) -> Tensor:
        replica = Replica(MovesToRows([0.0, 0.0], 0.5), group=worker.mesh.data)
        return ticks(strategy, replica, worker, [ROWS[worker.rank]] * steps)[:2]

    return together(2, program, clients)


@pytest.mark.parametrize(
    ("spec", "share"),
    [  # of the way to the mean of both rows, after two steps of a half each
        ("local-sgd:period=1,optimizer_state=kept", 0.75),
        ("diloco:period=1,outer_rate=1.0,outer_momentum=0.0", 0.75),
        ("diloco:period=1,outer_rate=1.0,outer_momentum=0.0,via=server,bound=0", 0.75),
        ("gossip", 0.75),
        ("agn:window=1,bound=0", 1.0),  # pushes add: both halves of a step together are the whole way
        ("downpour:bound=0", 1.0),
        ("dynsgd:window=1,bound=0", 1.0),
        ("easgd:period=1,alpha=.5,via=group", 0.5),  # the center sees x before the step: 0, then a half of both ways
    ],
)
def test_strategies_of_parameters_and_updates_run_it_as_it_is(spec: str, share: float) -> None:
    for answer in moved(spec):
        assert (answer - share * MEAN).abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["allreduce", "quorum", "local-sgd:warmup=2", "downpour:rule=adagrad,bound=0"])
def test_strategies_of_gradients_say_that_there_are_none(spec: str) -> None:
    with pytest.raises(Unsupported, match="MovesToRows has no gradients to exchange"):
        moved(spec)


# -- half a replica ----------------------------------------------------------------------------------------------------

D, STEPS = 6, 5
STARTS = torch.linspace(-1, 2, D, dtype=torch.float64)


def rows_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2 + rank, D, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def in_halves(strategy: Strategy, clip_norm: float | None) -> list[Tensor]:
    """[D] each of two replicas' answers; each is held by two threads."""
    world, data, model = Meeting(4), [Meeting(2) for _ in range(2)], [Meeting(2) for _ in range(2)]

    def program(thread: Worker) -> Tensor:
        copy, member = divmod(thread.rank, 2)
        members = ThreadGroup(model[copy], member)
        mesh = Mesh(
            world=ThreadGroup(world, thread.rank), data=ThreadGroup(data[member], copy), model=members, rows=(copy, 2)
        )
        worker = Worker(rank=thread.rank, size=4, group=mesh.world, mesh=mesh)
        replica = Replica(Half(members, STARTS.tolist(), adamw), group=mesh.data, clip_norm=clip_norm)
        assert (replica.shards[0].slices["w"].whole, replica.norm(replica.parameters)) == (
            False,
            pytest.approx(float(STARTS.norm())),
        )
        ones = replica.zeros().fill_(1.0)
        ones.parts[0][D // 2 :] = 0  # the padding
        assert replica.dot(replica.parameters, ones) == pytest.approx(float(STARTS.sum()))
        answer = ticks(strategy, replica, worker, rows_of(copy))[: D // 2]
        return members.all_gather(answer).reshape(-1)

    return together(4, program)[::2]


def in_whole(strategy: Strategy, clip_norm: float | None) -> list[Tensor]:
    def program(worker: Worker) -> Tensor:
        replica = Replica.of(Point(STARTS.tolist()), adamw, group=worker.mesh.data, loss=distance, clip_norm=clip_norm)
        return ticks(strategy, replica, worker, rows_of(worker.rank))[:D]

    return together(2, program)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    "spec",
    ["allreduce", "local-sgd:period=2", "diloco:period=2", "easgd:period=2,via=group", "gossip", "ensemble"],
)
def test_a_replica_that_two_threads_hold_in_halves_equals_one_that_is_whole(spec: str, clip_norm: float | None) -> None:
    halves, whole = (run(strategy_of(spec), clip_norm) for run in (in_halves, in_whole))
    for one, other in zip(halves, whole, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_a_gradient_that_is_not_finite_in_one_half_is_left_out_by_both() -> None:
    model = Meeting(2)

    def program(thread: Worker) -> tuple[bool, int]:
        members = ThreadGroup(model, thread.rank)
        replica = Replica(Half(members, STARTS.tolist(), adamw), group=Worker().mesh.data, nonfinite="skip")
        batch = torch.zeros(1, D, dtype=torch.float64)
        batch[0, 0] = float("inf")  # of the first half's columns
        replica.begin_tick()
        replica.backward(batch)
        return replica.apply(), replica.step

    assert together(2, program) == [(False, 0), (False, 0)]


# -- copies ------------------------------------------------------------------------------------------------------------


class Shares(AutogradExecutor):
    """Both members hold all of `shared`, which counts at the first, and a parameter of their own."""

    def __init__(self, members: ThreadGroup) -> None:
        def make() -> nn.Module:
            model = nn.Module()
            model.shared = nn.Parameter(torch.tensor([3.0, 4.0]))
            model.register_parameter(f"own{members.rank}", nn.Parameter(torch.full((2,), 1.0 + members.rank)))
            return model

        super().__init__(make, adamw, loss=lambda model, batch: model.shared.sum(), members=members)

    def build(self, allocate: Allocate) -> None:
        super().build(allocate)
        if self.members.rank:
            self.shards[0].slices["shared"] = replace(self.shards[0].slices["shared"], counted=False)


def test_a_parameter_that_both_members_hold_counts_once_in_norms_and_dot_products() -> None:
    model = Meeting(2)

    def program(thread: Worker) -> tuple[float, float]:
        replica = Replica(Shares(ThreadGroup(model, thread.rank)), group=Worker().mesh.data)
        ones = replica.zeros().fill_(1.0)
        return replica.norm(replica.parameters) ** 2, replica.dot(replica.parameters, ones)

    assert together(2, program) == [(pytest.approx(25 + 2 + 8), 7 + 2 + 4)] * 2
