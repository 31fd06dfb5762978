"""Whole comparisons on simulated workers: the same every time, and no other work of the machine in them."""

import copy
import os
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from comparable import ROWS, Broken, Diverging, tiny
from torch import nn

import manyhands as mh
from manyhands.callbacks.base import Callback
from manyhands.engines.sim.engine import Sim
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.evidence.compare.compare import compare
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.text import text

SIM = Sim(compute="row=1e-4,jitter=lognormal:0.2", network="latency=1e-5")


class Ears(Callback):
    """Keeps the names of all metrics it hears."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_validation(self, event: Event) -> None:
        self.names |= set(event.values["metrics"])

    def on_end(self, event: Event) -> None:
        self.names |= set(event.values.get("metrics", {}))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """A comparison, what it said, and what a callback heard."""
    lines: list[str] = []
    ears = Ears()
    torch.manual_seed(7)
    module = nn.Linear(4, 2)
    before = [p.clone() for p in module.parameters()]
    strategies = ["allreduce", "downpour", "ensemble", Broken(), Diverging()]
    found = compare(
        tiny(model=module),
        strategies=strategies,
        workers=(1, 2),
        validations=4,
        target="test_accuracy=0.8",
        engine=SIM,
        say=lines.append,
        progress=ears,
    )
    untouched = all(torch.equal(was, now) for was, now in zip(before, module.parameters(), strict=True))
    return {"found": found, "lines": lines, "ears": ears, "untouched": untouched, "module": module}


def test_every_variant_trains_once_a_repeat_on_equal_rows_from_the_same_seed(told: dict[str, Any]) -> None:
    found: Comparison = told["found"]
    names = ["solo", "allreduce on 2", "downpour on 2", "ensemble on 2", "broken on 2", "diverging on 2"]
    assert len({trial.seconds for trial in found.of("allreduce on 2")}) == 3  # each with a simulation seed of its own
    assert [variant.name for variant in found.variants] == names
    for name in names[:4]:
        trials = found.of(name)
        assert [(trial.repeat, trial.seed) for trial in trials] == [(0, 0), (1, 1), (2, 2)]
        assert {(trial.rows, trial.ticks) for trial in trials} == {(ROWS, 20)}
    assert (found.complete, found.reference) == (True, "solo")
    assert (found.repeats, found.metric, found.higher, found.parameters) == (3, "test_accuracy", True, 10)
    assert found.simulated["compute"] == "row=1e-4,jitter=lognormal:0.2"
    orders = [[trial.variant for trial in found.trials if trial.repeat == repeat] for repeat in range(3)]
    assert sorted(orders[0]) == sorted(names)  # alternating, in another order each time
    assert orders[0][:4] != orders[1][:4] != orders[2][:4]
    assert told["untouched"]  # the caller's model


def test_the_test_rows_are_validated_under_their_own_name_and_nobody_hears_of_sketches(told: dict[str, Any]) -> None:
    """In trials the validation rows take the place of the test rows: a plain run knows which are which."""
    trial = told["found"].of("allreduce on 2")[0]
    assert [point.rows for point in trial.curve] == [60, 120, 180, 240]
    assert all(set(point.metrics) == {"test_loss", "test_accuracy"} for point in trial.curve)
    kinds = {f"{kind}_{name}" for kind in ("train", "validation", "test") for name in ("loss", "accuracy")}
    assert set(trial.metrics) == kinds
    assert trial.metrics["test_accuracy"] == trial.curve[-1].metrics["test_accuracy"]
    assert trial.curve[-1].seconds == pytest.approx(trial.seconds)
    solo = told["found"].of("solo")[1]
    run = mh.train(tiny(model=copy.deepcopy(told["module"]), seed=1), engine=SIM, workers=1)
    for name in ("test_loss", "validation_loss"):
        assert solo.metrics[name] == pytest.approx(run.metrics[name], rel=1e-5)
    assert solo.metrics["test_loss"] != pytest.approx(solo.metrics["validation_loss"], rel=1e-4)
    assert told["ears"].names == {"test_loss", "test_accuracy", "validation_loss", "validation_accuracy"}
    assert "sketch" not in told["found"].to_json()


def test_distance_from_solo_along_the_way_and_at_the_end(told: dict[str, Any]) -> None:
    found: Comparison = told["found"]
    for trial in found.of("allreduce on 2"):
        assert 0 < trial.distance < 1e-6
        assert trial.cosine == pytest.approx(1.0)
        assert all(point.distance < 1e-6 for point in trial.curve)
    for trial in found.of("downpour on 2"):
        assert trial.distance > 1e-3
        assert trial.curve[-1].distance == pytest.approx(trial.distance, rel=0.2)  # 10 weights in 512 buckets
        assert sum(trial.staleness.values()) == 40  # pushes: two slices of each of 20 batches
        assert trial.bytes > 0
        assert (trial.rate, trial.effective_rate, trial.batch_size) == (0.1, 0.2, 12)
        assert (len(trial.timing), trial.agreement_of) == (2, "classes")
    assert [trial.distance for trial in found.of("solo")] == [0.0] * 3
    assert all(trial.distance is None and trial.agreement is not None for trial in found.of("ensemble on 2"))


def test_a_failing_variant_is_told_and_not_tried_again(told: dict[str, Any]) -> None:
    found: Comparison = told["found"]
    for name, why in (("broken on 2", "RuntimeError: it broke"), ("diverging on 2", "test_loss|nan|finite")):
        (trial,) = [trial for trial in found.trials if trial.variant == name]
        assert trial.repeat == 0
        assert "\n" not in trial.failure
        assert re.search(why, trial.failure), trial.failure
        assert name not in found.differences
        assert f"{name} failed: " in text(found)
    assert any(line.startswith("broken on 2 failed, and is not tried again: ") for line in told["lines"])
    trials = [line for line in told["lines"] if line.startswith("trial ")]  # each is told before it starts
    assert len(trials) == 6 + 4 + 4
    assert (trials[0][:14], trials[-1][:16]) == ("trial 1 of 18:", "trial 14 of 14: ")
    assert all("repeat " in line for line in trials)
    assert all(line.endswith(" left") for line in trials[1:])


def test_a_function_that_gives_one_model_again_and_again_begins_each_trial_with_it_as_it_was() -> None:
    model = nn.Linear(4, 2)
    task = tiny(model=lambda: model)
    found = compare(task, strategies=["allreduce"], repeats=2, validations=1, engine=SIM, shuffle=False)
    first, second = found.of("solo")
    assert first.metrics == second.metrics


def test_different_ones_are_seen_to_be_different_the_same_every_time() -> None:
    slow = Sim(compute="row=1e-4,jitter=lognormal:0.2", network="latency=1ms")
    strategies = ["allreduce", "local-sgd:period=10"]
    options: dict[str, Any] = {"strategies": strategies, "engine": slow, "validations": 1, "max_steps": 10}
    found, again = (compare(tiny(), **options) for _ in range(2))
    outcomes = [found.difference(f"{one} on 2", "rows_per_s").outcome for one in strategies]
    assert outcomes == ["worse", "better"]
    assert found.verdict.startswith("On the simulated cluster: take local-sgd:period=10 on 2: ")
    first, second = ([(t.variant, t.seconds, t.metrics) for t in one.trials] for one in (found, again))
    assert first == second


# -- ends before the end ---------------------------------------------------------------------------------------------


class Interrupting:
    """Says nothing, and is interrupted at the trial number `at`, by Ctrl-C or by SIGTERM."""

    def __init__(self, at: int, by: int = signal.SIGINT) -> None:
        self.at, self.by = at, by
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith(f"trial {self.at} "):
            os.kill(os.getpid(), self.by)


def test_an_interrupted_comparison_has_its_whole_repeats() -> None:
    for by, why in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "asked to end (SIGTERM)")):
        say = Interrupting(at=6, by=by)
        found = compare(tiny(), strategies=["allreduce"], engine=SIM, validations=1, repeats=4, say=say)
        assert (found.complete, found.repeats) == (False, 2)
        assert [trial.repeat for trial in found.trials] == [0, 0, 1, 1]
        assert say.lines[-1] == f"{why}: 2 of 4 repeats are complete"
        assert found.verdict.startswith("On the simulated cluster: not decided: 2 repeats cannot")
    with pytest.raises(KeyboardInterrupt):  # before a whole repeat
        compare(tiny(), strategies=["allreduce"], engine=SIM, validations=1, say=Interrupting(at=2))
    with pytest.raises(mh.Preempted, match="before the first repeat was complete"):
        compare(tiny(), strategies=["allreduce"], engine=SIM, validations=1, say=Interrupting(at=2, by=signal.SIGTERM))


def failing_after(calls: int) -> mh.Task:
    left = iter(range(calls))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training and next(left, None) is None:
            raise RuntimeError("no more of it")
        return model(batch[0]).square().mean()

    return tiny(loss=loss, evaluate=None)


def test_what_cannot_be_ends_in_the_warm_up_or_after_it_and_where_solo_fails_there_is_nothing_to_compare_with() -> None:
    missing = "no metric 'test_f1': the task measures test_loss, test_accuracy"
    for task, target, error, words, after in (
        (failing_after(0), None, WorkerFailed, "no more of it", ["warming up"]),
        (tiny(), "test_f1=0.9", mh.BadInput, missing, ["warming up"]),
        (failing_after(15), None, ManyhandsError, "solo, .* failed in repeat 1: .*no more of it", None),
    ):
        lines: list[str] = []
        options: dict[str, Any] = {"engine": SIM, "target": target, "validations": 1, "repeats": 9}
        with pytest.raises(error, match=words):
            compare(task, strategies=["allreduce"], say=lines.append, **options)
        assert after is None or lines == after


# -- other tasks -----------------------------------------------------------------------------------------------------


def test_without_rows_to_validate_on_training_rows_judge_and_a_batch_per_worker_makes_fewer_steps() -> None:
    found = compare(tiny(validation_data=None, test_data=None), strategies=["allreduce"], engine=SIM, repeats=1)
    assert (found.metric, found.higher) == ("train_accuracy", True)
    trial = found.of("allreduce on 2")[0]
    assert (trial.curve, trial.agreement, set(trial.metrics)) == ((), 1.0, {"train_loss", "train_accuracy"})
    task = tiny(batch_size=None, batch_size_per_worker=12)
    found = compare(task, strategies=["allreduce"], engine=SIM, repeats=1, validations=5)
    own, solo = found.of("allreduce on 2")[0], found.of("solo")[0]
    assert (own.rows, solo.rows, own.ticks, solo.ticks) == (ROWS, ROWS, 10, 20)
    assert [point.rows for point in own.curve] == [point.rows for point in solo.curve] == [48, 96, 144, 192, 240]


def test_the_default_leaves_out_what_this_engine_cannot() -> None:
    lines: list[str] = []
    found = compare(tiny(), engine=SIM, repeats=1, validations=1, max_steps=4, say=lines.append)
    assert lines[0].startswith("left out: hogwild on 2: ")
    assert len(found.variants) == 6
    assert not any(found.failure(variant.name) for variant in found.variants)


def test_the_parts_of_a_history_are_the_time_that_a_run_took() -> None:
    """In virtual time nothing else takes any; at the ends of epochs servers are entered and left, which no part has."""
    engine = Sim(compute="row=1e-3,jitter=lognormal:0.5", network="latency=1e-5,workers_per_host=all")
    task = tiny(test_data=None, validation_data=None)
    for strategy in ("solo", "local-sgd:period=3", "downpour", "hogwild"):
        run = mh.train(task, strategy=strategy, engine=engine, workers=1 if strategy == "solo" else 2)
        assert sum(run.timing.values()) == pytest.approx(run.seconds, rel=0.02), strategy
        each = [sum(one.values()) for one in run.timing_of_workers]
        assert sum(run.timing.values()) == pytest.approx(sum(each) / len(each)), strategy


def test_what_trials_read_of_files_is_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    x, y = tiny().train_data
    pq.write_table(pa.table({"x": x.tolist(), "y": y.tolist()}), tmp_path / "a.parquet", row_group_size=40)
    rows = mh.shards(tmp_path / "a.parquet", decode=lambda row: (torch.tensor(row["x"]).float(), int(row["y"])))
    made = compare(tiny(train_data=rows, max_steps=6), strategies=["allreduce"], workers=(2,), repeats=1, engine=SIM)
    stored = (tmp_path / "a.parquet").stat().st_size
    for trial in made.trials:
        assert 0 < trial.bytes_read < 4 * stored
        assert trial.input["misses"] == 0  # there is no cache
    assert Comparison.from_json(made.to_json()) == made
    assert " read " in text(made)
