"""Compression in strategies: nothing is lost, what does not count leaves the residual, and what is drawn."""

from typing import Any

import pytest
import torch
from by_hand import F64, ROW, Hand, Point, ScriptedServer, clients_of, hands, quadratic, sgd, slope
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.comm.codecs import codec_of
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.replica.replica import Replica
from manyhands.strategies import compression, strategy_of
from manyhands.strategies.allreduce import AllReduce, AllReduceState
from manyhands.strategies.base import Strategy
from manyhands.strategies.compression import CompressedState
from manyhands.strategies.quorum import Quorum
from manyhands.testing.threads import together
from manyhands.worker import Worker

CODECS = ["topk:0.05", "onebit", "threshold:0.3:none", "powersgd:1", "int8", "bf16"]
WIDTH = 6
OPPOSED = [quadratic([1.0, 1.0], [5.0, 1.0]), quadratic([1.0, 1.0], [-5.0, 1.0])]
EVERY_PUSH = "diloco:period=1,via=server,quorum=1,grace=0,outer_rate=1.0,outer_momentum=0.0,"  # is a round


class Plane(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.zeros(5, WIDTH, dtype=F64))
        self.v = nn.Parameter(torch.zeros(3, dtype=F64))


def pulled_to(seed: int) -> Any:
    """A quadratic whose minimum is a random point."""
    draws = torch.Generator().manual_seed(seed)
    m, v = (torch.randn(shape, generator=draws, dtype=F64) for shape in ((5, WIDTH), (3,)))
    return lambda model, batch: ((model.m - m) ** 2).sum() / 2 + ((model.v - v) ** 2).sum() / 2


class Wide(Hand):
    """A worker with a Plane that notes its gradients."""

    gradients: Any = 0.0

    def note(self) -> None:
        self.gradient()
        self.gradients = self.gradients + self.replica.gradients.parts[0]
        self.exchange()


def wide(spec: str, size: int, program: Any, shards: int = 1) -> list[Any]:
    def run(worker: Worker) -> Any:
        return program(Wide(strategy_of(spec), worker, pulled_to(worker.rank), Plane(), 0.1))

    return together(size, run, clients_of(strategy_of(spec), size, shards))


@pytest.mark.parametrize("codec", CODECS)
def test_what_moved_and_the_residuals_are_all_gradients(codec: str) -> None:
    """CASE 16: plain SGD has moved by the rate times the mean of (gradients - residual)."""

    def moved(hand: Wide, strategy: str) -> tuple[Tensor, Tensor, Tensor]:
        for _ in range(8):
            hand.note()
        residual = hand.state.residual  # of diloco, of what it moved
        waits = residual / 0.1 if strategy.startswith("diloco") else residual
        return hand.replica.parameters.parts[0].clone(), hand.gradients - waits, residual

    for strategy in ("allreduce:", "quorum:", "diloco:period=1,outer_rate=1.0,outer_momentum=0.0,"):
        got = wide(f"{strategy}compress={codec}", 3, lambda hand, strategy=strategy: moved(hand, strategy))
        sent = sum(counted for _, counted, _ in got) / 3
        for where, _, residual in got:
            assert (where + 0.1 * sent).abs().max() < 1e-12, strategy
            assert residual.any(), strategy


@pytest.mark.parametrize("codec", CODECS)
def test_the_center_and_the_residuals_are_all_updates(codec: str) -> None:
    """CASE 16: over a server of any number of shards; each update is the rate times a gradient."""

    def program(hand: Wide) -> tuple[Tensor, Tensor]:
        for _ in range(8):
            hand.note()
        hand.finish()
        center = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        return center.joined(), -0.1 * hand.gradients - hand.state.residual

    for strategy in ("downpour:", "agn:window=1,", "downpour:rule=sgd,outer_rate=1,", EVERY_PUSH):
        for shards in (1, 3) if strategy == "downpour:" else (1,):
            got = wide(f"{strategy}compress={codec}", 2, program, shards)
            assert (got[0][0] - sum(counted for _, counted in got)).abs().max() < 1e-12, (strategy, shards)


