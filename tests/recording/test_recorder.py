"""The driver's ear: what is written, what callbacks hear, what stops a run."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_events import step

from manyhands.callbacks.base import Callback
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.recording.recorder import Recorder
from manyhands.recording.run import Answer, Run, read_history
from refusals import refused


class Clock:
    """Time that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Heard(Callback):
    """Writes down its calls; says stop where it is told to."""

    def __init__(self, stop_on: str = "") -> None:
        self.events: list[Event] = []
        self.stop_on = stop_on

    @property
    def calls(self) -> list[str]:
        return [event.type for event in self.events]

    def on_notice(self, event: Event) -> Any:
        self.events.append(event)
        return "stop" if event.type == self.stop_on else None

    on_start = on_step = on_validation = on_epoch = on_end = on_notice


START = Event(type="start", rank=0, values={"total_steps": 2})


def ask(type: str, **values: Any) -> Event:
    return Event(type=type, rank=0, values={"epoch": 1, **values})


def run_of(recorder: Recorder, **info: Any) -> Run:
    numbers = {"seconds": 2.0, "steps": 1, "rounds": 1, "ledger": {}, "metrics": {"test_loss": 0.5}}
    return Run(
        answer=Answer.of([torch.nn.Linear(1, 1)]),
        history=recorder.history,
        rows={"total": 8, "workers": [4, 4], "unused": 0},
        timing=recorder.timing(),
        info=info,
        **numbers,
    )


def record(recorder: Recorder, *events: Event) -> None:
    with recorder:
        for event in events:
            recorder.event(event)


def record_all(recorder: Recorder, *events: Event, **info: Any) -> Run:
    """To the end."""
    with recorder:
        for event in events:
            recorder.event(event)
        return ended(recorder, **info)


def ended(recorder: Recorder, **info: Any) -> Run:
    run = run_of(recorder, **info)
    recorder.complete(run)
    recorder.end(run)
    return run


def resumed(directory: Path, tick: int, left: Any = None, **options: Any) -> Recorder:
    recorder = Recorder(directory=directory, **{"workers": 1, **options})
    recorder.preload(tick, left)
    return recorder


def again(tick: int, **values: Any) -> Event:
    """The start of a launch that goes on."""
    return Event(type="start", rank=0, tick=tick, **values)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def types(directory: Path) -> list[str]:
    return [line["type"] for line in lines(directory)]


def test_every_event_is_a_line_and_callbacks_get_rows_of_all_workers(tmp_path: Path) -> None:
    heard = Heard()
    with Recorder(workers=2, directory=tmp_path, callbacks=[heard]) as recorder:
        for event in (START, step(1, loss=2.0), step(0)):
            recorder.event(event)
        assert recorder.answer(ask("validation", metrics={"validation_loss": 1.0}, best=True)) == {}
        assert recorder.answer(ask("epoch", rows=8)) == {}
        recorder.event(Event(type="checkpoint", rank=0, values={"path": "p", "seconds": 0.1}))
        run = ended(recorder)
    assert types(tmp_path) == ["start", "step", "step", "validation", "epoch", "checkpoint", "end"]
    assert heard.calls == ["start", "step", "validation", "epoch", "checkpoint", "end"]
    assert heard.events[1].values["loss"] == 1.5
    assert heard.events[1].values is recorder.history[0]
    assert heard.events[-1].values == {"metrics": {"test_loss": 0.5}, "seconds": 2.0}
    assert run.timing_of_workers == [{"input": 0.1, "compute": 0.2, "exchange": 0.3, "wait": 0.4}] * 2
    apart = Heard()
    run = record_all(Recorder(workers=2, callbacks=[apart]), START, step(0))  # its workers were stopped apart
    assert (apart.calls, run.history[0]["rows"]) == (["start", "step", "end"], 4)


def test_stop_is_the_answer_to_an_asked_event_and_after_a_step_seen_by_polling(tmp_path: Path) -> None:
    for asked in ("validation", "epoch"):
        with Recorder(workers=1, callbacks=[Heard(stop_on=asked)]) as recorder:
            recorder.event(START)
            assert recorder.answer(ask(asked, metrics={}, best=False)) == {"stop": "callback"}
    with Recorder(workers=1, directory=tmp_path, callbacks=[Heard(stop_on="step")]) as recorder:
        recorder.event(START)
        assert recorder.stopping() == ""
        recorder.event(step(0))
        assert [recorder.stopping(), recorder.stopping()] == ["callback", "callback"]
    assert [line["values"] for line in lines(tmp_path) if line["type"] == "stop"] == [{"reason": "callback"}]
    with Recorder(workers=1) as recorder:  # the first reason stays
        recorder.event(START)
        recorder.stop("preempted")
        recorder.stop("callback")
        assert recorder.stopping() == "preempted"
        assert recorder.answer(ask("epoch", rows=1)) == {"stop": "preempted"}
    (tmp_path / "known").mkdir()
    record_all(Recorder(workers=1, directory=tmp_path / "known"), START, stopped="max_seconds")
    assert types(tmp_path / "known") == ["start", "stop", "end"]  # a reason that only the workers know


