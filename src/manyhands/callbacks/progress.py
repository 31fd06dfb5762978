"""The progress of a run: a bar on a terminal, a line in a notebook, JSON lines for programs, now and then a line for pipes."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from typing_extensions import override

from manyhands import units
from manyhands.callbacks.base import Callback
from manyhands.errors import UnknownName
from manyhands.events import Event

LOG = logging.getLogger("manyhands")

MODES = ("auto", "json", "quiet")
DRAW_EVERY_S = 0.2
LINE_EVERY_S = 30.0
RECENT_S = 5.0  # rows/s and the time left are of the last so many seconds, or of the last two steps if these are longer


class Progress(Callback):
    """Shows epoch, step, loss, rows/s and the time left.

    log: "auto" draws a bar on standard error if that is a terminal, a line under the cell in a notebook, and elsewhere
    (a pipe, nohup) writes a line every half a minute; "json" prints every event as a line of JSON on standard output,
    steps as rows of all workers; "quiet" prints nothing.
    """

    def __init__(
        self, log: str = "auto", *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if log not in MODES:
            raise UnknownName(f"no log mode {log!r}: choose one of {', '.join(MODES)}")
        self._log = log
        self._console = console
        self._clock = clock
        self._display: _Terminal | _Notebook | _Lines | None = None
        self._rate = StepRate()
        self._drawn_s = -math.inf
        self._metrics: dict[str, float] = {}

    @override
    def on_start(self, event: Event) -> None:
        clock = self._clock if event.values.get("virtual_time") else None
        began_s = event.time_s if clock is None else clock()
        self._rate = StepRate(event.values.get("total_steps"), event.values.get("epochs"), began_s, clock)
        if self._log == "auto":
            console = self._console or Console(stderr=True)
            if console.is_jupyter:
                self._display = _Notebook()
            elif console.is_terminal:
                self._display = _Terminal(console)
            else:
                self._display = _Lines(console, self._clock)
        self._print_json(event)

    @override
    def on_step(self, event: Event) -> None:
        self._rate.step(event)
        self._print_json(event)
        if self._display is not None and self._clock() - self._drawn_s >= DRAW_EVERY_S:
            self._drawn_s = self._clock()
            self._display.draw(self._rate)

    @override
    def on_validation(self, event: Event) -> None:
        self._print_json(event)
        if self._display is not None:
            metrics = [f"{name} {units.metric(value)}" for name, value in event.values["metrics"].items()]
            best = ["best so far"] if event.values.get("best") else []
            self._display.print("   ".join([f"step {event.step:,}", *metrics, *best]))

    @override
    def on_epoch(self, event: Event) -> None:
        self._print_json(event)

    @override
    def on_notice(self, event: Event) -> None:
        self._print_json(event)
        if self._display is not None and event.type == "plan":
            self._display.print(event.values["message"])

    @override
    def on_end(self, event: Event) -> None:
        self._print_json(event)
        if self._display is not None:
            self._display.draw(self._rate)
            self._display.close()
            self._display = None

    def _print_json(self, event: Event) -> None:
        if self._log == "json":
            out: IO[str] = self._console.file if self._console is not None else sys.stdout
            try:
                out.write(event.to_json() + "\n")
                out.flush()
            except BrokenPipeError:
                self._log = "quiet"
                LOG.warning(
                    "the reader of standard output has closed it, so no more events are printed. The run continues, "
                    "and its run directory records all events"
                )
                null = os.open(os.devnull, os.O_WRONLY)  # flushing the rest at exit must not fail again
                os.dup2(null, out.fileno())
                os.close(null)


class StepRate:
    """The position of a run, and its recent speed."""

    def __init__(
        self,
        total_steps: int | None = None,
        epochs: int | None = None,
        began_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """began_s: the start of the launch. clock: real seconds, if the events' times are virtual."""
        self._clock = clock
        self.total_steps, self.epochs = total_steps, epochs
        self.steps, self.epoch, self.loss = 0, 0, math.nan
        self._began_s = began_s
        self._recent: deque[tuple[float, int]] = deque()  # (seconds, rows)

    def step(self, event: Event) -> None:
        """Add the row of a step."""
        values = event.values
        self.steps, self.epoch = event.step, max(self.epoch, values["epoch"] + 1)
        self.loss = self.loss if values["loss"] is None else values["loss"]
        now = event.time_s if self._clock is None else self._clock()
        self._recent.append((now, values["rows"]))
        while len(self._recent) > 2 and now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()

    def rows_per_s(self) -> float | None:
        """Of the last five seconds, or of the last step if it took longer; None before the first step."""
        seconds, steps = self._window()
        return sum(rows for _, rows in list(self._recent)[-steps:]) / seconds if seconds else None

    def left_s(self) -> float | None:
        """Seconds to the last step at this rate; None if the end is unknown."""
        seconds, steps = self._window()
        if not seconds or self.total_steps is None:
            return None
        return (self.total_steps - self.steps) * seconds / steps

    def _window(self) -> tuple[float, int]:
        """(seconds, steps made in them). The first step, which includes warm-up, only counts while it is the only one."""
        if len(self._recent) == 1 and self._began_s is not None:
            return self._recent[0][0] - self._began_s, 1
        return (self._recent[-1][0] - self._recent[0][0], len(self._recent) - 1) if self._recent else (0.0, 0)

    def text(self) -> str:
        """One line: `epoch 2/5   step 120/410   loss 0.4121   2,345 rows/s   0:00:12 left`."""
        of_epochs = f"/{self.epochs}" if self.epochs else ""
        of_steps = f"/{self.total_steps:,}" if self.total_steps else ""
        parts = [f"epoch {self.epoch}{of_epochs}", f"step {self.steps:,}{of_steps}", f"loss {units.number(self.loss)}"]
        rate, left = self.rows_per_s(), self.left_s()
        if rate is not None:
            parts.append(f"{rate:,.0f} rows/s")
        if left is not None:
            parts.append(f"{timedelta(seconds=max(0, round(left)))} left")
        return "   ".join(parts)


class _Terminal:
    """A bar of rich, which turns and counts seconds however long a step takes. Other output is printed above it."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=16),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Bar(*columns, console=console, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def draw(self, rate: StepRate) -> None:
        self._bar.update(
            self._task, completed=rate.steps, total=rate.total_steps, description=rate.text(), refresh=True
        )

    def print(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


class _Lines:
    """A line every half a minute, and each validation once the run is so old."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._began_s = self._written_s = clock()

    def draw(self, rate: StepRate) -> None:
        if self._clock() - self._written_s >= LINE_EVERY_S:
            self._written_s = self._clock()
            self._write(f"{timedelta(seconds=round(self._clock() - self._began_s))}   {rate.text()}")

    def print(self, line: str) -> None:
        if self._clock() - self._began_s >= LINE_EVERY_S:
            self._write(line)

    def _write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


class _Notebook:
    """One output under the cell that is rewritten. Rich's own needs ipywidgets."""

    def __init__(self) -> None:
        from IPython.display import display

        self._lines: list[str] = []
        self._handle = display({"text/plain": "starting"}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def draw(self, rate: StepRate) -> None:
        self._handle.update({"text/plain": "\n".join([*self._lines, rate.text()])}, raw=True)

    def print(self, line: str) -> None:
        self._lines.append(line)

    def close(self) -> None:
        pass
