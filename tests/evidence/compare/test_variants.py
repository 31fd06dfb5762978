"""What is compared, in which order, and what `compare` refuses before any process starts."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.engines.torchrun.engine import Torchrun
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.compare.compare import compare
from manyhands.evidence.compare.trial import TrialSetup
from manyhands.evidence.compare.variants import DEFAULT, Threads, entries_of, orders, refusals, threads_of
from manyhands.strategies import CATALOGUE

CORES = Threads(solo={"solo, 1 thread": 1, "solo, 4 threads": 4}, cores=4)


def task() -> mh.Task:
    rows = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    return mh.Task.supervised(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=rows,
        test_data=rows,
        batch_size=4,
    )


def names(strategies: list[Any], workers: list[int]) -> list[str]:
    return [entry.variant.name for entry in entries_of(strategies, workers, CORES)]


def test_solo_comes_first_and_each_strategy_on_each_number_of_workers() -> None:
    several = ["allreduce on 2", "allreduce on 4", "local-sgd:period=8 on 2", "local-sgd:period=8 on 4"]
    assert names(["allreduce", "solo", "local-sgd:period=8"], [1, 2, 4]) == [*CORES.solo, *several]
    assert names(["allreduce"], [1])[2:] == ["allreduce on 1"]
    assert names(["allreduce"], [2, 2])[2:] == ["allreduce on 2"]
    assert names(["gossip", "gossip", " gossip "], [2])[2:] == ["gossip on 2", "gossip on 2 (2)", "gossip on 2 (3)"]
    one = mh.LocalSGD(period=3)
    entry = entries_of([one], [2], CORES)[-1]
    assert entry.strategy is one
    assert (entry.variant.strategy, entry.variant.name) == ("local-sgd:period=3", "local-sgd:period=3 on 2")
    entries = entries_of(["allreduce", "downpour"], [2], CORES, ["none", "fixed"])[2:]
    assert [(entry.variant.name, entry.variant.partition) for entry in entries] == [
        (f"{name} on 2{suffix}", partition)
        for name in ("allreduce", "downpour")
        for suffix, partition in (("", "none"), (", fixed partition", "fixed"))
    ]
    assert len(set(DEFAULT)) == len(DEFAULT) >= 6
    assert DEFAULT[0] == "solo"
    assert {spec.partition(":")[0] for spec in DEFAULT} <= set(CATALOGUE)


def test_threads_share_the_cores_unless_they_are_given_and_solo_has_one_variant_where_they_change_nothing() -> None:
    assert [entry.variant.threads for entry in entries_of(["allreduce"], [2, 3, 8], CORES)] == [1, 4, 2, 1, 1]
    given = Threads(solo=CORES.solo, each=3, cores=4)
    assert [entry.variant.threads for entry in entries_of(["allreduce"], [2], given)] == [1, 4, 3]
    assert threads_of(Local(), False, 4, None).solo == {"solo, 1 thread": 1, "solo, 4 threads": 4}
    assert threads_of(Local(), False, 1, None).solo == {"solo, 1 thread": 1}
    assert threads_of(Local(), True, 4, None) == Threads(solo={"solo": 4}, cores=4)
    assert threads_of(Sim(), False, 4, None) == Threads(solo={"solo": 1}, each=1)


def test_each_repeat_has_all_in_an_order_of_its_own() -> None:
    for count in (2, 3, 8, 21):
        drawn = orders(count, 3, seed=0)
        assert [sorted(order) for order in drawn] == [list(range(count))] * 3
        assert drawn == orders(count, 3, seed=0)
        assert count < 8 or drawn != orders(count, 3, seed=1)
    for seed in range(20):
        drawn = orders(8, 3, seed)
        assert len({order[0] for order in drawn}) == 3, seed
        pairs = Counter(pair for order in drawn for pair in itertools.pairwise(order))
        assert max(pairs.values()) == 1, seed


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_all_that_cannot_be_is_found_before_anything_starts() -> None:
    entries = entries_of(["hogwild", "allreduce", "quorum:backups=1"], [2, 5], Threads(solo={"solo": 1}, cores=4))
    few = TrialSetup(task=task().with_fields(train_data=(torch.zeros(8, 2), torch.zeros(8))), servers=2)
    refused = refusals(entries, few, Sim())
    quorum = ["quorum:backups=1 on 2", "quorum:backups=1 on 5"]
    assert sorted(refused) == ["allreduce on 5", "hogwild on 2", "hogwild on 5", *quorum]
    assert "on one machine" in refused["hogwild on 2"]
    assert "without a row" in refused["allreduce on 5"]
    with pytest.raises(BadInput, match="timeout_s must be a positive number"):
        refusals(entries_of(["allreduce"], [2], CORES), TrialSetup(task=task(), timeout_s=-1.0), Sim())


def test_compare_refuses_wrong_values_and_unknown_names(nothing_starts: None) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"workers": ()}, BadInput, "workers must be at least one number"),
        ({"workers": (0,)}, BadInput, "workers must be a whole number of at least 1, not 0"),
        ({"workers": 2}, BadInput, "workers must be several numbers"),
        ({"workers": "12"}, BadInput, "workers must be several numbers"),
        ({"repeats": 0}, BadInput, "repeats must be a whole number"),
        ({"validations": 2.5}, BadInput, "validations must be a whole number"),
        ({"time_margin": -0.1}, BadInput, "time_margin must be a share"),
        ({"metric_margin": float("nan")}, BadInput, "metric_margin must be a share"),
        ({"target": "accuracy"}, BadInput, "target must be METRIC=VALUE"),
        ({"target": "validation_loss=1"}, BadInput, "needs validation_data"),
        ({"threads_per_worker": 0}, BadInput, "threads_per_worker must be a whole number"),
        ({"servers": 0}, BadInput, "servers must be a whole number"),
        ({"timeout_s": 0}, BadInput, "timeout_s must be a positive number"),
        ({"strategies": ["solo"], "engine": "sim"}, BadInput, "nothing to compare solo with"),
        ({"strategies": [3]}, BadInput, "strategy must be a Strategy or a string"),
        ({"epochs": 0}, BadInput, "epochs must be a whole number"),
        ({"strategies": ["allredduce"]}, UnknownName, "no strategy 'allredduce'"),
        ({"device": "tpu"}, UnknownName, "no device"),
        ({"epoch": 3}, UnknownName, "a task has no field 'epoch'"),
        ({"engine": Torchrun()}, Unsupported, "outside of manyhands run and torchrun"),
        (
            {"strategies": ["hogwild", "allreduce"], "workers": (2, 5), "engine": "sim"},
            BadInput,
            r"hogwild on 2: .*one machine.* hogwild on 5: .* allreduce on 5: .*without a row",
        ),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            compare(task(), **options)
