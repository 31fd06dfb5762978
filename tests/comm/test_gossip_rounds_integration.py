"""Rounds of gossip between real processes, of vectors larger than what any group holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import F64, Hand, slope
from harness import forked, on_shared_memory, values
from meshes import close, mesh, ring

from manyhands.comm.group import Group
from manyhands.strategies import strategy_of
from manyhands.worker import Worker

SPECS = (
    "gossip:graph=ring",
    "gossip",
    "gossip:graph=random",
    "gossip:graph=ring,weights=push-sum",
    "gossip:graph=random,weights=push-sum",
)
LARGE = 400_000  # float64: 3.2 MB, where a mailbox holds 1 and a socket less


def mixed(group: Group) -> list[float]:
    """For each strategy: how far the mean of all is off after three rounds, at most."""
    worker, off = Worker(rank=group.rank, size=group.size, group=group), []
    for spec in SPECS:
        hand = Hand(strategy_of(spec), worker, slope(0.0), [0.0] * LARGE, rate=0.1)
        generator = torch.Generator().manual_seed(group.rank)
        hand.replica.parameters.parts[0][:LARGE] = torch.randn(LARGE, generator=generator, dtype=F64)
        before = hand.center
        for _ in range(3):
            hand.tick()
        off.append(float((hand.center - before).abs().max()))
    return off


def on_ring(size: int, program: Callable[[Group], Any]) -> Any:
    sockets = mesh(size)

    def run(rank: int) -> Any:
        close(sockets, but=rank)
        group = ring(sockets, rank, hosts=[f"host-{peer}" for peer in range(size)], timeout_s=20)
        try:
            return program(group)
        finally:
            group.close()

    try:
        return forked(size, run, 60, then=lambda: close(sockets))
    finally:
        close(sockets)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_nobody_waits_for_ever_in_shared_memory(size: int) -> None:
    for off in values(on_shared_memory(size, mixed, timeout_s=20)):
        assert max(off) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_nobody_waits_for_ever_over_sockets(size: int) -> None:
    for off in values(on_ring(size, mixed)):
        assert max(off) < 1e-12
