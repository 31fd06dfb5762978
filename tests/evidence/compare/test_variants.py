"""What is compared, in which order, by which metric, on which rows; a repeat's trials beside solo's; and what is refused."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from comparable import tiny

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.engines.torchrun.engine import Torchrun
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.compare import metric
from manyhands.evidence.compare.compare import compare
from manyhands.evidence.compare.comparison import Point, Target, Trial
from manyhands.evidence.compare.final_evaluation import CLASSES, FinalPredictions
from manyhands.evidence.compare.probe import sketch
from manyhands.evidence.compare.repeats import (
    TrialPace,
    compared_with_solo,
    cosine,
    distance,
    machine,
    processor,
    validate_every,
)
from manyhands.evidence.compare.trial import FinishedTrial
from manyhands.evidence.compare.variants import DEFAULT, Threads, entries_of, orders, threads_of
from manyhands.strategies import CATALOGUE

CORES = Threads(solo={"solo, 1 thread": 1, "solo, 4 threads": 4}, cores=4)


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


def test_compare_refuses_wrong_values_and_unknown_names(nothing_starts: None) -> None:
    few: dict[str, Any] = {"strategies": ["hogwild", "allreduce"], "workers": (2, 5)}
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
        ({**few, "engine": "sim"}, BadInput, r"hogwild on 2: .*one machine.* hogwild on 5: .* allreduce on 5: .*a row"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            compare(tiny(validation_data=None, batch_size=4), **options)


def test_targets_and_the_metric_whose_name_says_most() -> None:
    for text, name, value, higher in (
        ("test_accuracy=0.97", "test_accuracy", 0.97, True),
        ("test_loss=1.8", "test_loss", 1.8, False),
        ("test_loss<=1.8", "test_loss", 1.8, False),
        (" validation_reward >= -3e2 ", "validation_reward", -300.0, True),
        ("validation_reward≤9", "validation_reward", 9.0, False),
    ):
        assert metric.target_of(text) == Target(metric=name, value=value, higher=higher), text
    wrong = ("", "test_accuracy", "test_accuracy=", "=3", "a=b", "test_accuracy=nan", "a==3", "a<3", "test_loss<=inf")
    for text, message in (
        *((text, "target must be METRIC=VALUE") for text in wrong),
        ("test_reward=0.9", 'write "test_reward>=0.9" or "test_reward<=0.9"'),
        ("train_loss<=0.9", "train_loss is not measured while a trial runs"),
    ):
        with pytest.raises(BadInput, match=message):
            metric.target_of(text)
    for names, expected in (
        (["validation_accuracy", "test_loss", "test_accuracy", "train_loss"], ("test_accuracy", True)),
        (["validation_accuracy", "test_f1", "test_loss"], ("test_loss", False)),
        (["validation_accuracy", "test_reward", "test_f1"], ("test_f1", True)),
        (["validation_loss", "train_accuracy"], ("validation_loss", False)),
        (["train_reward", "train_loss"], ("train_loss", False)),
    ):
        assert metric.metric_of(names, None) == expected, names
    target = metric.target_of("test_reward>=0.9")
    assert metric.metric_of(["test_reward", "test_loss"], target) == ("test_reward", True)
    for names, given, message in (
        (["test_reward", "train_reward"], None, '--target "test_reward>=0.9"'),
        ([], None, "returns no metrics"),
        (["test_loss", "train_loss"], target, "no metric 'test_reward': the task measures test_loss, train_loss"),
    ):
        with pytest.raises(BadInput, match=message):
            metric.metric_of(names, given)


def task_with(validation: bool, test: bool) -> mh.Task:
    return tiny(**({} if validation else {"validation_data": None}), **({} if test else {"test_data": None}))


def test_trials_validate_on_the_rows_of_the_metric() -> None:
    for validation, test, target, expected in (
        (True, True, None, True),
        (True, False, None, False),
        (False, True, None, True),
        (False, False, None, False),
        (True, True, "validation_loss=1", False),
        (True, True, "test_loss=1", True),
    ):
        found = metric.on_test(task_with(validation, test), metric.target_of(target))
        assert found is expected, (validation, test, target)
    metric.check_data(task_with(True, False), metric.target_of("validation_loss=1"))
    with pytest.raises(BadInput, match="needs test_data, and the task has none"):
        metric.check_data(task_with(True, False), metric.target_of("test_loss=1"))
    with pytest.raises(BadInput, match="needs validation_data"):
        metric.check_data(task_with(False, True), metric.target_of("validation_loss=1"))
    one = task_with(True, False)
    assert metric.swapped(one).test_data is one.validation_data
    assert metric.swapped(one).validation_data is None
    renamed = metric.renamed({"validation_loss": 1.0, "test_loss": 2.0, "train_loss": 3.0})
    assert renamed == {"test_loss": 1.0, "validation_loss": 2.0, "train_loss": 3.0}


START = torch.zeros(2)


def test_about_so_many_points_a_trial_and_the_time_left() -> None:
    for fields, ticks, validations, expected in (
        ({}, 100, 20, 5),
        ({"epochs": 3}, 41, 20, 6),
        ({"epochs": 12}, 41, 20, 25),
        ({}, 5, 20, 1),
        ({"epochs": 20}, 41, 20, "epoch"),
        ({"epochs": 39}, 41, 20, "epoch"),
        ({"epochs": 40}, 41, 20, 82),  # at every other epoch's end
        ({"epochs": 40, "max_steps": 100}, 41, 20, 5),
        ({"max_steps": 3}, 41, 20, 1),
        ({"epochs": 3}, None, 20, "epoch"),  # a stream
        ({"epochs": 3}, 41, 1, 123),
    ):
        assert validate_every(tiny(**fields), ticks, validations) == expected, (fields, ticks, validations)
    pace = TrialPace()
    pace.left = ["solo", "gossip on 2"] * 2
    assert pace.line("solo", "repeat 1 of 2") == "trial 1 of 4: solo, repeat 1 of 2"
    pace.done("solo", 10.0)
    assert pace.line("gossip on 2", "repeat 1 of 2") == "trial 2 of 4: gossip on 2, repeat 1 of 2; about 30 s left"
    pace.done("gossip on 2", 40.0)
    assert pace.line("gossip on 2", "repeat 2 of 2") == "trial 3 of 4: gossip on 2, repeat 2 of 2; about 50 s left"
    pace.left = ["gossip on 2"] * 5  # solo's are left out
    assert pace.line("gossip on 2", "repeat 2 of 2").startswith("trial 3 of 7: ")
    assert pace.line("gossip on 2", "repeat 2 of 2").endswith("about 3.33 min left")


def test_the_machine_says_what_it_is(tmp_path: Path) -> None:
    known = machine(Local(), "cpu")
    assert {"host", "cores", "versions", "command", "processor", "engine", "device", "when"} <= set(known)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Chip: 3 GHz\nprocessor\t: 1\n")
    assert processor(tmp_path / "cpuinfo") == "Some Chip: 3 GHz"
    assert processor(tmp_path / "nothing")


def finished(
    name: str, parameters: list[float] | None, *rows: int, output: tuple[int, ...] = (1, 2), failure: str = ""
) -> FinishedTrial:
    weights = torch.tensor(parameters if parameters else [0.0, 0.0])
    curve = tuple(Point(rows=n, seconds=1.0, metrics={}) for n in rows)
    return FinishedTrial(
        trial=Trial(variant=name, repeat=0, seed=0, failure=failure, curve=curve),
        parameters=None if parameters is None else weights,
        predictions=FinalPredictions(CLASSES, torch.tensor(output)),
        sketches={n: sketch([weights]) for n in rows},
    )


def test_distance_and_cosine_by_hand_of_every_trial() -> None:
    own, solo = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert distance(own, torch.zeros(2)) is None
    assert cosine(own, -own, START) == -1.0
    assert cosine(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.0)
    assert cosine(START, solo, START) is None
    repeat = [
        finished("gossip on 2", [3.0, 4.0], 10, 20, output=(1, 5)),
        finished("solo", [3.0, 0.0], 10, 30),
        finished("ensemble on 2", None, output=(1, 2)),
        finished("easgd on 2", [9.0, 9.0], 10, failure="it broke"),
    ]
    own, solo, ensemble, failed = compared_with_solo(repeat, "solo", START)
    assert (own.distance, own.cosine) == pytest.approx((4 / 3, 3 / 5))
    assert (own.agreement, own.agreement_of) == (0.5, CLASSES)
    assert [point.distance for point in own.curve] == [pytest.approx(4 / 3), None]  # solo has no point at 20 rows
    assert (solo.distance, solo.cosine, solo.agreement) == (0.0, 1.0, 1.0)
    assert [point.distance for point in solo.curve] == [0.0, 0.0]
    assert (ensemble.distance, ensemble.cosine, ensemble.agreement) == (None, None, 1.0)
    assert failed == repeat[3].trial
    mute = FinishedTrial(trial=Trial(variant="a on 2", repeat=0, seed=0), parameters=torch.ones(2))
    own, _ = compared_with_solo([mute, finished("solo", [1.0, 1.0])], "solo", START)
    assert (own.agreement, own.agreement_of, own.distance) == (None, "", 0.0)