def test_a_callbacks_error_ends_the_run_and_so_does_what_it_may_not_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CASE 21: nothing is swallowed."""

    class Broken(Callback):
        def on_step(self, event: Event) -> None:
            raise RuntimeError("mine")

        def on_end(self, event: Event) -> None:
            raise RuntimeError("and mine again")

    heard = Heard()
    recorder = Recorder(workers=1, directory=tmp_path, callbacks=[Broken(), heard])
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="^mine$"):
        record(recorder, START, step(0))
    assert "and mine again" in caplog.text  # it does not take the place of what ended the run
    assert heard.calls == ["start", "failed"]
    assert lines(tmp_path)[-1]["values"] == {"error": "RuntimeError", "message": "mine"}

    heard = Heard()  # the end is told once, also when a callback fails at it
    with pytest.raises(RuntimeError, match="and mine again"):
        record_all(Recorder(workers=1, callbacks=[Broken(), heard]), START)
    assert heard.calls == ["start", "end"]

    class Chatty(Callback):
        def on_step(self, event: Event) -> Any:
            return True

    refused("Chatty returned True", record, Recorder(workers=1, callbacks=[Chatty()]), START, step(0))
    refused(r"derived from manyhands\.Callback", lambda: Recorder(workers=1, callbacks=[print]))


def test_a_run_that_never_began_leaves_nothing_and_a_full_disk_is_an_error(tmp_path: Path) -> None:
    heard = Heard()
    recorder = Recorder(workers=1, directory=tmp_path, callbacks=[heard])
    recorder.warn("of a checkpoint")
    with pytest.raises(ValueError, match="early"), recorder:
        raise ValueError("early")
    assert (bool(recorder.records), heard.calls, list(tmp_path.iterdir())) == (False, [], [])
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(ManyhandsError, match="No space left"), Recorder(workers=1, directory=tmp_path) as recorder:
        recorder.event(START)


def test_warnings_are_logged_once_written_and_summed_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    recorder = Recorder(workers=1, directory=tmp_path, callbacks=[heard])
    with caplog.at_level(logging.WARNING):
        recorder.warn("before the run")
        run = record_all(recorder, START, *[Event(type="warning", rank=0, values={"message": "from a worker"})] * 2)
    assert [record.message for record in caplog.records] == ["before the run", "from a worker"]
    assert types(tmp_path) == ["warning", "start", "warning", "warning", "end"]
    assert heard.calls == ["warning", "start", "warning", "warning", "end"]
    assert run.info["warnings"] == ["before the run", "from a worker"]
    recorder = Recorder(workers=2)  # of a kind once, in the words of who gave it first
    said = [("from 1", "staleness"), ("from 0", "staleness"), ("of another kind", "other")]
    events = [Event(type="warning", rank=0, values={"message": text, "kind": kind}) for text, kind in said]
    record(recorder, START, *events)
    assert recorder.warnings == ["from 1", "of another kind"]


def test_times_are_in_the_drivers_seconds_and_simulated_ones_the_workers_own(tmp_path: Path) -> None:
    clock = Clock()
    with Recorder(workers=2, clock=clock) as recorder:
        clock.now += 5.0
        recorder.event(step(0, time_s=77.0))  # as fast as can be: worker 0's clock is 72 ahead
        clock.now += 1.0
        recorder.event(step(0, tick=1, time_s=77.5))  # half a second on the way
        recorder.event(step(1, time_s=300.0))
        recorder.event(step(1, tick=1, time_s=300.0))
    assert [row["seconds"] for row in recorder.history] == [6.0, 6.0]
    clock = Clock()
    heard = Heard()
    recorder = Recorder(workers=1, callbacks=[heard], clock=clock, simulated=True)
    with recorder:
        clock.now += 500
        recorder.answer(Event(type="start", rank=0, time_s=0.25, values={"total_steps": 2}))
        recorder.event(Event(type="notice", rank=0, time_s=7.5))
        clock.now += 500
        recorder.warn("careful")
    assert [event.time_s for event in heard.events] == [0.25, 7.5, 7.5]


def test_a_resumed_launch_has_the_whole_history_and_its_clock_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    with Recorder(workers=1, directory=tmp_path, clock=clock) as first:
        first.event(START)
        for tick in range(3):
            clock.now += 1.0
            first.event(step(0, tick, time_s=clock.now))
    with resumed(tmp_path, 2, clock=clock) as second:
        second.event(again(2, time_s=clock.now))
        clock.now += 1.0
        second.event(step(0, 2, time_s=clock.now, loss=9.0))
    rows = [(row["tick"], row["loss"], row["seconds"]) for row in second.history]
    assert rows == [(0, 1.0, 1.0), (1, 1.0, 2.0), (2, 9.0, 3.0)]
    assert second.timing()["compute"] == pytest.approx(0.6)


def test_callbacks_get_the_runs_step_also_where_workers_go_at_their_own_pace(tmp_path: Path) -> None:
    """Each worker counts its own optimizer steps; batches are complete in any order, in any launch."""
    # (rank, tick, part)
    slices = [(0, 5, 0), (1, 9, 1), (0, 6, 1), (1, 0, 0), (0, 0, 1), (1, 5, 1), (0, 9, 0), (1, 6, 0)]
    made = [
        replace(step(rank, tick, lease=[tick, part, n], parts=2), step=40 - 10 * rank + n)
        for n, (rank, tick, part) in enumerate(slices)
    ]
    heard = Heard()
    record(Recorder(workers=2, directory=tmp_path, callbacks=[heard]), START, *made[:6])
    assert [event.step for event in heard.events if event.type == "step"] == [1, 2]
    later = Heard()
    second = resumed(tmp_path, 10, (0, [[8, 10], [0, 0]]), workers=2, callbacks=[later])
    record(second, again(10), *made[6:])
    assert [event.step for event in later.events] == [0, 3, 4]
    assert [row["step"] for row in second.history] == [1, 2, 3, 4]
    (tmp_path / "other").mkdir()
    recorder = resumed(tmp_path / "other", 7)  # it finds no events, and goes on at its checkpoint's step
    record(recorder, again(7), step(0, 7))
    assert [row["step"] for row in recorder.history] == [8]


def test_a_first_generation_that_began_in_vain_starts_no_callback_twice() -> None:
    """Those who begin next may be fewer: their steps are whole without the lost worker's."""
    heard = Heard()
    with Recorder(workers=3, callbacks=[heard]) as recorder:
        recorder.answer(replace(START, values={"workers": 3}))
        recorder.answer(replace(START, generation=1, values={"workers": 3}))
        recorder.answer(Event(type="membership", generation=1, rank=0, values={"workers": 2, "repeated": 0}))
        for rank in (0, 2):
            recorder.event(replace(step(rank), generation=1))
        assert heard.calls == ["start", "step"]
        run = run_of(recorder)
        recorder.complete(run)
    assert run.generations == 2


