"""What plans are predicted to take, from costs that are given: closed forms, and what fits."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest

from manyhands.comm.shared_memory.mailbox import ring_bytes
from manyhands.parallel.mesh import piece_bytes
from manyhands.parallel.planner.linear_cost import LinearCost
from manyhands.parallel.planner.partition import Partition, partition, sums
from manyhands.parallel.planner.profile import ModelProfile, UnitCost
from manyhands.parallel.planner.search import PLAIN, MachineCosts, Options, plan_of, plans_of
from manyhands.parallel.planner.timing import Cores, step_seconds
from manyhands.parallel.schedules import SCHEDULES, Schedule, actions, bubble

MB = 1e6
RINGS = 2 * ring_bytes(piece_bytes(0))  # of a channel to one neighbour


def test_equal_stages_wait_as_long_as_the_closed_form_says() -> None:
    for schedule, (stages, micros) in itertools.product(SCHEDULES, [(1, 3), (4, 4), (4, 8), (4, 32), (8, 32)]):
        seconds = step_seconds(schedule, [1.0] * stages, [2.0] * stages, micros)
        assert 1 - 3 * micros / seconds == pytest.approx(bubble(stages, micros), abs=1e-12), (schedule, stages, micros)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_the_longest_path_through_its_passes(schedule: Schedule) -> None:
    for seed in range(10):
        longest_path(schedule, random.Random(seed))


def longest_path(schedule: Schedule, draws: random.Random) -> None:
    stages, micro_batches = draws.randint(1, 5), draws.randint(1, 9)
    forward, backward = ([draws.randint(1, 9) for _ in range(stages)] for _ in range(2))
    orders = [actions(schedule, stages, micro_batches, stage) for stage in range(stages)]

    @cache
    def ends(stage: int, number: int) -> float:
        """The stage's n-th pass, once the one before it and what it needs are over."""
        action = orders[stage][number]
        source = action.source(stage, stages)
        before = [] if number == 0 else [ends(stage, number - 1)]
        if source is not None:
            before.append(ends(source, orders[source].index(action)))
        return max(before, default=0.0) + (forward if action.forward else backward)[stage]

    longest = max(ends(stage, 2 * micro_batches - 1) for stage in range(stages))
    assert step_seconds(schedule, forward, backward, micro_batches) == pytest.approx(longest)


def test_stages_share_the_cores() -> None:
    assert step_seconds("1f1b", [1.0] * 4, [2.0] * 4, 32, cores=Cores(count=1)) == pytest.approx(4 * 32 * 3)
    alone = step_seconds("1f1b", [1.0] * 2, [2.0] * 2, 8)
    assert step_seconds("1f1b", [1.0] * 2, [2.0] * 2, 8, cores=Cores(count=2)) == pytest.approx(alone)
    both = step_seconds("1f1b", [1.0] * 2, [2.0] * 2, 8, cores=Cores(count=2), replicas=2)
    assert both == pytest.approx(2 * 2 * 8 * 3 / 2)  # no core ever waits


def test_one_who_computes_alone_is_as_fast_as_it_was_measured() -> None:
    cores = Cores(count=2, together=2, alone=0.5)
    assert cores.rate(2) == 1.0
    assert cores.rate(1) == 2.0
    assert step_seconds("1f1b", [1.0, 1.0], [2.0, 2.0], 1, cores=cores) == pytest.approx(3.0)  # never together


def test_a_value_takes_its_time_from_stage_to_stage() -> None:
    assert step_seconds("1f1b", [1.0, 1.0], [2.0, 2.0], 1, crossing=[0.25]) == pytest.approx(6.5)


def unit(begins: str, seconds: float = 1.0, **costs: float | LinearCost) -> UnitCost:
    own = {
        "state": 0,
        "crossing": LinearCost(),
        "skip": LinearCost(),
        "forward": LinearCost(0.0, seconds),
        "backward": LinearCost(0.0, 2 * seconds),
        "update": 0.0,
        "held": LinearCost(),
        "transient": LinearCost(),
    }
    return UnitCost(begins=begins, **(own | costs))


