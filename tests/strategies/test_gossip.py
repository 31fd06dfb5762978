"""Gossip on mathematics that a hand can check."""

import math
from itertools import pairwise

import pytest
import torch
from by_hand import F64, ROW, Hand, close, hands, matrix, path_of, quadratic, slope
from torch import Tensor

import manyhands as mh
import plain
from manyhands.comm.solo import SoloGroup
from manyhands.replica.control_bits import MORE
from manyhands.replica.replica import Replica
from manyhands.strategies.gossip import GossipState

FLAT = slope(0.0)  # nobody steps: only the mixing moves


def spread(spec: str, values: list[float], rounds: int) -> Tensor:
    """[rounds + 1, workers] where the workers stand, who began at `values`, after each round of mixing alone."""

    def program(hand: Hand) -> list[float]:
        hand.replica.named(hand.replica.parameters)["w"].fill_(values[hand.worker.rank])
        path = [float(hand.x)]
        for _ in range(rounds):
            hand.tick()
            path.append(float(hand.x))
        return path

    return torch.tensor(hands(spec, [FLAT] * len(values), program), dtype=F64).T


def test_a_ring_shrinks_the_consensus_error_round_by_round() -> None:
    """CASE 14: by 1/3 + 2/3·cos(2π/8) = .804738 where it is of the slowest kind; the mean stays."""
    wave = [5 + math.cos(2 * math.pi * rank / 8) for rank in range(8)]
    path = spread("gossip:graph=ring", wave, 6)
    for before, after in pairwise(path):
        assert float((after - 5).norm() / (before - 5).norm()) == pytest.approx(0.804738, abs=5e-7)
        assert float(after.mean()) == pytest.approx(5, abs=1e-14)


def test_one_peer_at_a_time_reaches_the_exact_mean_in_log2_rounds() -> None:
    """CASE 15: 16 workers, 4 rounds, and not 3."""
    path = spread("gossip:graph=exponential", [float(rank**2) for rank in range(16)], 4)
    assert path[4].tolist() == [77.5] * 16
    assert float((path[3] - 77.5).abs().max()) == 60.0


def test_replicas_that_are_equal_keep_their_bits() -> None:
    """Thirds do not add up to one in binary: 0.1 stays 0.1 all the same."""
    for spec in ("gossip:graph=ring", "gossip:graph=random,weights=push-sum"):
        assert spread(spec, [0.1] * 5, 7).unique().tolist() == [0.1]


SHIFTS = (-1.0, 0.0, 4.0, 2.0, -3.0)
RATE, CURVATURE = 0.1, 2.0


def followed(spec: str, ticks: int) -> tuple[Tensor, Tensor, Tensor]:
    """[ticks, 5] of five workers at quadratics of their own: where they stand, what they call the answer, their masses."""

    def program(hand: Hand) -> list[tuple[float, float, float]]:
        path = []
        for _ in range(ticks):
            hand.tick()
            path.append((float(hand.x), float(hand.center), hand.state.mass))
        return path

    paths = hands(spec, [quadratic([CURVATURE], [b]) for b in SHIFTS], program, rate=RATE)
    xs, centers, masses = torch.tensor(paths, dtype=F64).permute(2, 1, 0)
    return xs, centers, masses


def test_d_psgd_takes_its_gradient_before_it_mixes_and_its_step_after() -> None:
    """x ← W·x - η·g(x), both of the old x; the answer is the mean, which follows the mean gradient."""
    for graph in ("ring", "exponential", "random"):
        xs, centers, _ = followed(f"gossip:graph={graph}", 9)
        b, x = torch.tensor(SHIFTS, dtype=F64), torch.zeros(5, dtype=F64)
        for tick in range(9):
            x = matrix(graph, 5, tick) @ x - RATE * CURVATURE * (x - b)
            assert close(xs[tick], x, 1e-13), (graph, tick)
            assert close(centers[tick], [x.mean()] * 5, 1e-13), (graph, tick)