def test_traffic_of_pushes_is_that_of_payloads() -> None:
    """CASE 17: k·(b + 4) bytes a push, and what is pulled is whole."""

    def program(hand: Wide) -> tuple[int, int]:
        for _ in range(4):
            hand.note()
        ledger = hand.worker.server.ledger.as_dict()  # type: ignore[union-attr]
        return ledger["push"]["bytes"], ledger["pull"]["bytes"]

    padded = 32 + 16
    assert wide("downpour:compress=topk:0.05", 2, program) == [(4 * 3 * (8 + 4), 4 * padded * 8)] * 2


def test_with_feedback_it_converges_where_without_it_stalls() -> None:
    """Two workers disagree about the first coordinate, their largest, and agree on the second, which topk then never sends.

    With feedback it waits until it is as large: 5, of which a step makes 0.1·5 = 0.5.
    """

    def program(hand: Hand) -> float:
        for _ in range(60):
            hand.tick()
        return abs(float(hand.x[1]) - 1)

    for feedback in ("none", "true", "false"):
        spec = f"allreduce:compress=topk:0.01,feedback={feedback}"
        for rest in hands(spec, OPPOSED, program, start=[0.0, 0.0], rate=0.1):
            assert rest == 1.0 if feedback == "false" else rest <= 0.5, (feedback, rest)


def test_residuals_are_clipped_where_threshold_clips() -> None:
    def program(hand: Hand) -> float:
        for _ in range(9):
            hand.tick()
        return float(hand.state.residual[0])

    assert hands("allreduce:compress=threshold:0.5", [slope(2.0)] * 2, program) == [2.5, 2.5]
    assert hands("allreduce:compress=threshold:0.5:none", [slope(2.0)] * 2, program) == [13.5, 13.5]


def test_what_does_not_count_leaves_the_residual() -> None:
    """A tick without rows; one whose loss counts nothing, but may have a gradient all the same; a gradient that is not
    finite, which is an error on all."""

    def program(hand: Hand, what: str) -> tuple[Tensor, Tensor]:
        hand.tick()
        before, second = hand.state.residual.clone(), hand.worker.rank == 1
        hand.gradient(None if second and what == "no rows" else ROW)
        if second and what == "no weight":
            hand.replica.weight = 0.0
        if second and what == "not finite":
            hand.replica.gradients.parts[0][0] = float("nan")
        if what == "not finite":
            with pytest.raises(mh.ManyhandsError, match="the gradient of step 1 is not finite in w"):
                hand.exchange()
        else:
            hand.exchange()
        return before, hand.state.residual

    for spec, what in (
        *(("allreduce:compress=topk:0.01", what) for what in ("no rows", "no weight")),
        *(("quorum:compress=topk:0.01", what) for what in ("no rows", "no weight")),
        *((f"allreduce:compress={c}", "not finite") for c in ("topk:0.01", "int8", "bf16", "threshold:0.3", "onebit")),
    ):
        got = hands(spec, OPPOSED, lambda hand, what=what: program(hand, what), start=[0.0, 0.0])
        assert torch.equal(*got[1]), (spec, what)
        assert what == "not finite" or (got[1][1].any() and not torch.equal(*got[0])), (spec, what)


def test_a_push_that_is_dropped_or_counts_nothing_leaves_the_residual() -> None:
    server, options = ScriptedServer([(False, 0), (False, 0), (True, 0), (True, 0)]), Quorum(compress="topk:0.01")
    worker = Worker(server=server, size=2)  # type: ignore[arg-type]
    worker.group.size = 2
    worker.group.broadcast_ = worker.group.barrier = lambda *_: None  # type: ignore[assignment, method-assign]
    replica = Replica.of(Point([0.0, 0.0]), sgd(0.1), group=worker.group, loss=OPPOSED[0])
    state = plain.started(options, replica, worker)
    state.residual[1] = 7.0
    wanted = state.residual.clone()
    replica.backward(ROW)
    assert options.exchange(replica, worker, state).dropped
    assert torch.equal(state.residual, wanted)
    for weight, changed in ((1.0, False), (0.0, False), (1.0, True)):
        compression.push(options, replica, worker, state, replica.gradients, weight)
        assert torch.equal(state.residual, wanted) is not changed, weight