def model(units: list[UnitCost], nbytes: float = 10 * MB, names: list[tuple[str, ...]] | None = None) -> ModelProfile:
    held = names or [(f"p{i}",) for i in range(len(units))]
    sizes = {name: (int(nbytes), int(nbytes)) for one in held for name in one}
    return ModelProfile(base=0, units=tuple(units), names=tuple(held), sizes=sizes, rows=(1,), distinct=len(units))


MACHINE = MachineCosts(
    workers=4, rows=32, cores=Cores(), base=int(100 * MB), message=LinearCost(), exchange=LinearCost()
)
CHAIN = [5, 3, 2, 4, 6, 2, 3, 5]


def test_cuts_are_those_of_the_partition() -> None:
    profile = model([unit(str(i), seconds) for i, seconds in enumerate(CHAIN)])
    for stages, slowest in ((2, 16), (3, 10), (4, 8)):
        found = plan_of(profile, replace(MACHINE, workers=stages), stages, 4, PLAIN)
        assert max(one.forward for one in found.stages) == slowest * 32 / 4
        assert len(found.stages) == stages


def test_memory_of_a_stage() -> None:
    """Parameters, gradients, the optimizer's state, what the strategy keeps, and what micro-batches in flight hold."""
    units = [unit(str(i), state=int(20 * MB), held=LinearCost(0.0, MB), transient=LinearCost(3 * MB)) for i in range(4)]
    machine = replace(MACHINE, workers=2, vectors=2.0)
    first, last = plan_of(model(units), machine, 2, 8, PLAIN).stages
    own = 2 * (1 + 1 + 2 + 2) * 10  # of two units: with 20 MB of state each
    in_flight = 2  # of the first stage; 1 of the last
    assert first.memory == pytest.approx(100 * MB + own * MB + in_flight * 2 * 4 * MB + 3 * MB + RINGS)
    assert last.memory == pytest.approx(100 * MB + own * MB + 1 * 2 * 4 * MB + 3 * MB + RINGS)


def test_a_tied_parameter_counts_once_where_one_stage_uses_it_twice() -> None:
    units = [unit(str(i), state=int(20 * MB)) for i in range(2)]
    tied = model(units, names=[("a",), ("a",)])
    (alone,) = plan_of(tied, replace(MACHINE, workers=1), 1, 1, PLAIN).stages
    assert alone.memory == pytest.approx(100 * MB + (1 + 1 + 2) * 10 * MB)
    both = plan_of(tied, replace(MACHINE, workers=2), 2, 1, PLAIN).stages
    assert [one.memory for one in both] == pytest.approx([100 * MB + 40 * MB + RINGS] * 2)


def test_recomputation_holds_what_crosses_and_computes_twice() -> None:
    units = [unit(str(i) if i else "", crossing=LinearCost(0.0, MB), held=LinearCost(0.0, 50 * MB)) for i in range(4)]
    machine = replace(MACHINE, workers=2)
    plain, again = (plan_of(model(units), machine, 2, 8, how) for how in (PLAIN, Options("units")))
    assert plain.stages[1].memory - again.stages[1].memory == pytest.approx(2 * 4 * 49 * MB - 4 * 50 * MB)
    assert again.stages[1].backward == pytest.approx(plain.stages[1].backward + plain.stages[1].forward)
    assert again.step_s > plain.step_s


def test_state_on_the_disk_is_there_for_one_parameter() -> None:
    profile = model([unit(str(i), state=int(20 * MB)) for i in range(4)])
    machine = replace(MACHINE, workers=2)
    plain, away = (plan_of(profile, machine, 2, 8, how) for how in (PLAIN, Options(offload="disk")))
    assert plain.memory - away.memory == pytest.approx(2 * 20 * MB - 20 * MB)
    assert away.step_s > plain.step_s


def test_what_does_not_fit_comes_last_and_says_by_how_much() -> None:
    units = [unit(str(i), held=LinearCost(0.0, 4 * MB)) for i in range(8)]
    machine = replace(MACHINE, caps=(260 * MB,) * 4)
    found = plans_of(model(units), machine)
    assert found[0].fits
    assert found[0].spec is not None
    assert found[0].spec.stages == 4
    assert all(one.memory <= 260 * MB for one in found if one.fits)
    over = next(one for one in found if one.spec is None)
    assert over.over == pytest.approx(over.memory - 260 * MB)
    assert not over.fits


