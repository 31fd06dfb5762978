"""What is compared, and in which order."""

import itertools
from collections import Counter

import pytest
import torch

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput, UnknownName
from manyhands.evidence.compare.trial import TrialSetup
from manyhands.evidence.compare.variants import DEFAULT, Threads, entries_of, orders, refusals, threads_of
from manyhands.strategies import CATALOGUE

CORES = Threads(solo={"solo, 1 thread": 1, "solo, 4 threads": 4}, cores=4)


def names(strategies: list[object], workers: list[int], threads: Threads = CORES) -> list[str]:
    return [entry.variant.name for entry in entries_of(strategies, workers, threads)]  # type: ignore[arg-type]


def test_solo_comes_first_and_the_others_on_each_number_above_one() -> None:
    assert names(["allreduce", "solo", "local-sgd:period=8"], [1, 2, 4]) == [
        "solo, 1 thread",
        "solo, 4 threads",
        "allreduce on 2",
        "allreduce on 4",
        "local-sgd:period=8 on 2",
        "local-sgd:period=8 on 4",
    ]
    assert names(["allreduce"], [1])[2:] == ["allreduce on 1"]
    assert names(["allreduce"], [2, 2])[2:] == ["allreduce on 2"]


def test_a_strategy_that_is_given_twice_is_two_variants() -> None:
    assert names(["gossip", "gossip", " gossip "], [2])[2:] == ["gossip on 2", "gossip on 2 (2)", "gossip on 2 (3)"]


def test_an_object_is_called_by_its_spec_and_keeps_being_itself() -> None:
    one = mh.LocalSGD(period=3)
    entry = entries_of([one], [2], CORES)[-1]
    assert entry.strategy is one
    assert (entry.variant.strategy, entry.variant.name) == ("local-sgd:period=3", "local-sgd:period=3 on 2")


def test_each_strategy_runs_with_each_partition() -> None:
    entries = entries_of(["allreduce", "downpour"], [2], CORES, ["none", "fixed"])[2:]
    assert [(entry.variant.name, entry.variant.partition) for entry in entries] == [
        ("allreduce on 2", "none"),
        ("allreduce on 2, fixed partition", "fixed"),
        ("downpour on 2", "none"),
        ("downpour on 2, fixed partition", "fixed"),
    ]


def test_threads_share_the_cores_unless_they_are_given() -> None:
    threads = [entry.variant.threads for entry in entries_of(["allreduce"], [2, 3, 8], CORES)]
    assert threads == [1, 4, 2, 1, 1]
    given = Threads(solo=CORES.solo, each=3, cores=4)
    assert [entry.variant.threads for entry in entries_of(["allreduce"], [2], given)] == [1, 4, 3]


def test_solo_has_one_variant_where_threads_change_nothing() -> None:
    assert threads_of(Local(), False, 4, None).solo == {"solo, 1 thread": 1, "solo, 4 threads": 4}
    assert threads_of(Local(), False, 1, None).solo == {"solo, 1 thread": 1}
    assert threads_of(Local(), True, 4, None) == Threads(solo={"solo": 4}, cores=4)
    assert threads_of(Sim(), False, 4, None) == Threads(solo={"solo": 1}, each=1)


def test_the_default_has_six_others_that_exist_and_no_two_alike() -> None:
    assert len(set(DEFAULT)) == len(DEFAULT) >= 6
    assert DEFAULT[0] == "solo"
    assert {spec.partition(":")[0] for spec in DEFAULT} <= set(CATALOGUE)


def setting(**fields: object) -> TrialSetup:
    rows = torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)
    task = mh.Task.supervised(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=rows,
        batch_size=4,
    )
    return TrialSetup(task=task, **fields)  # type: ignore[arg-type]


def test_all_that_cannot_be_is_found_before_anything_starts() -> None:
    threads = Threads(solo={"solo": 1}, cores=4)
    entries = entries_of(["hogwild", "allreduce", "quorum:backups=1"], [2, 5], threads)
    refused = refusals(entries, setting(servers=2), Sim())
    assert sorted(refused) == [
        "allreduce on 5",
        "hogwild on 2",
        "hogwild on 5",
        "quorum:backups=1 on 2",
        "quorum:backups=1 on 5",
    ]
    assert "on one machine" in refused["hogwild on 2"]
    assert "without a row" in refused["allreduce on 5"]


def test_what_solo_cannot_is_an_error() -> None:
    with pytest.raises(BadInput, match="timeout_s must be a positive number"):
        refusals(entries_of(["allreduce"], [2], CORES), setting(timeout_s=-1.0), Sim())
    with pytest.raises(UnknownName, match="no strategy 'allredduce'"):
        entries_of(["allredduce"], [2], CORES)


@pytest.mark.parametrize("count", [2, 3, 8, 21])
def test_each_repeat_has_all_in_an_order_of_its_own(count: int) -> None:
    drawn = orders(count, 3, seed=0)
    assert [sorted(order) for order in drawn] == [list(range(count))] * 3
    assert drawn == orders(count, 3, seed=0)
    assert count < 8 or drawn != orders(count, 3, seed=1)


@pytest.mark.parametrize("seed", range(20))
def test_none_is_first_twice_nor_often_after_the_same_one(seed: int) -> None:
    drawn = orders(8, 3, seed)
    assert len({order[0] for order in drawn}) == 3
    pairs = Counter(pair for order in drawn for pair in itertools.pairwise(order))
    assert max(pairs.values()) == 1
