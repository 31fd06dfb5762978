"""Trackers never hold a run up: not when they are slow, not when they fail. Their libraries are faked at the boundary, but TensorBoard's."""

import logging
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from manyhands.callbacks import MLflow, TensorBoard, WandB, trackers
from manyhands.callbacks.trackers import Tracker
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from manyhands.recording.recorder import Recorder

START = Event(type="start", values={"total_steps": 2, "batch_size": 8})
END = Event(type="end", step=2, values={"metrics": {"test_loss": 0.125}, "seconds": 1.0})
ROW = dict.fromkeys(("input_s", "exchange_s", "wait_s"), 0.0)
ROW |= {"loss": 0.5, "rate": 0.1, "compute_s": 0.1, "bytes": 8, "rows": 8}


def step(number: int, **values: Any) -> Event:
    return Event(type="step", step=number, values=ROW | values)


def validation(number: int, value: float, **values: Any) -> Event:
    return Event(type="validation", step=number, values={"metrics": {"validation_loss": value}, **values})


def hear(tracker: Tracker, *events: Event) -> None:
    """A run of these events; its start and its end come by themselves."""
    methods = {"step": tracker.on_step, "validation": tracker.on_validation, "change": tracker.on_notice}
    tracker.on_start(START)
    for event in events:
        methods.get(event.type, tracker.on_end)(event)
    if events[-1].type in methods:
        tracker.on_end(END)


def whole_run(tracker: Tracker, end: Event = END) -> None:
    hear(tracker, step(1), step(2, loss=None), validation(2, 0.25), end)


class Recording(Tracker):
    """Keeps what it gets; waits or fails where it is told to."""

    _library, _install = "json", "json"
    gate: threading.Event | None = None
    fails: BaseException | None = None
    cannot_open: BaseException | None = None

    def __init__(self, **told: Any) -> None:
        super().__init__()
        vars(self).update(told)
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.end = ""

    def _open(self, facts: dict[str, Any]) -> None:
        if self.cannot_open is not None:
            raise self.cannot_open

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.fails is not None:
            raise self.fails
        self.rows.append((step, numbers))

    def _finish(self, failed: bool) -> None:
        self.end = "failed" if failed else "done"


def test_steps_validations_and_the_result_arrive_in_order() -> None:
    tracker = Recording()
    whole_run(tracker)
    assert [number for number, _ in tracker.rows] == [1, 2, 2, 2]
    assert tracker.rows[0][1]["loss"] == 0.5
    assert "loss" not in tracker.rows[1][1]
    assert [row for _, row in tracker.rows[2:]] == [{"validation_loss": 0.25}, {"test_loss": 0.125}]
    assert tracker.end == "done"
    whole_run(tracker, Event(type="failed", values={"error": "WorkerFailed", "message": "m"}))
    assert tracker.end == "failed"
    Recording().on_end(END)  # of a run that never began


class NeverBack(Recording):
    """Refuses a step below the last, as W&B does."""

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        if self.rows and step < self.rows[-1][0]:
            raise ValueError(f"step {step} after {self.rows[-1][0]}")
        super()._write(step, numbers)


def slice_of(rank: int, own_step: int, batch: int, part: int, **values: Any) -> Event:
    """A worker's `step`, which counts its own optimizer steps."""
    facts = {"epoch": 0, "weight": 4.0, "unused": 0, "round": True, "lease": [batch, part, 0], "parts": 2}
    return Event(type="step", rank=rank, tick=batch, step=own_step, values=ROW | facts | values)