def test_sgp_steps_then_pushes_and_removes_the_bias_by_its_mass() -> None:
    """x ← P·(x - η·g(z)), w ← P·w, z = x / w; the answer is the sum of x over N."""
    for graph, seed in (("ring", 0), ("exponential", 0), ("random", 3)):
        zs, centers, masses = followed(f"gossip:graph={graph},weights=push-sum,seed={seed}", 12)
        b, x, w = torch.tensor(SHIFTS, dtype=F64), torch.zeros(5, dtype=F64), torch.ones(5, dtype=F64)
        for tick in range(12):
            p = matrix(graph, 5, tick, one_way=True, seed=seed)
            x, w = p @ (x - RATE * CURVATURE * (x / w - b)), p @ w
            assert close(masses[tick], w), (graph, tick)
            assert close(zs[tick], x / w, 1e-12), (graph, tick)
            assert close(centers[tick], [x.sum() / 5] * 5, 1e-12), (graph, tick)
        assert bool((masses - 1).abs().max() > 0.4) is (graph == "random"), graph  # else all masses stay 1


def test_a_round_comes_every_period_and_where_the_rows_end() -> None:
    """Two workers at slopes of ∓1: they part by .1 a tick, and meet before the third step, and at the end."""
    first, second = hands("gossip:period=3", [slope(-1.0), slope(1.0)], path_of(5, ends=2))
    assert close([x for x, _ in first], [0.1, 0.2, 0.1, 0.2, 0.3, 0.0, 0.0])
    assert close([x for x, _ in second], [-x for x, _ in first])


def test_a_worker_without_rows_mixes() -> None:
    """CASE 27: its neighbours' steps go through it. That a round of nobody mixes nothing is in the suite."""

    def one_without(hand: Hand) -> float:
        for _ in range(4):
            hand.tick(None if hand.worker.rank == 1 else ROW)
        return float(hand.x)

    xs = hands("gossip:graph=ring", [slope(-1.0)] * 4, one_without)
    assert sum(xs) == pytest.approx(4 * 3 * 0.1)
    assert 0 < xs[1] < min(xs[0], xs[2])


def test_where_the_number_of_ticks_is_known_no_round_asks_all() -> None:
    """But the first of each epoch, which hears that it is known; on a stream every round does."""

    def asked(hand: Hand, stream: bool) -> int:
        group, questions = hand.worker.group, []
        mean_ = group.mean_
        group.mean_ = lambda tensor, *rest: (questions.append(tensor.numel()), mean_(tensor, *rest))[1]  # type: ignore[method-assign]
        hand.replica.control.sync_if_due = lambda worker: False  # type: ignore[method-assign]
        for _ in range(2):
            for tick in range(4):
                hand.replica.control.more = stream and tick < 3
                hand.tick()
            assert bool(hand.replica.control.received & MORE) is False
            hand.finish()
        return len(questions)

    assert hands("gossip:graph=ring", [FLAT] * 3, lambda hand: asked(hand, False)) == [2] * 3
    assert hands("gossip:graph=ring", [FLAT] * 3, lambda hand: asked(hand, True)) == [8] * 3


def test_a_round_sends_and_receives_at_once() -> None:
    """On a slow simulated network each step takes the time of one way of the vector, or of two on a ring, and not of both ways."""
    replica = Replica.of(plain.mlp(), plain.OPTIMIZERS["sgd"], group=SoloGroup())
    bandwidth, bits = 1e6, 8 * 8 * replica.layout.padded
    for graph, turns in [("exponential", 1), ("random", 1), ("ring", 2)]:
        seconds = [
            mh.train(
                plain.task(train_data=plain.rows(8 * steps), batch_size=8, epochs=1, optimizer=plain.OPTIMIZERS["sgd"]),
                strategy=f"gossip:graph={graph}",
                engine=f"sim:network='bandwidth={bandwidth},latency=0'",
                workers=4,
            ).seconds
            for steps in (3, 6)
        ]
        way = turns * bits / bandwidth
        assert (seconds[1] - seconds[0]) / 3 == pytest.approx(way, rel=0.05), graph  # and control words


def test_with_another_number_of_workers_all_count_the_same_again() -> None:
    states = [GossipState(ticks=1, weight=2.0, rounds=5, mass=m, ask=False) for m in (0.5, 1.5)]
    merged = GossipState().merge(states, 2, 3)
    assert (merged.ticks, merged.weight, merged.rounds, merged.mass, merged.ask) == (0, 0.0, 5, 1.0, True)
    assert GossipState().merge(states, 1, 2) is states[1]
    assert [state.weight_of_window() for state in states] == [0.5, 1.5]
