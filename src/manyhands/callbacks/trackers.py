"""Experiment trackers: send the numbers of a run to TensorBoard, MLflow or Weights & Biases, without delaying it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import queue
import threading
import time
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from manyhands.callbacks.base import Callback
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event

LOG = logging.getLogger("manyhands")
QUEUE = 4096  # rows that may wait for the tracker
OPENING_S = 60.0  # a run waits so long at its start for a tracker's connection
CLOSING_S = 10.0  # a run waits so long at its end for the rest of the rows
STEP_VALUES = ("loss", "rate", "input_s", "compute_s", "exchange_s", "wait_s", "bytes")

Row = tuple[int, dict[str, float]]  # step, numbers by name


class Tracker(Callback):
    """Sends numbers from a daemon thread, best effort: training neither waits for a tracker nor fails with it.

    Rows wait in a bounded queue. If it is full, rows are dropped and counted. A tracker that cannot be opened ends the
    run before its first step, with a ManyhandsError. After that, the first failure is logged as a warning and ends the
    sending. A missing library raises BadInput at construction.

    Steps are complete global batches of the run, with every strategy, and never go back. A validation is sent once,
    after all rows before it; with `keep="best:METRIC"` those that were the best so far are sent under `best_NAME` too.
    """

    _library: str  # the module to import
    _install: str  # what pip installs it by

    def __init__(self) -> None:
        if importlib.util.find_spec(self._library) is None:
            raise BadInput(
                f"{type(self).__name__} needs {self._library}, which is not installed: pip install {self._install}"
            )
        self.dropped = 0
        self._queue: queue.Queue[Row | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._waiting: deque[Row] = deque()  # validations of steps that are not complete on the driver yet
        self._newest: dict[str, float] = {}  # metrics of the newest validation
        self._best: dict[str, float] = {}  # of the one that `keep` kept
        self._step = 0  # the last one that was queued
        self._sent = -1  # up to this step all was, before the run started again from a checkpoint
        self._opened = threading.Event()  # or failed to open: `_problem`
        self._problem: BaseException | None = None
        self._failed = threading.Event()
        self._run_failed = False

    # -- to implement: called on the tracker's thread ----------------------------------------------------------------

    @abstractmethod
    def _open(self, facts: dict[str, Any]) -> None:
        """Connect. facts: the values of the event `start`."""

    @abstractmethod
    def _write(self, step: int, numbers: dict[str, float]) -> None:
        """Send one row."""

    @abstractmethod
    def _finish(self, failed: bool) -> None:
        """Send the rest and disconnect. failed: the run failed."""

    def _hint(self) -> str:
        """A sentence on what may help if it cannot be opened."""
        return ""

    # -- on the driver's thread --------------------------------------------------------------------------------------

    @override
    def on_start(self, event: Event) -> None:
        self._newest, self._best = {}, {}
        self._thread = threading.Thread(
            target=self._work, args=(event.values,), name=f"manyhands-{type(self).__name__}", daemon=True
        )
        self._thread.start()
        opened = self._opened.wait(OPENING_S)
        if opened and self._problem is None:
            return
        self._failed.set()
        self._thread = None
        why = f"{type(self._problem).__name__}: {self._problem}" if opened else f"no connection after {OPENING_S:.0f} s"
        name = type(self).__name__
        raise ManyhandsError(
            " ".join(filter(None, (f"{name} could not start, and nothing was trained: {why}", self._hint())))
            + f"\nFix the cause, or leave {name} out of the callbacks"
        ) from self._problem

    @override
    def on_step(self, event: Event) -> None:
        if event.step <= self._sent:
            return
        self._enqueue(event.step, {name: event.values[name] for name in STEP_VALUES if event.values[name] is not None})
        self._enqueue_validations(event.step)

    @override
    def on_validation(self, event: Event) -> None:
        self._newest = event.values["metrics"]
        if event.step <= self._sent:
            return
        numbers = dict(self._newest)
        if event.values.get("best"):
            self._best = self._newest
            numbers |= {f"best_{name}": value for name, value in self._best.items()}
        self._waiting.append((event.step, numbers))
        self._enqueue_validations(self._step)

    @override
    def on_notice(self, event: Event) -> None:
        if event.type == "change" and event.values["kind"] == "restart":
            self._sent = self._step
            self._waiting.clear()

    @override
    def on_end(self, event: Event) -> None:
        if self._thread is None:
            return
        self._enqueue_validations(math.inf)
        self._run_failed = event.type == "failed"
        sent = {*self._newest.items(), *self._best.items()}
        self._enqueue(event.step, {n: v for n, v in event.values.get("metrics", {}).items() if (n, v) not in sent})
        deadline = time.monotonic() + CLOSING_S
        try:
            self._queue.put(None, timeout=CLOSING_S)
        except queue.Full:
            self._failed.set()  # ends the thread at its next row
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"was still sending {CLOSING_S:.0f} s after the run. Rows that it may not have: about "
                f"{self._queue.qsize()} (the run directory's events.jsonl has all rows)"
            )
        elif self.dropped:
            self._warn(
                f"was slower than the training. Rows that it did not get: {self.dropped} (the run directory's "
                "events.jsonl has all rows)"
            )
        self._thread = None

    def _enqueue(self, step: int, numbers: dict[str, float]) -> None:
        self._step = max(self._step, step)
        if self._thread is None or self._failed.is_set():
            return
        try:
            self._queue.put_nowait((self._step, numbers))
        except queue.Full:
            self.dropped += 1

    def _enqueue_validations(self, complete: float) -> None:
        """Queue the validations of steps up to `complete`."""
        while self._waiting and self._waiting[0][0] <= complete:
            self._enqueue(*self._waiting.popleft())

    # -- on the tracker's thread -------------------------------------------------------------------------------------

    def _work(self, facts: dict[str, Any]) -> None:
        try:
            self._open(facts)
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - another's library may raise anything; on_start raises it
            self._problem = problem
            return
        finally:
            self._opened.set()
        try:
            while (row := self._queue.get()) is not None and not self._failed.is_set():
                self._write(*row)
            self._finish(self._run_failed)
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - as above; the run must go on
            self._failed.set()
            with suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._warn(
                "failed, so it gets no more rows of this run (the run directory's events.jsonl has all rows): "
                f"{type(problem).__name__}: {problem}"
            )

    def _warn(self, what: str) -> None:
        LOG.warning("%s %s", type(self).__name__, what)


class TensorBoard(Tracker):
    """Writes event files for `tensorboard --logdir DIRECTORY`. A failure to write them is a warning."""

    _library, _install = "tensorboard", "tensorboard"

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = str(directory)

    @override
    def _open(self, facts: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._directory)

    @override
    def _write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    @override
    def _finish(self, failed: bool) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run in an MLflow experiment: the task's facts as parameters, all numbers as metrics.

    tracking_uri: `http://…` of a server, for which mlflow-skinny is enough; `sqlite:///FILE` or another database, which
    need SQLAlchemy and Alembic too (`pip install "manyhands[mlflow]"` has all three); MLflow 3.17 refuses folders.
    None is MLflow's own setting (MLFLOW_TRACKING_URI, else `mlflow.db` in the working directory). run_name: None lets
    MLflow invent one.
    """

    _library, _install = "mlflow", '"manyhands[mlflow]"'

    def __init__(
        self, experiment: str = "manyhands", *, tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        super().__init__()
        self._experiment, self._uri, self._run_name = experiment, tracking_uri, run_name

    @override
    def _open(self, facts: dict[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment, run_name=self._run_name).info.run_id
        for name, value in facts.items():
            self._client.log_param(self._run, name, value)

    @override
    def _hint(self) -> str:
        if all(importlib.util.find_spec(name) for name in ("sqlalchemy", "alembic")):
            return ""
        return (
            "A database, such as MLflow's default sqlite:///mlflow.db, needs SQLAlchemy and Alembic: pip install "
            f'{self._install}. An MLflow server (tracking_uri="http://…") needs neither.'
        )

    @override
    def _write(self, step: int, numbers: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run, metrics=[self._metric(name, float(value), now_ms, step) for name, value in numbers.items()]
        )

    @override
    def _finish(self, failed: bool) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """A run in a Weights & Biases project. `options` go to `wandb.init` as they are (name, entity, mode, …)."""

    _library, _install = "wandb", "wandb"

    def __init__(self, project: str = "manyhands", **options: Any) -> None:
        super().__init__()
        self._project, self._options = project, options

    @override
    def _open(self, facts: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=self._project, config=facts, **self._options)

    @override
    def _write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    @override
    def _finish(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