def test_a_tracker_that_never_goes_back_takes_all_of_an_asynchronous_run() -> None:
    """Worker 1 is fast and takes from the back; a validation is heard before the last slices of its step are."""
    tracker = NeverBack()
    with Recorder(workers=2, callbacks=[tracker]) as recorder:
        recorder.event(Event(type="start", rank=0, values={"total_steps": 4}))
        for event in (slice_of(1, 1, 0, 1), slice_of(1, 2, 1, 1), slice_of(0, 1, 0, 0, loss=1.0)):
            recorder.event(event)
        for event in (slice_of(1, 3, 2, 1), slice_of(1, 4, 2, 0, loss=0.75)):
            recorder.event(event)
        recorder.answer(replace(validation(3, 0.25, best=True), rank=0, tick=2))
        recorder.event(slice_of(0, 2, 1, 0, loss=0.25))
        recorder.event(slice_of(1, 5, 3, 1))
        recorder.event(slice_of(0, 3, 3, 0))
        tracker.on_end(END)
    assert [number for number, _ in tracker.rows] == [1, 2, 3, 3, 4, 4]
    assert [row.get("validation_loss", row.get("loss")) for _, row in tracker.rows[:4]] == [0.75, 0.625, 0.375, 0.25]


def test_a_validation_whose_step_never_comes_is_sent_at_the_end() -> None:
    tracker = NeverBack()
    hear(tracker, step(1), validation(5, 0.25), replace(END, step=1))
    assert [number for number, _ in tracker.rows] == [1, 5, 5]


def test_each_validation_is_sent_once_and_the_best_under_names_of_its_own() -> None:
    """The run's metrics are those of the best, which was sent already, and not those of its last step."""
    tracker = Recording()
    end = Event(type="end", step=3, values={"metrics": {"validation_loss": 0.25, "test_loss": 0.125}})
    validations = [validation(number, value, best=value < 0.75) for number, value in ((1, 0.5), (2, 0.25), (3, 0.75))]
    hear(tracker, *(event for one in validations for event in (step(one.step), one)), end)
    assert [(number, row) for number, row in tracker.rows if "loss" not in row] == [
        (1, {"validation_loss": 0.5, "best_validation_loss": 0.5}),
        (2, {"validation_loss": 0.25, "best_validation_loss": 0.25}),
        (3, {"validation_loss": 0.75}),
        (3, {"test_loss": 0.125}),
    ]


def test_what_a_restarted_run_makes_again_is_sent_once() -> None:
    tracker = Recording()
    restart = Event(type="change", step=1, values={"kind": "restart", "message": "again"})
    again = step(2), validation(2, 0.25), step(3)
    end = Event(type="end", step=4, values={"metrics": {}})
    hear(tracker, step(1), *again, restart, *again, step(4), validation(4, 0.125), end)
    rows = [(number, row.get("validation_loss")) for number, row in tracker.rows[:-1]]
    assert rows == [(1, None), (2, None), (2, 0.25), (3, None), (4, None), (4, 0.125)]


def test_a_slow_tracker_drops_rows_and_counts_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "QUEUE", 3)
    gate = threading.Event()
    tracker = Recording(gate=gate)
    tracker.on_start(START)
    for number in range(100):
        tracker.on_step(step(number))
    gate.set()
    with caplog.at_level(logging.WARNING):
        tracker.on_end(END)
    assert tracker.dropped >= 96
    assert tracker.dropped + len(tracker.rows) == 101
    assert f"Rows that it did not get: {tracker.dropped}" in caplog.text


def test_a_tracker_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers, "CLOSING_S", 0.05)
    gate = threading.Event()
    with caplog.at_level(logging.WARNING):
        whole_run(Recording(gate=gate))
    gate.set()
    assert "Recording was still sending" in caplog.text


