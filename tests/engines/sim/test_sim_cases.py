"""Closed forms of the field, produced by the strategies' own code on simulated workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sim_world import servers_of
from torch import Tensor, nn

import manyhands as mh
from manyhands.checkpoint import checkpoints
from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.timeline import Timeline
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


def first_step_only(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))


# -- exactness -------------------------------------------------------------------------------------------------------


def trained(strategy: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], **fields: Any) -> Tensor:
    """On three workers, in windows that two epochs' ends cut short: 4 ticks of 12, 12, 12 and 2 or 3 rows."""
    return train(strategy, 3, task=task(optimizer=optimizer, **fields)).parameters


@pytest.mark.parametrize("optimizer", [sgd(0.1), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)])
@pytest.mark.parametrize("form", ["", ",via=server,bound=0"])
def test_diloco_without_an_outer_optimizer_is_local_sgd(optimizer: Any, form: str) -> None:
    """CASE 5, first half"""
    outer = trained(f"diloco:period=3,outer_rate=1.0,outer_momentum=0.0{form}", optimizer)
    local = trained("local-sgd:period=3,optimizer_state=kept", optimizer)
    torch.testing.assert_close(outer, local, rtol=0, atol=1e-14)


@pytest.mark.parametrize("form", ["", ",via=server,bound=0"])
def test_diloco_of_period_1_is_nesterov_on_the_mean_gradient(form: str) -> None:
    """CASE 5, second half"""
    outer = trained(f"diloco:period=1,outer_rate=.7,outer_momentum=.9{form}", sgd(0.1))
    nesterov, _ = plain_loop(
        mlp,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.07, momentum=0.9, nesterov=True),
        rows(39),
        batch_size=12,
        epochs=2,
    )
    torch.testing.assert_close(outer, flat(nesterov), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", ["local-sgd:period=1", "allreduce", "diloco:period=1,outer_rate=1.0,outer_momentum=0.0"]
)
def test_workers_without_rows_do_not_count(strategy: str) -> None:
    """CASES 3 and 27: five rows, twice, on eight workers; three of them never have one."""
    run = train(strategy, 8, task=task(optimizer=sgd(0.1), train_data=rows(5), batch_size=8))
    plain, _ = plain_loop(mlp, sgd(0.1), rows(5), batch_size=8, epochs=2)
    torch.testing.assert_close(run.parameters, flat(plain), rtol=0, atol=1e-14)
    assert sorted(run.rows["workers"]) == [0, 0, 0, 2, 2, 2, 2, 2]


# -- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "n", "total", "messages"), [(4, 1_000_000, 4 * 6_000_000, 6), (5, 7, 224, 8)])
def test_a_ring_sends_what_the_formula_says(workers: int, n: int, total: int, messages: int) -> None:
    """CASE 8"""

    def program(worker: Worker) -> dict[str, dict[str, int]]:
        worker.group.all_reduce_(torch.full((n,), float(worker.rank)))
        return worker.group.ledger.as_dict()

    sent = [output["all_reduce_"] for output in launch(program, workers, network="collective=ring")]
    assert sum(one["bytes"] for one in sent) == total
    assert {one["messages"] for one in sent} == {messages}
    if n % workers == 0:
        assert {one["bytes"] for one in sent} == {total // workers}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_and_a_pull_are_the_vector_each(servers: int) -> None:
    """CASE 9: of D' = 64 numbers of 8 bytes; each shard has its part."""
    data = (torch.ones(12, 64, dtype=torch.float64),)
    run = train(
        "downpour",
        3,
        servers=servers,
        model=lambda: Point(64),
        loss=linear,
        optimizer=sgd(0.1),
        train_data=data,
        batch_size=3,
    )
    assert run.ledger["push"] == {"bytes": 12 * 64 * 8, "messages": 12 * servers}
    assert run.ledger["pull"] == {"bytes": 12 * 64 * 8, "messages": 12 * servers}


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
    data = (torch.zeros(turns, 1, dtype=torch.float64),)
    run = train(
        "downpour", workers, f"compute='row=0,step=1',faults='{apart}'",
        model=Point, loss=loss, optimizer=sgd(step), train_data=data, batch_size=workers,
    )  # fmt: skip
    return xs, run.staleness


@pytest.mark.parametrize("delay", [0, 1, 4, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (2, 3))])
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


def _norm(xs: list[float]) -> float:
    return math.sqrt(sum(x * x for x in xs))


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


@pytest.mark.parametrize(
    "strategy", ["downpour", "downpour:rule=adagrad", "agn", "dynsgd", "distance", "easgd", "eamsgd"]
)
def test_bound_0_is_synchronous_whatever_the_speeds(strategy: str) -> None:
    """CASE 11: the same bits, and no push is stale."""
    spec = f"{strategy}{',' if ':' in strategy else ':'}bound=0"
    fast, slow = (train(spec, 3, speeds, task=task()) for speeds in (FAST, SLOW))
    assert torch.equal(fast.parameters, slow.parameters)
    assert set(fast.staleness) == set(slow.staleness) == {0}


