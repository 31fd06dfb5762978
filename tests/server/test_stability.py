"""A fixed delay, in scripted order through the store."""

import math

import pytest
import torch

from manyhands.server.base import ServerSpec
from manyhands.server.rules import make_rule
from manyhands.server.store import Store

LIMITS = [2, 1, 0.618034, 0.445042, 0.347296]


def peak(delay, step, turns=4000):
    """The largest |x| in the last of the turns: of delay + 1 workers in turn, each pulls right after its own push."""
    workers = delay + 1
    store = Store(make_rule(ServerSpec(rule="add")), workers)
    store.initialize(torch.ones(1, dtype=torch.float64))
    pulled = []
    for worker in range(workers):
        store.activate(worker, 0)
        store.pull(worker)
        pulled.append(store.center.clone())
    xs = []
    for turn in range(turns):
        worker = turn % workers
        reply = store.push(worker, turn // workers + 1, pulled[worker].mul_(-step), 1.0, 0)
        assert reply.staleness == min(turn, delay)
        store.pull(worker)
        pulled[worker].copy_(store.center)
        xs.append(abs(float(store.center)))
    return max(xs[-50:])


@pytest.mark.parametrize("delay", range(5))
def test_the_limit_of_a_fixed_delay(delay):
    """CASE 10: converges 1 % below 2·sin(π/(2(2τ+1))), diverges 1 % above."""
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert limit == pytest.approx(LIMITS[delay], abs=5e-7)
    assert peak(delay, 0.99 * limit) < 1e-2
    assert peak(delay, 1.01 * limit) > 1e2