PROBLEMS = [ConnectionError("no route"), SystemExit("no route")]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_failure_is_one_warning_and_the_run_goes_on(problem: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        whole_run(Recording(fails=problem))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("Recording failed")
    assert "events.jsonl has all rows" in message
    assert message.endswith(f"{type(problem).__name__}: no route")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_tracker_that_cannot_be_opened_ends_the_run_before_its_first_step(problem: BaseException) -> None:
    """The others, which were opened, hear of a failed run."""
    opened, broken = Recording(), Recording(cannot_open=problem)
    recorder = Recorder(workers=1, callbacks=[opened, broken])
    with pytest.raises(ManyhandsError, match="Recording could not start.*no route") as caught, recorder:
        recorder.answer(Event(type="start", rank=0))
    assert caught.value.__cause__ is problem
    assert (opened.end, broken.end) == ("failed", "")


def test_a_tracker_that_is_never_opened_ends_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "OPENING_S", 0.05)
    gate = threading.Event()

    class Waiting(Recording):
        def _open(self, facts: dict[str, Any]) -> None:
            assert gate.wait(30)

    tracker = Waiting()
    with pytest.raises(ManyhandsError, match="no connection after"):
        tracker.on_start(START)
    gate.set()
    tracker.on_end(END)
    assert tracker.rows == []


def test_a_missing_library_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for make, package in ((MLflow, r'"manyhands\[mlflow\]"'), (WandB, "wandb"), (TensorBoard, "tensorboard")):
        with pytest.raises(BadInput, match=f"pip install {package}"):
            make("name")  # type: ignore[operator]


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=ModuleSpec(name, None), **attributes))


def test_mlflow_gets_facts_as_parameters_and_numbers_as_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    client = MagicMock()
    client.get_experiment_by_name.return_value.experiment_id = "7"
    client.create_run.return_value.info.run_id = "r"
    entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
    fake_module(monkeypatch, "mlflow", MlflowClient=lambda tracking_uri: client, entities=entities)
    whole_run(MLflow("mine", run_name="one"))
    client.create_run.assert_called_once_with("7", run_name="one")
    assert client.log_param.mock_calls == [call("r", "total_steps", 2), call("r", "batch_size", 8)]
    sent = [made.kwargs["metrics"] for made in client.log_batch.mock_calls]
    assert ("loss", 0.5, 1) in sent[0]
    assert sent[-1] == [("test_loss", 0.125, 2)]
    client.set_terminated.assert_called_once_with("r", status="FINISHED")


def test_mlflow_without_a_databases_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow-skinny keeps runs in sqlite by default, and brings no library for it."""

    def refused(tracking_uri: str | None) -> None:
        raise ValueError(f"unsupported {tracking_uri}")

    fake_module(monkeypatch, "mlflow", MlflowClient=refused, entities=SimpleNamespace(Metric=None))
    tracker = MLflow(tracking_uri="sqlite:///m.db")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ManyhandsError, match=r"unsupported sqlite(.|\n)*pip install .manyhands\[mlflow\]"):
        tracker.on_start(START)


@pytest.mark.filterwarnings("ignore")  # of mlflow and what it uses
def test_the_real_mlflow_keeps_a_run_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database without sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    whole_run(MLflow("mine"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (tmp_path / "mlflow.db").exists()
    assert (run.info.status, run.data.params) == ("FINISHED", {"total_steps": "2", "batch_size": "8"})
    assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")] == [(1, 0.5)]
    assert run.data.metrics["test_loss"] == 0.125


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow_that_refuses_a_folder_ends_the_run_at_its_start(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", minversion="3.17", reason="older mlflow takes folders")
    assert mlflow.__version__
    with pytest.raises(ManyhandsError, match="sqlite"):
        MLflow(tracking_uri=str(tmp_path / "runs")).on_start(START)


def test_wandb_gets_numbers_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, init = MagicMock(), MagicMock()
    init.return_value = run
    fake_module(monkeypatch, "wandb", init=init)
    whole_run(WandB("mine", mode="offline"))
    init.assert_called_once_with(project="mine", config=START.values, mode="offline")
    assert run.log.mock_calls[-1] == call({"test_loss": 0.125}, step=2)
    run.finish.assert_called_once_with(exit_code=0)


@pytest.mark.filterwarnings("default")  # of tensorboard's own imports
def test_tensorboard_writes_files_that_its_reader_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole_run(TensorBoard(tmp_path))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss")] == [(1, 0.5)]
    assert read.Scalars("test_loss")[0].value == 0.125
