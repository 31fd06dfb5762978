"""Executors that a task gives, through the whole loop: one without gradients, and one of replicas held in halves."""

from dataclasses import replace

import pytest
import torch
from by_hand import Point
from torch import Tensor, nn

import manyhands as mh
from executors import Half, MovesToRows, distance
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.evidence.estimate.model_sizes import shape_of
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.task import Summed
from manyhands.testing.threads import together
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import work
from manyhands.worker import Mesh, Worker

D = 6
ROWS = torch.randn(40, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


TASK = mh.Task(
    model=lambda: Point([1.0] * D),
    loss=distance,
    optimizer=sgd,
    train_data=ROWS,
    validation_data=ROWS[:7],
    evaluate=lambda model, batch: {
        "loss": distance(model, batch),
        "count": Summed(torch.tensor([float(len(batch))]), lambda sums: {"rows": float(sums)}),
    },
    batch_size=8,
    epochs=2,
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps),
)

KERNEL = TASK.with_fields(schedule=None, executor=lambda task, worker: MovesToRows([1.0] * D, 0.1))
STEPPED = TASK.with_fields(  # the same by autograd: half of the distance's gradient is what a step goes
    schedule=None,
    loss=lambda model, batch: distance(model, batch) / 2,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)


@pytest.mark.parametrize(
    "strategy",
    [
        *("solo", "local-sgd:period=2,optimizer_state=kept", "diloco:period=3", "diloco:period=2,via=server,bound=0"),
        *("gossip", "downpour", "agn:window=1,bound=0", "easgd:period=1,via=group"),
    ],
)
def test_a_task_that_moves_parameters_without_gradients_trains_as_the_same_steps_by_autograd(strategy: str) -> None:
    workers = 1 if strategy == "solo" else 2
    kernel, stepped = (mh.train(t, strategy=strategy, engine="sim", workers=workers) for t in (KERNEL, STEPPED))
    assert (kernel.parameters - stepped.parameters).abs().max() < 1e-12
    assert (kernel.parameters - 1).abs().max() > 0.1
    assert kernel.metrics["validation_loss"] == pytest.approx(stepped.metrics["validation_loss"])


def test_what_cannot_be_is_refused() -> None:
    for strategy in ("allreduce", "quorum", "local-sgd:warmup=2", "downpour:rule=adagrad,bound=0"):
        with pytest.raises(Unsupported, match="MovesToRows has no gradients to exchange"):
            mh.train(KERNEL, strategy=strategy, engine="sim", workers=2)
    for ask in (lambda: mh.check(KERNEL, workers=2), lambda: shape_of(KERNEL)):
        with pytest.raises(Unsupported, match="an executor of its own"):
            ask()
    with pytest.raises(BadInput, match=r"w of shape \[6\] is not .in the model it has the shape \[3\]"):
        mh.train(KERNEL.with_fields(model=lambda: Point([1.0] * 3)), strategy="solo", workers=1)
    with pytest.raises(BadInput, match=r"executor must be a function of \(task, worker\), not "):
        TASK.with_fields(executor=MovesToRows.__mro__)


# -- replicas in halves ------------------------------------------------------------------------------------------------


def half(task: mh.Task, worker: Worker) -> Half:
    return Half(worker.mesh.model, [1.0] * D, sgd)


def train(task: mh.Task, strategy: str, members: int, heard: list[Event] | None = None) -> list[tuple[Tensor, float]]:
    """([D] answer, validation loss) of two replicas, each of so many workers, by the loop of mh.train."""
    made, events = strategy_of(strategy), [] if heard is None else heard
    spec = made.server()
    servers = [InProcessServers(spec, 2, timeout_s=20) for _ in range(members)] if spec is not None else []

    def program(worker: Worker) -> tuple[Tensor, float]:
        replica, member = divmod(worker.rank, members)
        mesh = Mesh(
            world=worker.group,
            data=worker.make_group([member, member + members]),
            model=worker.make_group(range(replica * members, (replica + 1) * members)),
            rows=(replica, 2),
        )
        server = servers[member].clients[replica] if servers else None
        worker = replace(worker, mesh=mesh, server=server)
        worker.driver.emit = events.append  # type: ignore[method-assign]
        outcome = work(WorkerPlan(task=task, strategy=made, every_rank_returns=True), worker)
        assert outcome is not None
        own = outcome.states[0][0]["w"] if len(outcome.states) == 1 else outcome.states[replica][0]["w"]
        assert outcome.metrics["validation_rows"] == 7
        return own.reshape(-1), outcome.metrics["validation_loss"]

    return together(2 * members, program)[::members]


@pytest.mark.parametrize("strategy", ["allreduce", "diloco:period=3", "easgd:period=2,via=group", "downpour:bound=0"])
def test_replicas_in_halves_train_as_whole_ones(strategy: str) -> None:
    task = TASK.with_fields(clip_norm=None if "diloco" in strategy else 0.5)
    halves = train(task.with_fields(executor=half), strategy, members=2)
    for (one, loss), (other, expected) in zip(halves, train(task, strategy, members=1), strict=True):
        assert (one - other).abs().max() < 1e-12
        assert loss == pytest.approx(expected, rel=1e-12)


def test_replicas_of_their_own_pace_lease_as_one() -> None:
    """Both members of a replica train the same slices, and each slice is trained by one replica."""
    events: list[Event] = []
    train(TASK.with_fields(executor=half), "downpour:warmup=2", 2, events)
    steps = [event for event in events if event.type == "step"]
    trained = [[(e.values["epoch"], *e.values["lease"]) for e in steps if e.rank == rank] for rank in range(4)]
    assert trained[0] == trained[1]
    assert trained[2] == trained[3]
    assert sorted(part[:3] for replica in (0, 2) for part in trained[replica]) == [
        (epoch, batch, part) for epoch in range(2) for batch in range(5) for part in range(2)
    ]
    assert [handed for *_, handed in trained[0]][:2] == [0, 1]