class Branches(nn.Module):
    """Two numbers, of which a batch says which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(4, dtype=F64)) for _ in range(2))


def test_a_parameter_that_nobody_used_does_not_move_and_its_residual_waits() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        used = model.a if batch[0] else model.b
        return (used * torch.arange(1, 5, dtype=F64)).sum()

    def program(worker: Worker, strategy: Strategy) -> list[Tensor]:
        replica = Replica.of(Branches(), plain.OPTIMIZERS["momentum"], group=worker.group, loss=loss)
        state: Any = plain.started(strategy, replica, worker)
        if worker.server is not None:
            worker.server.activate()
        worker.group.barrier()
        held = []
        for which in (1, 0):
            replica.begin_tick()
            replica.backward(torch.tensor([which]))
            strategy.exchange(replica, worker, state)
            held += [replica.named(vector)["a"].clone() for vector in (replica.parameters, state.residual)]
        assert not _padding(replica, state.residual).any()
        assert not _padding(replica, replica.gradients.parts[0]).any()
        return held

    for spec in ("allreduce:compress=onebit", "allreduce:compress=topk:0.05", "quorum:compress=onebit"):
        strategy = strategy_of(spec)
        ends = together(2, lambda worker, strategy=strategy: program(worker, strategy), clients_of(strategy, 2))
        for moved, residual, later, waited in ends:
            assert moved.any(), spec
            assert residual.any(), spec
            assert torch.equal(moved, later), spec
            assert torch.equal(residual, waited), spec


def _padding(replica: Replica, vector: Tensor) -> Tensor:
    rest = vector.clone()
    for view in replica.named(rest).values():
        view.zero_()
    return rest


def test_with_another_number_of_ranks_no_residual_is_lost() -> None:
    """CASE 16: averaged ones are averaged, added ones shared out."""
    states = [AllReduceState(residual=torch.full((3,), value), seed=4) for value in (1.0, 2.0, 6.0)]
    merged = AllReduceState(residual=torch.zeros(3)).merge(states, 1, 2)
    assert merged.residual is not None
    assert merged.residual.tolist() == [3.0] * 3
    assert AllReduceState().merge([AllReduceState()] * 3, 0, 2).residual is None
    shared = CompressedState(residual=torch.zeros(3)).shared(states, 2, adds=True)
    assert shared is not None
    assert shared.tolist() == [4.5] * 3
    assert states[1] is AllReduceState().merge(states, 1, 3)


def test_feedback_is_on_for_biased_codecs() -> None:
    for options, has in [
        *(({"compress": codec}, True) for codec in CODECS),
        ({"compress": "int8", "feedback": False}, False),
        ({"compress": "qsgd:4"}, False),
        ({"compress": "qsgd:4", "feedback": True}, True),
        ({}, False),
    ]:
        assert compression.has_feedback(AllReduce(**options)) is has, options


def test_qsgd_draws_apart_on_each_rank_and_at_each_step() -> None:
    def of_rank(rank: int) -> Replica:
        return Replica.of(Plane(), sgd(0.1), group=ThreadGroup(Meeting(2), rank), loss=pulled_to(0))

    draws = [
        float(torch.rand(1, generator=compression._draws(CompressedState(seed=seed, sent=sent), of_rank(rank))))
        for seed, rank, sent in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0))
    ]
    assert len(set(draws)) == 4
    assert draws[0] == draws[4]


def test_every_matrix_is_whole_or_cut_at_rows() -> None:
    """Over three shards of 16 elements: of the matrix 5 x 6 at 0 the first two rows, then rows 3 and 4."""
    replica = Replica.of(Plane(), sgd(0.1), group=Worker().group, loss=pulled_to(0))
    worker = Worker()
    worker.group.size = 3
    state = CompressedState(**compression.remembered(AllReduce(compress="powersgd:1"), replica, worker))
    codec = codec_of("powersgd:1")
    assert codec is not None
    cut = [compression._matrices_in(codec, state.guess, replica.layout, low, low + 16) for low in (0, 16, 32)]
    assert [[(m.start, m.rows, m.columns) for m in part] for part in cut] == [[(0, 2, 6)], [(2, 2, 6)], []]
    assert cut[0][0].guess.data_ptr() == cut[1][0].guess.data_ptr()
