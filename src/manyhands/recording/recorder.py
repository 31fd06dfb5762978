"""The driver's observer during `train()`: records every event, combines workers' numbers, calls callbacks."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from manyhands.callbacks.base import Callback
from manyhands.checkpoint.assembly import CheckpointAssembly
from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.part_writer import WrittenPart
from manyhands.checkpoint.parts import Attempt
from manyhands.checkpoint.paths import AnyPath
from manyhands.engines.base import Observer
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.event_log import EventLog
from manyhands.recording.goodput import Goodput
from manyhands.recording.history import History
from manyhands.recording.run import Run
from manyhands.transport.frame import FrameError

LOG = logging.getLogger("manyhands")
CallbackState = tuple[str, dict[str, Any]]  # the class of a callback, and its state_dict


class Recorder(Observer):
    """Records one launch; a context manager around it, so that what was recorded is on the disk when it is left.

    Nothing is written and no callback is called before the first event: a run that never began leaves an empty
    directory, and of torchrun's many processes only the one that gets the events records (`records`).

    workers: how many report each tick. directory: where events.jsonl goes, or None. clock: steady seconds.
    simulated: the workers' clocks are one clock of its own, which this recorder goes by.
    rank: of the process this one records in, where every rank is its own driver (None: one driver for all). Each writes
    a file of its own as events happen; rank 0 gets those of the others later, for history and callbacks.
    checkpoints: their folder, where the parts that workers write beside training become checkpoints.
    claim: the launch that writes in the directory; may be set until the first event.
    restarts: whether `start_again` may be called.
    """

    def __init__(
        self,
        *,
        workers: int,
        directory: AnyPath | None = None,
        checkpoints: AnyPath | None = None,
        callbacks: Iterable[Callback] = (),
        clock: Callable[[], float] = time.monotonic,
        simulated: bool = False,
        rank: int | None = None,
        restarts: bool = False,
    ) -> None:
        self.claim: Claim | None = None
        self._rank = rank
        self._tick = 0  # of this rank, where it is its own driver and not the first
        self.records = False
        self.warnings: list[str] = []
        self._plan: dict[str, Any] = {}  # how the run compares with its plan
        self._kinds: set[str] = set()  # of warnings that one worker gives for all
        self._history = History(workers)
        self._faults: Counter[str] = Counter()  # that happened, as `faults=` names them
        self._losses: list[dict[str, Any]] = []  # of workers that the run survived
        self._left_out: dict[int, float] = {}  # worker id -> the norm of what it has yet to send, where it compresses
        self._started, self._generation, self._repeated = False, 0, 0
        self._partial, self._partial_before = 0, 0  # rows that some shards have, and others do not; of earlier launches
        self._generations_before = 0  # of launches after which generations are counted from 0 again
        self._restarts: list[dict[str, Any]] = []
        self._after_start: list[Event] = []  # of a driver before this one, for callbacks once they have begun
        self._pending: list[Event] = []  # of restarts, until there is a log
        self._in_vain: int | None = None  # rows that the launch before a restart had consumed
        self._known_warnings = 0  # that an earlier launch has written down
        self._first_states: list[CallbackState] = []  # of the callbacks, when the run began
        self._workers, self._restartable = workers, restarts
        self._goodput: Goodput | None = None  # since the first worker began to train
        self._told: dict[tuple[str, int, int], dict[str, Any]] = {}  # what was answered at an epoch's end or validation
        self._directory = directory
        self._callbacks = tuple(callbacks)
        self._clock = clock
        self._simulated_s = (
            0.0 if simulated else None
        )  # the newest time that a worker reported, where time is simulated
        self._began_s = clock()
        self._before_s = 0.0  # of earlier launches
        self._saved_states: list[CallbackState] = []  # of the checkpoint from which the run is resumed
        self._offsets: dict[int, float] = {}  # rank -> the driver's clock less the worker's
        self._reason, self._reason_said, self._ended = "", False, False
        self._log: EventLog | None = None
        self._assembly: CheckpointAssembly | None = None
        self._seconds: dict[str, float] = {}  # that the newest checkpoint took, and that workers stood still for it
        if checkpoints is not None:
            self._assembly = CheckpointAssembly(checkpoints, self.flush, self.warn, self._checkpoint_written)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise BadInput(
                    f"callbacks must be objects of classes derived from manyhands.Callback, not {callback!r}"
                )
        if rank:
            self._callbacks = ()

    # -- what train() calls ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._began_s = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self.records and not self._ended:
                self._over("failed", error=type(error).__name__, message=str(error))
        except Exception as problem:  # noqa: BLE001 - a callback's own failure must not take the place of what ended the run
            LOG.warning(
                "a callback raised while the failure of the run was reported: %s: %s", type(problem).__name__, problem
            )
        finally:
            if self._assembly is not None:
                self._assembly.close()
            if self._log is not None:
                self._log.close()
                self._log = None

    def preload(
        self,
        tick: int,
        left: event_log.Left | None = None,
        rows: int | None = None,
        callbacks: list[CallbackState] | None = None,
    ) -> None:
        """Take over the history of the launches before, up to the checkpoint at `tick` from which this one goes on.

        left: (epoch, by part [front, back)) of a leased epoch that was interrupted, the slices of earlier ticks still
            to do.
        rows: that the checkpoint counts as consumed; where the events have others, or are damaged, a warning says so.
        callbacks: the states that it holds, which the callbacks get back when the run starts.
        """
        self._saved_states = callbacks or []
        self._tick = tick
        if self._assembly is not None:
            self._assembly.parts.newest = tick
        if self._directory is None or self._rank:
            return
        files = event_log.files_in(self._directory)
        self._history.preload(event_log.steps_that_count(files, tick, left, self.warn))
        if not self._restarts:  # else time goes on
            self._before_s = self._history.seconds
        complete = bool(files) and rows in (None, self._history.consumed)
        if not complete:
            self._history.steps = max(self._history.steps, tick)  # no callback's step goes back
        if not complete and rows is not None:
            self.warn(
                f"events are missing in {self._directory}: they have {self._history.consumed:,} rows of data before "
                f"step {tick}, and the checkpoint has {rows:,}. Training is not affected; history, timing and "
                "staleness of earlier steps are incomplete"
            )

    def start_again(self, values: dict[str, Any], step: int, generation: int) -> None:
        """Another launch of the run follows one that failed; it is recorded as one that resumes. `preload` comes next,
        where there is a checkpoint. Time goes on, and callbacks see one run: they get back what they remembered then.

        values, step: of the event `change` that says so. generation: the next launch's first; `claim` is to be set
        anew.
        """
        now_s = self._now_s()
        self.restarted(values, step)
        if self._log is not None:
            self._log.close()
        self._log, self.claim, self.records = None, None, False
        if self._simulated_s is not None:
            self._before_s, self._simulated_s = now_s, 0.0
        if self._started:
            self._generations_before += max(0, self._generation + 1 - generation)
        self._generation, self._known_warnings = generation, len(self.warnings)
        self._offsets.clear()
        self._told.clear()
        self._in_vain = self._history.consumed if self._in_vain is None else self._in_vain
        self._history = History(self._workers)
        self._saved_states = [*self._first_states]
        if self._goodput is not None:
            self._goodput.stopped(now_s)

    def restarted(self, values: dict[str, Any], step: int) -> None:
        """Record that the run starts again from this step."""
        event = Event(type="change", time_s=self._now_s(), step=step, values={"kind": "restart", **values})
        if not self.records:
            self._pending.append(event)
        self._take(event, begins=False)

    def take_over(self, directory: AnyPath) -> None:
        """What happened to the run under drivers that were killed: faults, losses, restarts, memberships."""
        memberships, launch = set(), 0
        events = [event_log.read(file, lambda message: None) for file in event_log.files_in(directory)[:1]]
        for event in itertools.chain(*events):
            if event.type == "start":
                launch = event.values.get("launch", launch + 1)
            if event.type in ("start", "membership"):
                memberships.add((launch, event.generation))
            elif event.type == "fault":
                self._faults[event.values["fault"]] += 1
            elif event.type == "change":
                self._note_change(event)
        self._generations_before = len(memberships)

    def warn(self, message: str) -> None:
        """Something the user should see that is no error: logged, written down, shown in the summary."""
        self._take(self._event("warning", message=message), begins=False)

    def stop(self, reason: str) -> None:
        """Ask all workers to stop at the same step. Signal handlers may call it. The first reason stays."""
        self._reason = self._reason or reason

    def complete(self, run: Run) -> None:
        """The run is done: add what only the driver has (staleness, warnings, each worker's split of time)."""
        for row in self._history.close():
            self._tell_step(row)
        if not self.records:
            return
        if run.info.get("stopped") and not self._reason_said:
            self.stop(run.info["stopped"])
            self._say_reason()
        run.timing_of_workers = self._history.timing_of_workers()
        run.staleness = self._history.staleness()
        run.staleness_of_workers = self._history.staleness_of_workers()
        run.info["warnings"] = list(self.warnings)
        run.losses, run.generations = self._losses, 1 + self._generations_before + self._generation
        run.restarts, run.plan = self._restarts, self._plan
        driven = all(one["cause"] != "driver" for one in self._restarts)  # else nobody knows since when
        if self._goodput is not None and run.generations > 1 and driven:
            run.goodput = self._goodput.result(self._now_s())
        if run.generations > 1:  # the workers of the last generation may be others than those who trained
            run.rows |= {
                "workers": self._history.rows_of_workers(),
                "repeated": self._repeated,
                "partial": self._partial,
            }
        if self._faults:
            run.info["faults"] = dict(self._faults)
        if (gain := self._history.gain()) is not None:
            run.info["gain"] = gain

    def end(self, run: Run) -> None:
        """Tell the callbacks that the run is done, after `complete`. What they raise is raised."""
        if self.records:
            self._over("end", metrics=run.metrics, seconds=run.seconds, **_histograms(run))

    def flush(self) -> None:
        """Write all events so far to the run directory."""
        if self._log is not None:
            self._log.sync()

    @property
    def asked_to_stop(self) -> bool:
        return bool(self._reason)

    @property
    def generation(self) -> int:
        """The newest."""
        return self._generation

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """As of `Run.restarts`."""
        return self._restarts

    @property
    def faults(self) -> tuple[str, ...]:
        """Those that have happened, as `faults=` names them."""
        return tuple(self._faults)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each tick; of long runs, for several (docs/events.md)."""
        return self._history.rows

    @property
    def highest_rate(self) -> float | None:
        """Of all ticks; None before the first."""
        return self._history.highest_rate

    def timing(self) -> dict[str, float]:
        """{input, compute, exchange, wait}: seconds, the mean over workers."""
        return self._history.timing()

    # -- what the engine calls ---------------------------------------------------------------------------------------

    @override
    def event(self, event: Event) -> None:
        """FrameError for a worker's event that lacks what its type has, or has it wrong."""
        _check(event)
        if event.type == "stop":  # a worker's: the driver's own, which ends all, follows
            self.stop(event.values["reason"])
        else:
            if event.type in ("fault", "change") and event.rank is None and self._simulated_s is None:
                event = replace(event, time_s=self._now_s())  # the driver's own, which has just happened
            if event.type == "fault":
                self._faults[event.values["fault"]] += 1
            begins = event.type not in ("fault", "change")  # one may come while workers start
            self._take(self._on_own_clock(event), begins=begins)
            if self._assembly is not None:
                self._assemble(event, self._assembly)

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        """As `event`."""
        _check(event)
        if event.type == "sync":  # a checkpoint follows
            first = event.values.get("first", event.rank == 0)
            if "settle" in event.values and self._assembly is not None:
                return {"whole": self._assembly.settle(event.values["settle"])}
            if "members" in event.values and self._assembly is not None:
                return {"token": self._begin_checkpoint(event, self._assembly), "callbacks": self._callback_states()}
            if first or event.rank == self._rank:
                self.flush()
            return {"callbacks": self._callback_states()} if first else {}
        asked = (event.type, event.tick, event.values.get("epoch", 0))
        if event.generation and asked in self._told:
            return self._told[asked]  # by another worker, which was lost before all had the answer
        self._take(self._on_own_clock(event))
        answer = {"stop": self._reason} if self._reason else {}
        if event.type in ("epoch", "validation"):
            self._told = {asked: answer}
        return answer

    @override
    def own_event(self, event: Event) -> None:
        if self._directory is not None:
            self._tick = event.tick
            self._take(self._on_own_clock(event))

    @override
    def stopping(self) -> str:
        if self._log is not None:
            self._log.poll(self._clock())
        self._say_reason()
        return self._reason

    # -- checkpoints that are written beside training -----------------------------------------------------------------

    def _begin_checkpoint(self, event: Event, assembly: CheckpointAssembly) -> str:
        assembly.claim, self._seconds = self.claim, {}
        return assembly.begin(event.tick, event.generation, tuple(event.values["members"]))

    def _assemble(self, event: Event, assembly: CheckpointAssembly) -> None:
        if event.type == "part" and event.rank is not None:
            for name in ("seconds", "stall_s"):
                self._seconds[name] = max(event.values[name], self._seconds.get(name, 0.0))
            assembly.part(event.rank, event.tick, event.generation, WrittenPart.of(event.values))
        elif event.type == "change" and event.values["kind"] == "lost" and event.values.get("worker_id") is not None:
            assembly.lost(event.values["worker_id"])

    def _checkpoint_written(self, attempt: Attempt, path: AnyPath) -> None:
        where = {"generation": attempt.generation, "tick": attempt.tick, "step": attempt.tick}
        values = {"path": str(path), **self._seconds}
        self._take(Event(type="checkpoint", time_s=self._now_s(), **where, values=values))

    # -- one event ---------------------------------------------------------------------------------------------------

    def _take(self, event: Event, begins: bool = True) -> None:
        """Write an event and pass it to the callbacks that it concerns; warnings before the first event wait for it to be written."""
        if event.type == "warning" and (kind := event.values.get("kind")) is not None:
            if kind in self._kinds:
                return  # it is given once a run, in the words of the first worker that gave it
            self._kinds.add(kind)
        if event.type == "start" and self.claim is not None:
            event = replace(event, values=event.values | {"launch": self.claim.number})
        if event.type == "warning" and event.values["message"] not in self.warnings and not self._rank:
            self.warnings.append(event.values["message"])
            LOG.warning("%s", event.values["message"])
        if event.type == "step" and event.rank is not None and "left_out" in event.values:
            self._left_out[event.rank] = event.values["left_out"]
        if event.type == "change" and event.values["kind"] == "lost" and event.values["worker_id"] in self._left_out:
            norm = self._left_out.pop(event.values["worker_id"])
            message = event.values["message"]
            if norm:
                message += f"; with it goes what it had yet to send, of norm {norm:.3g}"
            event = replace(event, values={**event.values, "message": message, "left_out": norm})
        if event.type == "plan":
            self._plan = dict(event.values)
            LOG.info("%s", event.values["message"])
        if event.type == "change":
            LOG.warning("%s", event.values["message"])
            if event.values["kind"] == "lost" and self._goodput is not None:
                self._goodput.lost(event.time_s)
            self._note_change(event)
        if not self.records and begins:
            self._begin(event)
        if self._log is not None and not (self._rank == 0 and event.rank):  # who is its own driver has written its own
            self._log.write(event)
            self._log.poll(self._clock())
        if self.records and not self._rank:
            self._dispatch(event)

    def _note_change(self, event: Event) -> None:
        if event.values["kind"] == "lost":
            lost: dict[str, Any] = {
                name: event.values[name] for name in ("worker_id", "host", "cause", "left_out") if name in event.values
            }
            self._losses.append({**lost, "step": event.step, "seconds": event.time_s})
        elif event.values["kind"] == "restart":
            made = {"step": event.step, "seconds": event.time_s, "message": event.values["message"]}
            self._restarts.append(made | {"cause": event.values.get("cause", "")})

    def _begin(self, event: Event) -> None:
        self.records = True
        if self._directory is not None:
            claim = None if self._rank else self.claim  # rank 0 may be at the next launch when the others end this one
            self._log = EventLog(self._directory / event_log.file_of(self._rank or 0), claim)
        if self._rank:
            self._take(self._event("start"))
        for message in self.warnings[self._known_warnings :]:
            if event.values.get("message") != message:
                self._take(self._event("warning", message=message))
        pending, self._pending = self._pending, []
        if self._log is not None:
            for one in pending:
                self._log.write(one)
                self._after_start.append(one)

    def _dispatch(self, event: Event) -> None:
        if event.type == "step":
            if event.values.get("again"):  # a lost worker may have trained on them, too
                self._repeated += event.values["rows"]
            row = self._history.add(event)
            if row is not None:
                self._tell_step(row)
        elif event.type == "closing":
            self._history.note(event)
        elif event.type == "part":
            pass  # the checkpoint of all parts is an event, too
        elif event.type == "partial":  # of all so far, by each worker that learns of it
            self._partial = max(self._partial, self._partial_before + event.values["rows"])
        elif event.type == "start":
            self._generation, self._partial_before = event.generation, self._partial
            if self._in_vain is not None and self._goodput is not None:  # the first of a launch after a restart
                self._repeated += max(0, self._in_vain - self._history.consumed)
                self._goodput.resumed(event.time_s, event.values.get("workers", 1), self._history.seconds)
            elif self._goodput is None or not self._restarts:
                self._goodput = Goodput(event.values.get("workers", 1), event.time_s)
            again, self._in_vain = self._in_vain is not None, None
            if not self._started:  # a first generation may have begun in vain
                self._started = True
                self._call_each("on_start", event)
                self._restore_callbacks()
                self._first_states = self._callback_states() if self._restartable else []
                for one in self._after_start:
                    self._call_each("on_notice", one)
            elif again:
                self._restore_callbacks()
        elif event.type == "membership":
            self._generation = event.generation
            self._repeated += event.values["repeated"]
            for row in self._history.regroup(event.tick, event.values["workers"]):
                self._tell_step(row)
            if self._goodput is not None:
                self._goodput.formed(event.time_s, event.values["workers"], self._history.seconds)
        else:
            name = event.type if event.type in ("epoch", "validation") else "notice"
            self._call_each(f"on_{name}", event)

    def _callback_states(self) -> list[CallbackState]:
        """(class, state) of each callback that has something to remember, in their order."""
        states = []
        for callback in self._callbacks:
            if not (state := callback.state_dict()):
                continue
            try:
                json.dumps(state)
            except (TypeError, ValueError) as problem:
                raise BadInput(
                    f"{type(callback).__name__}.state_dict() must return only JSON values (numbers, strings, lists, "
                    f"dicts of them): {problem}"
                ) from problem
            states.append((type(callback).__name__, state))
        return states

    def _restore_callbacks(self) -> None:
        """Give each callback the next saved state of its class; a warning names what finds no callback."""
        left, self._saved_states = [*self._saved_states], []
        for callback in self._callbacks:
            name = type(callback).__name__
            saved = next((one for one in left if one[0] == name), None)
            if saved is not None:
                left.remove(saved)
                callback.load_state_dict(saved[1])
        if left:
            self.warn(
                f"the checkpoint has the state of {', '.join(name for name, _ in left)}, and this run has no such "
                "callback: give the same callbacks as before, in the same order"
            )

    def _tell_step(self, row: dict[str, Any]) -> None:
        if self._callbacks:
            event = Event(type="step", time_s=row["seconds"], tick=row["tick"], step=row["step"], values=row)
            self._call_each("on_step", event)

    def _call_each(self, method: str, event: Event) -> None:
        for callback in self._callbacks:
            returned = getattr(callback, method)(event)
            if returned == "stop":
                self.stop("callback")
            elif returned is not None:
                raise BadInput(
                    f'a callback must return "stop" or None; {type(callback).__name__} returned {returned!r}'
                )

    def _say_reason(self) -> None:
        if self._reason and self.records and not self._reason_said:
            self._reason_said = True
            self._take(self._event("stop", reason=self._reason))

    def _over(self, type: str, **values: Any) -> None:
        """The last event. Every callback gets it, whatever another one raises; then the first error is raised."""
        event, self._ended = self._event(type, **values), True
        with ExitStack() as ends:
            for callback in reversed(self._callbacks):
                ends.callback(callback.on_end, event)
            if self._log is not None:
                self._log.write(event)

    # -- time --------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        elapsed = self._clock() - self._began_s if self._simulated_s is None else self._simulated_s
        return round(self._before_s + elapsed, 6)

    def _event(self, type: str, **values: Any) -> Event:
        if self._rank:
            return Event(
                type=type, time_s=self._now_s(), rank=self._rank, tick=self._tick, step=self._tick, values=values
            )
        tick = self._history.rows[-1]["tick"] if self._history.rows else 0
        return Event(type=type, time_s=self._now_s(), tick=tick, step=self._history.steps, values=values)

    def _on_own_clock(self, event: Event) -> Event:
        """The event in the driver's seconds: clocks differ by what the fastest delivery so far took, at most."""
        if event.rank is None:
            return event
        if self._simulated_s is not None:
            self._simulated_s = max(self._simulated_s, event.time_s)
            return replace(event, time_s=round(self._before_s + event.time_s, 9))
        offset = min(self._now_s() - event.time_s, self._offsets.get(event.rank, float("inf")))
        self._offsets[event.rank] = offset
        return replace(event, time_s=round(event.time_s + offset, 6))


def _check(event: Event) -> None:
    """FrameError unless it has what is made of it here: a worker may be another program, on another host."""
    try:
        event.check_values()
    except ValueError as problem:
        raise FrameError(f"a {event.type!r}: {problem}") from problem


def _histograms(run: Run) -> dict[str, Any]:
    """Staleness as JSON has it, whose keys are strings; nothing without a server."""
    if not run.staleness:
        return {}
    all_workers, *each = [
        {str(versions): pushes for versions, pushes in one.items()}
        for one in (run.staleness, *run.staleness_of_workers)
    ]
    return {"staleness": all_workers, "staleness_of_workers": each}