def test_bound_0_of_elastic_averaging_is_its_form_over_the_group() -> None:
    """CASE 11"""
    served, grouped = (train(f"easgd:period=2,{form}", 3, SLOW, task=task()) for form in ("bound=0", "via=group"))
    torch.testing.assert_close(served.parameters, grouped.parameters, rtol=0, atol=1e-12)


def test_a_dead_worker_blocks_at_the_bound_until_it_is_declared_lost() -> None:
    """CASE 11: worker 2 dies in its third tick, at 2.5 s, and is declared lost at 20 s."""
    bound, ticks = 2, 10
    timeline = Timeline()
    servers = servers_of(timeline, ServerSpec(rule="add", bound=bound), 3)
    finished: list[tuple[float, int, int]] = []

    def program(rank: int) -> None:
        server, center = servers.clients[rank], torch.zeros(1)
        if rank == 0:
            server.initialize(torch.zeros(1))
        server.activate()
        timeline.sleep(0.25)  # all have begun
        for tick in range(ticks):
            server.pull(center)
            timeline.sleep(0.9)
            server.push(torch.ones(1))
            finished.append((timeline.now, rank, tick + 1))
            server.tick()
        server.deactivate()

    timeline.on_end = _raise_errors
    programs = [timeline.start(rank, lambda rank=rank: program(rank)) for rank in range(3)]  # type: ignore[misc]
    timeline.at(2.5, programs[2].kill)
    timeline.at(20.0, lambda: servers.lose(2))
    timeline.run()
    before = [tick for time, rank, tick in finished if rank != 2 and time < 20]
    assert max(tick for _, rank, tick in finished if rank == 2) == 2
    assert max(before) == 2 + bound + 1
    after = sorted(time for time, rank, tick in finished if rank == 0 and tick > 2 + bound + 1)
    assert after[0] == pytest.approx(20.9)
    assert all(later - earlier == pytest.approx(0.9) for earlier, later in pairwise(after))
    assert len(after) == ticks - (2 + bound + 1)


def _raise_errors(program: Any) -> None:
    if program.error is not None:
        raise program.error


@pytest.mark.slow
def test_how_long_steps_take_with_backup_workers() -> None:
    """CASE 13: Exp(1) step times, ten workers, two to spare. Who is late finishes its stale gradient first: 1.7205, not 1.4290.

    A step's time has a standard deviation of 0.55, so a mean of 1500 one of 0.014. Workers that computed gradients which can
    only come too late would make it 1.78.
    """
    steps = 1500
    data = (torch.zeros(10 * steps, 1, dtype=torch.float64),)
    run = train(
        "quorum:backups=2", 10, "compute='row=0,step=1,jitter=exponential'",
        model=Point, loss=linear, optimizer=sgd(0.1), train_data=data, batch_size=10, validate_every=steps,
    )  # fmt: skip
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

    run = train(
        strategy, n, model=lambda: Point(vectors.shape[1]), loss=loss, optimizer=sgd(1.0), schedule=first_step_only,
        train_data=(vectors.repeat(rounds + 2, 1),), batch_size=n, shuffle=False,
    )  # fmt: skip
    return torch.stack([torch.stack(xs[1:]) for xs in seen.values()], dim=1), run


def spread(xs: Tensor) -> Tensor:
    """[rounds] how far the workers are from their mean."""
    return (xs - xs.mean(dim=1, keepdim=True)).flatten(1).norm(dim=1)


def test_a_rings_consensus_error_shrinks_by_its_second_eigenvalue() -> None:
    """CASE 14: of eight workers, along the slowest wave round the ring; and the mean stays."""
    wave = torch.tensor([[math.cos(2 * math.pi * i / 8) + 0.5] for i in range(8)], dtype=torch.float64)
    xs, run = gossiped("gossip:graph=ring", wave, 20)
    errors = spread(xs)
    assert (errors[1:] / errors[:-1]).tolist() == pytest.approx([1 / 3 + 2 / 3 * math.cos(math.pi / 4)] * 20, rel=1e-10)
    assert 1 / 3 + 2 / 3 * math.cos(math.pi / 4) == pytest.approx(0.804738, abs=5e-7)
    torch.testing.assert_close(xs.mean(dim=1), torch.full((21, 1), 0.5).double(), rtol=0, atol=1e-14)
    assert float(run.parameters) == pytest.approx(0.5, abs=1e-14)


