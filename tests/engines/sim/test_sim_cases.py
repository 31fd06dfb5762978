"""Closed forms of the field, produced by the strategies' own code on simulated workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.checkpoint import checkpoints
from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.engine import Sim
from manyhands.errors import WorkerFailed
from manyhands.server.base import ServerSpec
from manyhands.strategies import strategy_of
from manyhands.worker import Worker, current
from plain import flat, mlp, plain_loop, rows, task


def train(strategy: str, workers: int, spec: str = "", **fields: Any) -> mh.Run:
    return mh.train(strategy=strategy, engine=f"sim:{spec}", workers=workers, threads_per_worker=1, **fields)


def launch(
    program: Callable[[Worker], Any], workers: int, server: ServerSpec | None = None, **options: str
) -> list[Any]:
    return Sim(**options).launch(program, LaunchSpec(workers=workers, server=server, threads_per_worker=1))


class Point(nn.Module):
    """A vector x [D] of float64, at first 1."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(n, dtype=torch.float64))


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def linear(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Its gradient is the mean of the rows, wherever x is."""
    return (batch[0] @ model.x).mean()


def point(vectors: Tensor, batch_size: int, rate: float = 0.1, **fields: Any) -> dict[str, Any]:
    """Of a task whose gradients are these rows."""
    common = {"model": lambda: Point(vectors.shape[1]), "loss": linear, "optimizer": sgd(rate)}
    return {**common, "train_data": (vectors,), "batch_size": batch_size, **fields}


def normal(n: int, size: int, seed: int) -> Tensor:
    return torch.randn(n, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["", ",via=server,bound=0"])
def test_diloco_is_local_sgd_or_nesterov(form: str) -> None:
    """CASE 5: without an outer optimizer it is local SGD; with period 1, Nesterov on the mean gradient.

    On three workers, in windows that two epochs' ends cut short: 4 ticks of 12, 12, 12 and 2 or 3 rows.
    """
    adamw = task(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    outer = train(f"diloco:period=3,outer_rate=1.0,outer_momentum=0.0{form}", 3, task=adamw).parameters
    local = train("local-sgd:period=3,optimizer_state=kept", 3, task=adamw).parameters
    torch.testing.assert_close(outer, local, rtol=0, atol=1e-14)
    outer = train(f"diloco:period=1,outer_rate=.7,outer_momentum=.9{form}", 3, task=task(optimizer=sgd(0.1))).parameters
    nesterov, _ = plain_loop(
        mlp,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.07, momentum=0.9, nesterov=True),
        rows(39),
        batch_size=12,
        epochs=2,
    )
    torch.testing.assert_close(outer, flat(nesterov), rtol=0, atol=1e-12)


def test_workers_without_rows_do_not_count() -> None:
    """CASES 3 and 27: five rows, twice, on eight workers; three of them never have one."""
    plain, _ = plain_loop(mlp, sgd(0.1), rows(5), batch_size=8, epochs=2)
    for strategy in ("local-sgd:period=1", "allreduce", "diloco:period=1,outer_rate=1.0,outer_momentum=0.0"):
        run = train(strategy, 8, task=task(optimizer=sgd(0.1), train_data=rows(5), batch_size=8))
        torch.testing.assert_close(run.parameters, flat(plain), rtol=0, atol=1e-14)
        assert sorted(run.rows["workers"]) == [0, 0, 0, 2, 2, 2, 2, 2], strategy


# -- traffic ---------------------------------------------------------------------------------------------------------


def test_a_ring_sends_what_the_formula_says() -> None:
    """CASE 8"""
    for workers, n, total, messages in ((4, 1_000_000, 4 * 6_000_000, 6), (5, 7, 224, 8)):

        def program(worker: Worker, n: int = n) -> dict[str, int]:
            worker.group.all_reduce_(torch.full((n,), float(worker.rank)))
            return worker.group.ledger.as_dict()["all_reduce_"]

        sent = launch(program, workers, network="collective=ring")
        assert sum(one["bytes"] for one in sent) == total
        assert {one["messages"] for one in sent} == {messages}
        assert n % workers or {one["bytes"] for one in sent} == {total // workers}


def test_a_push_and_a_pull_are_the_vector_each() -> None:
    """CASE 9: of D' = 64 numbers of 8 bytes; each shard has its part."""
    for servers in (1, 2):
        run = train("downpour", 3, servers=servers, **point(torch.ones(12, 64, dtype=torch.float64), 3))
        assert run.ledger["push"] == run.ledger["pull"] == {"bytes": 12 * 64 * 8, "messages": 12 * servers}


# -- staleness -------------------------------------------------------------------------------------------------------

LIMITS = [2, 1, 0.618034, 0.445042, 0.347296]


def visited(delay: int, step: float, turns: int) -> tuple[list[float], dict[int, int]]:
    """x of f = x²/2 at each gradient, and the staleness, of delay + 1 equal workers under downpour that compute a second each,
    and begin a part of a second apart: so each pushes, and pulls at once, in turn."""
    workers, xs = delay + 1, []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        xs.append(float(model.x.detach()))
        return (model.x * model.x).sum() / 2

    apart = ",".join(f"pause={rank}@step:0+{rank / workers}" for rank in range(1, workers))
    data = point(torch.zeros(turns, 1, dtype=torch.float64), workers, step, loss=loss)
    return xs, train("downpour", workers, f"compute='row=0,step=1',faults='{apart}'", **data).staleness


def _norm(xs: list[float]) -> float:
    return math.sqrt(sum(x * x for x in xs))


@pytest.mark.parametrize("delay", [0, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_limit_of_a_fixed_delay(delay: int) -> None:
    """CASE 10: 1 % below 2·sin(π/(2(2τ+1))) each |x| is smaller than a hundred turns before, 1 % above it is larger.

    By how much is the largest root of z^(τ+1) = z^τ - ηλ.
    """
    limit, turns = 2 * math.sin(math.pi / (2 * (2 * delay + 1))), 300 // (delay + 1) * (delay + 1)
    assert limit == pytest.approx(LIMITS[delay], abs=5e-7)
    for factor in (0.99, 1.01):
        xs, staleness = visited(delay, factor * limit, turns)
        assert staleness[delay] >= turns - delay - 1
        growth = _norm(xs[-50:]) / _norm(xs[-150:-100])
        companion = torch.diag(torch.ones(delay), -1)
        companion[0, 0] += 1
        companion[0, delay] -= factor * limit
        expected = torch.linalg.eigvals(companion.double()).abs().max().item() ** 100
        assert (growth < 1) == (factor < 1)
        assert growth == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_is_kept_and_used(bound: int) -> None:
    """CASE 11: with a worker five times as slow, and jitter. Each pushes its own unit vector, so the center says who pushed how often."""
    done, gaps = [0] * 4, []

    def program(worker: Worker) -> None:
        server, own, center = worker.server, torch.zeros(4), torch.zeros(4)
        assert server is not None
        own[worker.rank] = 1
        if worker.rank == 0:
            server.initialize(torch.zeros(4))
        worker.group.barrier()
        server.activate()
        worker.group.barrier()
        for tick in range(12):
            server.pull(center)
            assert center[worker.rank] == tick, "own updates are visible"
            assert tick - bound <= center.min()
            assert center.max() <= tick + bound + 1
            worker.driver.computed(1)
            server.push(own)
            done[worker.rank] = tick + 1
            gaps.append(max(done) - min(done))
            server.tick()
        server.deactivate()

    spec = ServerSpec(rule="add", bound=bound)
    launch(program, 4, spec, compute="row=1,jitter=exponential,3=5x", network="latency=10ms")
    assert max(gaps) == bound + 1


FAST = "compute='row=0'"
SLOW = "compute='row=1e-3,jitter=exponential,1=5x',network='latency=1ms,bandwidth=1e8',seed=7"


@pytest.mark.parametrize("strategy", ["downpour:rule=adagrad", "agn", "dynsgd", "distance", "easgd", "eamsgd"])
def test_bound_0_is_synchronous_whatever_the_speeds(strategy: str) -> None:
    """CASE 11: the same bits, and no push is stale."""
    spec = f"{strategy}{',' if ':' in strategy else ':'}bound=0"
    fast, slow = (train(spec, 3, speeds, task=task()) for speeds in (FAST, SLOW))
    assert torch.equal(fast.parameters, slow.parameters)
    assert set(fast.staleness) == set(slow.staleness) == {0}


@pytest.mark.slow
def test_how_long_steps_take_with_backup_workers() -> None:
    """CASE 13: Exp(1) step times, ten workers, two to spare. Who is late finishes its stale gradient first: 1.7205, not 1.4290.

    A step's time has a standard deviation of 0.55, so a mean of 1000 one of 0.017. Workers that computed gradients which can
    only come too late would make it 1.78.
    """
    steps = 1000
    data = point(torch.zeros(10 * steps, 1, dtype=torch.float64), 10, validate_every=steps)
    run = train("quorum:backups=2", 10, "compute='row=0,step=1,jitter=exponential'", **data)
    times = [row["seconds"] for row in run.history]
    assert (times[-1] - times[0]) / (len(times) - 1) == pytest.approx(1.7205, abs=0.03)


# -- gossip ----------------------------------------------------------------------------------------------------------


def gossiped(strategy: str, vectors: Tensor, rounds: int) -> tuple[Tensor, mh.Run]:
    """[rounds + 1, n, D] x of all workers, before each round; before the first x_i = 1 - (row i of `vectors`)."""
    n = len(vectors)
    seen: dict[int, list[Tensor]] = {rank: [] for rank in range(n)}

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        worker = current()
        assert worker is not None
        seen[worker.rank].append(model.x.detach().clone())
        return linear(model, batch)

    def first_step_only(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))

    fields = point(vectors.repeat(rounds + 2, 1), n, 1.0, loss=loss, schedule=first_step_only, shuffle=False)
    run = train(strategy, n, **fields)
    return torch.stack([torch.stack(xs[1:]) for xs in seen.values()], dim=1), run


def spread(xs: Tensor) -> Tensor:
    """[rounds] how far the workers are from their mean."""
    return (xs - xs.mean(dim=1, keepdim=True)).flatten(1).norm(dim=1)


def test_a_rings_consensus_error_shrinks_by_its_second_eigenvalue() -> None:
    """CASE 14: of eight workers, along the slowest wave round the ring; and the mean stays."""
    wave = torch.tensor([[math.cos(2 * math.pi * i / 8) + 0.5] for i in range(8)], dtype=torch.float64)
    xs, run = gossiped("gossip:graph=ring", wave, 12)
    errors = spread(xs)
    assert (errors[1:] / errors[:-1]).tolist() == pytest.approx([0.80473785412436502] * 12, rel=1e-10)
    torch.testing.assert_close(xs.mean(dim=1), torch.full((13, 1), 0.5).double(), rtol=0, atol=1e-14)
    assert float(run.parameters) == pytest.approx(0.5, abs=1e-14)


@pytest.mark.parametrize("weights", ["doubly-stochastic", "push-sum"])
def test_the_exponential_graph_is_exact_in_log2_rounds(weights: str) -> None:
    """CASE 15: sixteen workers, four rounds."""
    vectors = normal(16, 3, seed=1)
    xs, _ = gossiped(f"gossip:graph=exponential,weights={weights}", vectors, 5)
    errors = spread(xs).tolist()
    first = next(i for i, error in enumerate(errors) if error < 1e-13)
    assert first == {"doubly-stochastic": 4, "push-sum": 3}[weights]  # push-sum steps before it mixes
    assert errors[0] > 1 or weights == "push-sum"
    assert errors[first - 1] > 0.1
    torch.testing.assert_close(xs[-1], (1 - vectors.mean(dim=0)).expand(16, 3), rtol=0, atol=1e-14)


# -- compression -----------------------------------------------------------------------------------------------------


def residuals(directory: Path) -> Tensor:
    """Of each rank, as the newest checkpoint has them."""
    found = checkpoints.newest(directory / "checkpoints", lambda message: None)
    assert found is not None
    return torch.stack([found.tensors(rank)["strategy/residual/x"] for rank in range(found.ranks)])


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *(("allreduce", "topk:0.1"), ("allreduce", "int8"), ("allreduce", "onebit")),
        *(("downpour", "onebit"), ("downpour", "bf16"), ("downpour", "topk:0.1")),
        ("downpour", "threshold:0.5:1e9"),  # residual clipping loses what it clips, so it is far away here
    ],
)
def test_what_is_sent_and_what_is_left_are_all_gradients(strategy: str, codec: str, tmp_path: Path) -> None:
    """CASE 16, across a checkpoint: worker 1 dies at its 8th step, and the run goes on from the 6th."""
    workers, vectors = 3, normal(12 * 3, 48, seed=2)
    kept = {"run_dir": tmp_path / "run", "checkpoint_every": 6, "validate_every": "epoch"}
    fields = point(vectors, workers, 1.0, **kept)
    with pytest.raises(WorkerFailed):
        train(f"{strategy}:compress={codec}", workers, "compute='row=1',faults='kill=1@step:8'", **fields)
    run = train(f"{strategy}:compress={codec}", workers, "compute='row=1'", **fields, resume=True)
    left = residuals(tmp_path / "run")
    sent = 1 - run.parameters  # rate 1: all that reached the parameters, with its sign turned
    if strategy == "allreduce":
        torch.testing.assert_close(sent + left.mean(dim=0), vectors.sum(dim=0) / workers, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(sent - left.sum(dim=0), vectors.sum(dim=0), rtol=0, atol=1e-12)
    assert left.abs().max() > 0


def test_the_ledger_agrees_to_the_byte() -> None:
    """CASE 17: of D' = 512 numbers of 8 bytes; two workers, ten ticks."""
    fields = point(normal(20, 500, seed=3), 2)
    for codec, payload in (("topk:0.01", 6 * (8 + 4)), ("onebit", 512 // 8 + 8)):
        for strategy, call in (("downpour", "push"), ("allreduce", "all_gather")):
            ledger = train(f"{strategy}:compress={codec}", 2, **fields).ledger
            assert ledger[call] == {"bytes": 20 * payload, "messages": 20}, (strategy, codec)


# -- the same every time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    ["downpour", "dynsgd:window=2", "easgd", "gossip:graph=pairs", "diloco:period=2,via=server", "quorum:backups=1"],
)
def test_the_same_seed_is_the_same_run_and_another_is_another(strategy: str) -> None:
    """With jitter, and with messages that are lost, doubled, late and in another order."""
    lan = "network='latency=1ms,bandwidth=1e8',compute='row=1e-3,jitter=lognormal:0.5'"
    if strategy_of(strategy).server() is not None:
        lan += ",faults='drop=0.1,duplicate=0.1,delay=0.1:0.01,reorder=0.1,retry=0.05'"
    first, again, other = (train(strategy, 4, f"{lan},seed={seed}", task=task()) for seed in (1, 1, 2))
    assert torch.equal(first.parameters, again.parameters)
    assert (first.seconds, first.history, first.staleness) == (again.seconds, again.history, again.staleness)
    assert not torch.equal(first.parameters, other.parameters)
