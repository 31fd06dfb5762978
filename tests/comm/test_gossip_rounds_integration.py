"""Rounds of gossip between real processes, of vectors larger than what any group holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import F64, Hand, slope
from harness import on_ring, on_shared_memory, values

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


@pytest.mark.parametrize(("on", "size"), [(on_shared_memory, 3), (on_ring, 3)])
@pytest.mark.slow
def test_nobody_waits_for_ever(on: Any, size: int) -> None:
    for off in values(on(size, mixed, timeout_s=20)):
        assert max(off) < 1e-12
