"""Group constants, on calls that the simulator's own costs made."""

import pytest

from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.network import ALL, NetworkState, SimNetworkSpec
from manyhands.evidence.calibrate.measure import (
    LEAST_LARGEST,
    TimedCollective,
    bandwidth_of,
    fit_group,
    sizes_of,
    timed_collectives,
)

ITEM = 4


def calls_on(network: SimNetworkSpec, workers: int, elements: int) -> list[TimedCollective]:
    """What a machine would measure that is exactly as the model has it."""
    costs = Costs(NetworkState(network, workers, 0), workers)
    calls = [
        TimedCollective("barrier", 0, 0, 0.0),
        *(TimedCollective("mean", n, ITEM, 0.0) for n in sizes_of(elements, ITEM)),
    ]
    calls.append(TimedCollective("all_gather", 1024, ITEM, 0.0))
    return [TimedCollective(call.name, call.elements, call.item, call.cost(costs).seconds) for call in calls]


def test_a_network_is_found_again_from_its_own_costs() -> None:
    memory = SimNetworkSpec(workers_per_host=ALL, local_latency=3e-6, local_bandwidth=5e10)
    for workers in (2, 3, 8):
        for network, wanted in ((memory, (3e-6, 5e10)), (SimNetworkSpec(latency=8e-5, bandwidth=6e9), (8e-5, 6e9))):
            calls = calls_on(network, workers, 900_000)
            found = fit_group(calls, workers, 900_000, one_host=network is memory)
            assert (found.first, bandwidth_of(found)) == pytest.approx(wanted)
            assert found.worst < 1e-9
    calls = calls_on(memory, 2, 900_000)  # the model's own size is fitted best
    slow = [
        TimedCollective(call.name, call.elements, call.item, call.seconds * (2 if call.elements == 900_000 else 1))
        for call in calls
    ]
    place = [call.elements for call in calls].index(900_000)
    own = fit_group(slow, 2, 900_000, one_host=True).residuals[place]
    other = fit_group(slow, 2, 65_536, one_host=True).residuals[place]
    assert abs(own) < abs(other)
    found = fit_group([TimedCollective("barrier", 0, 0, 1e-5)], 2, 10, one_host=True)
    assert found.first == pytest.approx(1e-5)
    assert bandwidth_of(found) == float("inf")


def test_a_call_lasts_from_the_last_arrival_to_the_last_end_and_sizes_hold_the_models_own() -> None:
    first = [("mean", 8, ITEM, [(0.0, 9.0)] * 4 + [(1.0, 5.0), (1.0, 6.0), (1.0, 5.0)])]
    second = [("mean", 8, ITEM, [(0.0, 9.0)] * 4 + [(3.0, 4.0), (3.0, 4.0), (2.0, 7.0)])]
    assert timed_collectives([first, second]) == [TimedCollective("mean", 8, ITEM, 3.0)]
    assert sizes_of(1_000_000, ITEM) == [1024, 8192, 65536, 524288, 1_000_000]
    assert sizes_of(96, ITEM)[0] == 96
    assert sizes_of(96, ITEM)[-1] * ITEM == LEAST_LARGEST
