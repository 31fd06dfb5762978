"""`allreduce:sharded=true`: each worker steps its part, and N workers are one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.comm.checks import slice_of
from manyhands.errors import BadInput, NotFinite, Unsupported
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.replica.replica import Replica
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.worker import Worker

SHARDED = "allreduce:sharded=true"
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    **plain.OPTIMIZERS,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "groups": lambda m: torch.optim.AdamW([{"params": m[0].parameters(), "lr": 1e-3}, {"params": m[2].parameters()}]),
}


def task(optimizer: str = "adamw", **fields: Any) -> mh.Task:
    given = {
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": torch.optim.lr_scheduler.CosineAnnealingLR,
        "clip_norm": 0.5,
        "epochs": 3,
    }
    return plain.task(**(given | fields))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_n_workers_are_one(optimizer: str) -> None:
    """39 rows in batches of 12, the last of 3; clipped, with a schedule."""
    one = mh.train(task(optimizer), workers=1).parameters
    for workers in (2, 4) if optimizer == "groups" else (3,):
        run = mh.train(task(optimizer), engine="sim", strategy=SHARDED, workers=workers)
        assert (run.parameters - one).abs().max() < 1e-10, workers


def test_a_model_with_a_branch_that_rarely_has_a_gradient() -> None:
    """Its parameters are stepped when one of the workers has a gradient, and then alone."""
    fields = {"model": lambda: plain.Branches().double(), "optimizer": OPTIMIZERS["adamw"]}
    runs = [mh.train(plain.task(**fields), engine="sim", strategy=s, workers=2) for s in (SHARDED, "allreduce")]
    assert (runs[0].parameters - runs[1].parameters).abs().max() < 1e-12


def test_bytes_are_those_of_all_reduce_and_state_is_divided() -> None:
    workers = 3

    def program(worker: Worker, strategy: str) -> tuple[int, int, int]:
        chosen = strategy_of(strategy)
        replica = Replica.of(plain.mlp, OPTIMIZERS["adamw"], group=worker.group, loss=plain.cross_entropy)
        state = plain.started(chosen, replica, worker)
        start = worker.group.ledger.total_bytes
        for tick in range(3):
            replica.begin_tick()
            replica.backward(plain.rows(6, seed=tick * workers + worker.rank))
            chosen.exchange(replica, worker, state)
        tensors = [t for held in replica.optimizer.state.values() for t in held.values() if t.dim()]
        return worker.group.ledger.total_bytes - start, sum(t.numel() for t in tensors), replica.parameters.numel

    sharded = together(workers, lambda worker: program(worker, SHARDED))
    whole = together(workers, lambda worker: program(worker, "allreduce"))
    padded = sharded[0][2]
    assert sum(one[1] for one in sharded) == whole[0][1] == 2 * 84  # two moments, each on one worker
    for rank, one in enumerate(sharded):
        low, high = slice_of(rank, workers, padded)
        assert one[1] <= 2 * (high - low)
    words = 3 * workers * (workers - 1) * 8  # whether a part of the gradient is not finite
    rounding = 3 * workers * (workers - 1) * 8 * (-padded % workers and 1)
    assert sum(one[0] for one in sharded) - sum(one[0] for one in whole) <= 2 * words + rounding


def test_a_gradient_that_is_not_finite_ends_all_workers_alike_and_does_not_count_without_weight() -> None:
    def program(worker: Worker, weight: float) -> Tensor | str:
        chosen = strategy_of(SHARDED)
        torch.manual_seed(0)
        replica = Replica.of(plain.mlp, OPTIMIZERS["sgd"], group=worker.group, loss=plain.cross_entropy)
        state = plain.started(chosen, replica, worker)
        replica.begin_tick()
        replica.backward(plain.rows(6, seed=worker.rank))
        if worker.rank == 1:
            replica.weight *= weight
            replica.gradients.parts[0][0] = float("nan")  # an element that is in worker 0's part
        try:
            chosen.exchange(replica, worker, state)
        except NotFinite:
            return "not finite"
        return plain.flat(replica.model).clone()

    assert together(3, lambda worker: program(worker, 1.0)) == ["not finite"] * 3
    first, second = together(2, lambda worker: program(worker, 0.0))
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("optimizer", "first", "then"),
    [
        ("momentum", (SHARDED, 3), (SHARDED, 2)),
        ("groups", (SHARDED, 2), (SHARDED, 4)),
        ("adamw", (SHARDED, 2), ("allreduce", 1)),
        ("adamw", ("allreduce", 1), (SHARDED, 3)),
    ],
)
def test_a_checkpoint_is_resumed_with_another_number_of_workers(
    optimizer: str, first: tuple[str, int], then: tuple[str, int], tmp_path: Path
) -> None:
    given = task(optimizer, schedule=None)
    for (strategy, workers), fields in ((first, {"max_steps": 6}), (then, {"resume": True})):
        engine = "sim" if workers > 1 else "auto"
        run = mh.train(given, engine=engine, strategy=strategy, workers=workers, run_dir=tmp_path, **fields)
    assert (run.parameters - mh.train(given, workers=1).parameters).abs().max() < 1e-10


def test_what_does_not_fit_is_refused() -> None:

    def own_loop(worker: Worker) -> None:
        model = plain.mlp()
        prepare_slices(Session(worker), model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=SHARDED)

    with pytest.raises(Unsupported, match="use mh.train, or leave sharded out"):
        together(2, own_loop)
    with pytest.raises(BadInput, match="the optimizer's state of a part of the parameters is on one worker alone"):
        mh.train(task(), strategy=SHARDED, workers=2, engine="local", survive="max_losses=1")


class ByNorm(torch.optim.SGD):
    """Not elementwise: the step depends on the norm of the parameter's gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def test_an_optimizer_that_is_not_elementwise_is_refused_by_name() -> None:
    for make, name in [
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor"),
        (lambda m: ByNorm(m.parameters(), lr=0.1), "ByNorm"),
        (lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]), "Muon"),
    ]:
        with pytest.raises(BadInput, match=rf"sharded=true needs an elementwise optimizer.*and {name} "):
            mh.train(plain.task(optimizer=make), engine="sim", strategy=SHARDED, workers=2)
