"""What is drawn, printed, or left out."""

import io
import json
import sys
import time
import types
from typing import Any

import pytest
from rich.console import Console

from manyhands.callbacks import Progress
from manyhands.callbacks.progress import StepRate
from manyhands.errors import UnknownName
from manyhands.events import Event

START = Event(type="start", values={"total_steps": 40, "epochs": 2})


def step(tick: int, time_s: float, loss: float | None = 0.5) -> Event:
    values = {"tick": tick, "epoch": 0, "loss": loss, "rows": 32}
    return Event(type="step", time_s=time_s, tick=tick, step=tick + 1, values=values)


def whole_run(progress: Progress) -> None:
    progress.on_start(START)
    for tick in range(20):
        progress.on_step(step(tick, tick * 0.1))
    validation = {"metrics": {"validation_loss": 0.25}, "best": True}
    progress.on_validation(Event(type="validation", step=20, values=validation))
    progress.on_epoch(Event(type="epoch", values={"epoch": 1, "rows": 640}))
    progress.on_end(Event(type="end", values={"metrics": {}, "seconds": 2.0}))


def test_a_terminal_gets_a_bar_and_a_line_a_validation() -> None:
    out = io.StringIO()
    whole_run(Progress(console=Console(file=out, force_terminal=True, width=120)))
    assert "epoch 1/2   step 20/40   loss 0.5   320 rows/s   0:00:02 left" in out.getvalue()
    assert "step 20   validation_loss 0.2500   best so far" in out.getvalue()


def test_it_draws_at_most_five_times_a_second() -> None:
    now = [0.0]
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True), clock=lambda: now[0])
    progress.on_start(START)
    drawn: list[int] = []
    progress._display.draw = lambda pace: drawn.append(pace.steps)  # type: ignore[union-attr,method-assign]
    for tick in range(10):
        progress.on_step(step(tick, tick * 0.1))
        now[0] += 0.1
    assert len(drawn) <= 5
    progress.on_end(Event(type="end", values={}))


def test_nothing_is_shown_without_a_terminal_nor_where_it_is_to_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for log, terminal in (("auto", False), ("quiet", True)):
        out = io.StringIO()
        whole_run(Progress(log, console=Console(file=out, force_terminal=terminal)))
        assert (out.getvalue(), *capsys.readouterr()) == ("", "", ""), log
    with pytest.raises(UnknownName, match="auto, json, quiet"):
        Progress("loud")


def test_json_is_a_line_an_event_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("json")
    progress.on_notice(Event(type="warning", values={"message": "m"}))
    whole_run(progress)
    out, err = capsys.readouterr()
    wanted = ["warning", "start", *["step"] * 20, "validation", "epoch", "end"]
    assert [json.loads(line)["type"] for line in out.splitlines()] == wanted
    assert err == ""


def test_a_notebook_gets_one_output_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/plain"])

    fake: Any = types.ModuleType("IPython.display")
    fake.display = lambda data, raw, display_id: Handle()
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    whole_run(Progress(console=Console(file=io.StringIO(), force_jupyter=True)))
    assert shown[0].startswith("epoch 1/2   step 1/40")
    assert shown[-1].startswith("step 20   validation_loss 0.2500   best so far\nepoch 1/2   step 20/40")


def pace_of(*steps: tuple[float, float | None], **options: Any) -> StepRate:
    """After steps at these seconds, with these losses."""
    pace = StepRate(**options)
    for tick, (time_s, loss) in enumerate(steps):
        pace.step(step(tick, time_s, loss))
    return pace


def test_the_pace_is_that_of_the_last_five_seconds() -> None:
    pace = pace_of((0.0, 0.5), total_steps=1000)
    assert (pace.rows_per_s(), pace.left_s()) == (None, None)  # it does not know when the run began
    for tick in range(1, 11):
        pace.step(step(tick, 100.0 + tick))  # a compile took 100 s; then a step a second
    assert (pace.rows_per_s(), pace.left_s()) == (pytest.approx(32.0), pytest.approx(989.0))


def test_a_step_longer_than_the_window_has_a_pace_too() -> None:
    """The last two steps, however long ago the one before was; at first, the time since the start."""
    pace = pace_of((64.0, 0.5), total_steps=10, began_s=4.0)
    assert (pace.rows_per_s(), pace.left_s()) == (pytest.approx(32 / 60), pytest.approx(9 * 60.0))
    for tick in range(1, 4):
        pace.step(step(tick, 64.0 + 20.0 * tick))
    assert (pace.rows_per_s(), pace.left_s()) == (pytest.approx(1.6), pytest.approx(6 * 20.0))


def test_what_a_line_says() -> None:
    """A stream has no end to show; a step without rows keeps the loss; hours, minutes and seconds are left."""
    assert pace_of((0.0, 0.25), (1.0, None)).text() == "epoch 1   step 2   loss 0.25   32 rows/s"
    assert pace_of((0.0, 0.5), (0.25, 0.5), total_steps=14_705).text().endswith("   1:01:16 left")


def test_a_pipe_gets_a_line_every_half_a_minute() -> None:
    """And each validation of a run that is so old; a short run writes nothing."""
    now, out = [100.0], io.StringIO()
    progress = Progress(console=Console(file=out, force_terminal=False, width=40), clock=lambda: now[0])
    progress.on_start(START)
    for tick in range(8):
        if tick == 1:
            progress.on_validation(Event(type="validation", step=1, values={"metrics": {"validation_loss": 0.5}}))
        now[0] += 10
        progress.on_step(step(tick, tick * 10))
    progress.on_validation(Event(type="validation", step=8, values={"metrics": {"validation_loss": 0.25}}))
    progress.on_end(Event(type="end", values={}))
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("0:00:30   epoch 1/2   step 3/40   loss 0.5")
    assert second.startswith("0:01:00   epoch 1/2   step 6/40")
    assert third == "step 8   validation_loss 0.2500"


def test_a_terminal_shows_that_a_slow_step_is_alive() -> None:
    """Without a step the spinner turns and the seconds count."""
    out = io.StringIO()
    progress = Progress(console=Console(file=out, force_terminal=True, width=120))
    progress.on_start(START)
    deadline = time.monotonic() + 10
    while "0:00:01" not in out.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    progress.on_step(step(0, 8.0))
    progress.on_end(Event(type="end", values={}))
    assert "4 rows/s   0:05:12 left" in out.getvalue()