def test_cuts_respect_the_cap_of_each_worker() -> None:
    """The second worker has room for one unit alone."""
    profile = model([unit(str(i)) for i in range(4)])
    machine = replace(MACHINE, workers=2, caps=(400 * MB, 150 * MB))
    found = plan_of(profile, machine, 2, 4, PLAIN)
    assert found.fits
    assert found.stages[1].begins == "3"


def test_of_plans_that_are_as_fast_the_one_with_fewer_stages() -> None:
    profile = model([unit(str(i)) for i in range(4)])
    found = plans_of(profile, replace(MACHINE, cores=Cores(count=1)))  # stages win nothing on one core
    assert found[0].spec is None


def test_more_stages_than_places_to_cut() -> None:
    found = plans_of(model([unit(str(i)) for i in range(2)]), MACHINE)
    assert [one.refused != "" for one in found if one.spec is not None and one.spec.stages == 4] == [True]


def test_exchanges_are_as_rare_as_the_strategy_makes_them() -> None:
    profile = model([unit(str(i)) for i in range(2)])
    machine = replace(MACHINE, workers=2, exchange=LinearCost(0.0, 1e-6))
    each = plan_of(profile, machine, 1, 1, PLAIN)
    rarely = plan_of(profile, replace(machine, period=10), 1, 1, PLAIN)
    assert each.terms["exchange"] == pytest.approx(20.0)
    assert each.step_s - rarely.step_s == pytest.approx(18.0)


def test_lines() -> None:
    assert LinearCost.through((2, 4), (3.0, 5.0)) == LinearCost(1.0, 1.0)
    assert LinearCost.through((4,), (2.0,)).at(8) == 4.0
    assert LinearCost.through((2, 4), (5.0, 4.0)).at(100) == 4.0  # noise: nothing falls
    assert LinearCost.through((2, 4), (1.0, 4.0)) == LinearCost(0.0, 1.0)
    assert math.isclose((LinearCost(1, 2) + LinearCost(3, 4)).at(2), 16)


# -- cuts of a chain are those that brute force finds ---------------------------------------------------------------------


def brute_force(costs: list[float], stages: int, memory: list[float], caps: list[float], speeds: list[float]) -> float:
    best = math.inf
    for starts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = [0, *starts, len(costs)]
        spans = list(itertools.pairwise(ends))
        if all(sum(memory[a:b]) <= cap for (a, b), cap in zip(spans, caps, strict=True)):
            best = min(best, max(sum(costs[a:b]) / speed for (a, b), speed in zip(spans, speeds, strict=True)))
    return best


def test_random_chains_with_caps_and_unequal_workers() -> None:
    draws = random.Random(0)
    for _ in range(500):
        units = draws.randint(2, 10)
        stages = draws.randint(1, min(4, units))
        costs, memory = ([draws.randint(1, 20) for _ in range(units)] for _ in range(2))
        caps, speeds = (
            [draws.randint(10, 80) for _ in range(stages)],
            [draws.choice([0.5, 1, 2]) for _ in range(stages)],
        )
        found = partition(units, stages, sums(costs, memory=memory, caps=caps, speeds=speeds))
        assert found.cost == brute_force(costs, stages, memory, caps, speeds)
        if math.isfinite(found.cost):
            ends = [0, *found.starts, units]
            spans = list(itertools.pairwise(ends))
            assert all(a < b for a, b in spans)
            assert all(sum(memory[a:b]) <= cap for (a, b), cap in zip(spans, caps, strict=True))
            assert max(sum(costs[a:b]) / speed for (a, b), speed in zip(spans, speeds, strict=True)) == found.cost


def test_what_does_not_fit() -> None:
    assert partition(3, 2, sums([1, 1, 1], memory=[5, 5, 5], caps=[6, 6])).cost == math.inf
    assert partition(2, 2, sums([1, 2])) == Partition(2, (1,))
    assert partition(2, 3, sums([1, 2])).cost == math.inf