@pytest.mark.parametrize("weights", ["doubly-stochastic", "push-sum"])
def test_the_exponential_graph_is_exact_in_log2_rounds(weights: str) -> None:
    """CASE 15: sixteen workers, four rounds."""
    vectors = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    xs, _ = gossiped(f"gossip:graph=exponential,weights={weights}", vectors, 8)
    errors = spread(xs).tolist()
    first = next(i for i, error in enumerate(errors) if error < 1e-13)
    assert first == {"doubly-stochastic": 4, "push-sum": 3}[weights]  # push-sum steps before it mixes
    assert errors[0] > 1 or weights == "push-sum"
    assert errors[first - 1] > 0.1
    torch.testing.assert_close(xs[-1], (1 - vectors.mean(dim=0)).expand(16, 3), rtol=0, atol=1e-14)


# -- compression -----------------------------------------------------------------------------------------------------


def residuals(directory: Path) -> list[Tensor]:
    """Of each rank, as the newest checkpoint has them."""
    found = checkpoints.newest(directory / "checkpoints", lambda message: None)
    assert found is not None
    return [found.tensors(rank)["strategy/residual/x"] for rank in range(found.ranks)]


CONSERVED = [
    (s, c) for s in ("allreduce", "downpour") for c in ("topk:0.1", "onebit", "threshold:0.5:1e9", "bf16", "int8")
]
"""Residual clipping loses what it clips, so threshold's is far away here."""
CONSERVED.remove(("allreduce", "bf16"))  # whose mean is rounded once more, by the group


@pytest.mark.parametrize(("strategy", "codec"), CONSERVED)
def test_what_is_sent_and_what_is_left_are_all_gradients(strategy: str, codec: str, tmp_path: Path) -> None:
    """CASE 16, across a checkpoint: worker 1 dies at its 8th step, and the run goes on from the 6th."""
    n, workers = 48, 3
    vectors = torch.randn(12 * workers, n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    fields: dict[str, Any] = {
        "model": lambda: Point(n), "loss": linear, "optimizer": sgd(1.0), "train_data": (vectors,), "batch_size": workers,
        "run_dir": tmp_path / "run", "checkpoint_every": 6, "validate_every": "epoch",
    }  # fmt: skip
    with pytest.raises(WorkerFailed):
        train(f"{strategy}:compress={codec}", workers, "compute='row=1',faults='kill=1@step:8'", **fields)
    run = train(f"{strategy}:compress={codec}", workers, "compute='row=1'", **fields, resume=True)
    left = torch.stack(residuals(tmp_path / "run"))
    sent = 1 - run.parameters  # rate 1: all that reached the parameters, with its sign turned
    if strategy == "allreduce":
        torch.testing.assert_close(sent + left.mean(dim=0), vectors.sum(dim=0) / workers, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(sent - left.sum(dim=0), vectors.sum(dim=0), rtol=0, atol=1e-12)
    assert left.abs().max() > 0


@pytest.mark.parametrize(("codec", "payload"), [("topk:0.01", 6 * (8 + 4)), ("onebit", 512 // 8 + 8)])
def test_the_ledger_agrees_to_the_byte(codec: str, payload: int) -> None:
    """CASE 17: of D' = 512 numbers of 8 bytes; two workers, ten ticks."""
    data = (torch.randn(20, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),)
    fields: dict[str, Any] = {
        "model": lambda: Point(500),
        "loss": linear,
        "optimizer": sgd(0.1),
        "train_data": data,
        "batch_size": 2,
    }
    pushed = train(f"downpour:compress={codec}", 2, **fields).ledger
    assert pushed["push"] == {"bytes": 20 * payload, "messages": 20}
    gathered = train(f"allreduce:compress={codec}", 2, **fields).ledger
    assert gathered["all_gather"] == {"bytes": 20 * payload, "messages": 20}


# -- the same every time ---------------------------------------------------------------------------------------------

LAN = "network='latency=1ms,bandwidth=1e8',compute='row=1e-3,jitter=lognormal:0.5'"
ASYNCHRONOUS = [
    "downpour",
    "dynsgd:window=2",
    "easgd",
    "gossip:graph=pairs",
    "diloco:period=2,via=server",
    "quorum:backups=1",
]


def seeded(strategy: str, seed: int, more: str = "") -> mh.Run:
    return train(strategy, 4, f"{LAN},seed={seed}{more}", task=task())


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_the_same_seed_is_the_same_run_and_another_is_another(strategy: str) -> None:
    """With jitter, and with messages that are lost, doubled, late and in another order."""
    faults = ",faults='drop=0.1,duplicate=0.1,delay=0.1:0.01,reorder=0.1,retry=0.05'"
    served = strategy_of(strategy).server() is not None
    for more in ("", faults) if served else ("",):
        first, again, other = (seeded(strategy, seed, more) for seed in (1, 1, 2))
        assert torch.equal(first.parameters, again.parameters)
        assert (first.seconds, first.history, first.staleness) == (again.seconds, again.history, again.staleness)
        assert not torch.equal(first.parameters, other.parameters)