class Remembering(Heard):
    """Remembers how many steps it has seen."""

    steps = 0

    def on_step(self, event: Event) -> None:
        self.steps += 1
        self.on_notice(event)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("checkpoint", [2, 0])
def test_a_run_that_starts_again_is_one_run(checkpoint: int, tmp_path: Path) -> None:
    """Its history, its clock, and its callbacks, which remember what they did at the checkpoint, or at the start."""
    clock, callback = Clock(), Remembering()
    recorder = Recorder(workers=1, directory=tmp_path, callbacks=[callback], clock=clock, restarts=True)
    with recorder:
        recorder.answer(replace(START, time_s=clock.now))
        for tick in range(4):
            clock.now += 1.0
            recorder.event(step(0, tick, time_s=clock.now))
        values = {"message": "worker 0 lost: restart 1 of 2", "worker_id": 0, "host": "alpha", "cause": "death"}
        recorder.start_again(values, checkpoint, 0)
        if checkpoint:
            recorder.preload(checkpoint, None, 8, [("Remembering", {"steps": 2})])
        assert [row["tick"] for row in recorder.history] == list(range(checkpoint))
        clock.now += 1.0
        recorder.answer(replace(START, tick=checkpoint, time_s=clock.now))
        assert callback.steps == checkpoint
        for tick in range(checkpoint, 5):
            clock.now += 1.0
            recorder.event(step(0, tick, time_s=clock.now))
        run = ended(recorder)
    calls = [(event.type, event.step if event.type == "step" else None) for event in callback.events]
    steps = [("step", number) for number in (1, 2, 3, 4, *range(1 + checkpoint, 6))]
    (restart,) = [event for event in callback.events if event.values.get("kind") == "restart"]
    assert calls == [("start", None), *steps[:4], (restart.type, None), *steps[4:], ("end", None)]
    assert [row["tick"] for row in run.history] == list(range(5))
    assert [row["tick"] for row in read_history(tmp_path)] == list(range(5))
    assert (run.generations, len(run.restarts)) == (2, 1)
    assert (run.restarts[0]["step"], run.restarts[0]["cause"]) == (checkpoint, "death")
    assert run.rows["repeated"] == 4 * (4 - checkpoint)
    times = [line["time_s"] for line in lines(tmp_path)]
    assert times == sorted(times)
