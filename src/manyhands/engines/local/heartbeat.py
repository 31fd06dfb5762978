"""The connection of a worker or shard to the driver: a thread sends heartbeats and events four times a second."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.data import leases
from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.driver.run_monitor import COMPILING
from manyhands.engines.local.fault_injector import FaultInjector
from manyhands.engines.local.messages import Closed, ControlSocket, Status
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.worker import DriverClient

BEAT_S = 0.25
ANSWER_S = 600.0
"""The driver may be busy (a callback that writes, say) for so long; if it dies, that is seen at once."""


class ProcessDriverClient(DriverClient):
    """Heartbeats and events go over `wire`, questions and answers over `questions`; phase and step also into `status`.

    The thread that asks reads its answer itself, which is why questions have a wire of their own: a lease is asked for
    at every tick. `timeout_s` is how long the driver may leave either unread, if more than ANSWER_S. Once the driver is
    gone this process and all its children are killed: there is nobody to return to.
    """

    def __init__(
        self,
        wire: ControlSocket,
        questions: ControlSocket,
        timeout_s: float,
        status: Status | None = None,
        process_index: int = 0,
    ) -> None:
        self.process_index = process_index
        self._wire, self._questions, self._status = wire, questions, status
        self._timeout_s = max(timeout_s, ANSWER_S)
        self._now = ("start", 0)
        self._seen, self._seen_at = self._now, time.monotonic()
        self._compiling = 0
        self._asking = False  # the driver's turn: no silence of this worker's
        self._outbox: deque[str] = deque()
        self._sending = threading.Lock()
        self._stop = ""
        self._closed = False
        self.injector: FaultInjector | None = None  # of faults that this process is to have
        wire.sock.settimeout(self._timeout_s)
        for line in (wire, questions):
            os.register_at_fork(after_in_child=line.close)  # a loader's process must not keep the line open
        if (module := sys.modules.get("torch._dynamo.callback")) is not None:
            # torch.compile says when it works: minutes without a step are progress then
            module.callback_handler.register_start_callback(lambda *_: self.compiling(1))
            module.callback_handler.register_end_callback(lambda *_: self.compiling(-1))

    def start(self) -> None:
        threading.Thread(target=self._serve, name="manyhands-heartbeat", daemon=True).start()

    @override
    def progress(self, phase: str, step: int) -> None:
        self._now = (phase, step)
        if self._status is not None:
            self._status.write(phase, step)
        if self.injector is not None:
            self.injector.reach(phase, step)

    @override
    def emit(self, event: Event) -> None:
        self._outbox.append(json.dumps(vars(event)))  # here, so that what is no JSON raises where it was emitted

    @override
    def ask(self, event: Event) -> dict[str, Any]:
        self._send(None)  # all that was emitted before
        value: dict[str, Any] = self._question({"type": "ask", "event": vars(event)}, repr(event.type))["value"]
        return value

    @override
    def lease(self, segment: Segment, replica: int) -> Lease | End:
        question = {"type": "lease", "segment": vars(segment), "replica": replica}
        return leases.from_json(self._question(question, "a request for rows")["value"])

    def rendezvous(self, name: str, process_indices: Sequence[int], value: Any) -> list[Any]:
        """A rendezvous of these processes, this one among them: give a value (JSON), get all values in their order."""
        question = {"type": "arrive", "name": name, "process_indices": list(process_indices), "value": value}
        values: list[Any] = self._question(question, f"the rendezvous {name!r}")["values"]
        return values

    def _question(self, question: dict[str, Any], what: str) -> dict[str, Any]:
        """Send a message and wait for its answer; `what` names it in the error of a driver that gives none."""
        self._asking = True
        try:
            self._questions.sock.settimeout(self._timeout_s)
            self._questions.send(question)
            while True:
                for body, _ in self._questions.receive():
                    if body.get("value", body) is not None:
                        return body
                    # Rows will come when worker 0 has trained alone, however long that takes: the driver watches it,
                    # and this wire watches the driver.
                    self._questions.sock.settimeout(None)
        except (Closed, BrokenPipeError, ConnectionResetError):
            end_this_group()
        except TimeoutError:
            raise ManyhandsError(
                f"the driver did not answer {what} within {self._timeout_s:.0f} s. Check whether a callback is stuck; "
                "if it is only slow, give a longer timeout_s (--timeout)"
            ) from None
        finally:
            self._asking, self._seen_at = False, time.monotonic()

    @override
    def should_stop(self) -> str:
        return self._stop

    @override
    def collect(self, group: Group) -> None:
        """Send them now instead of with the next heartbeat: who dies afterwards takes none of them with him."""
        self._send(None)

    def report(self, event: Event) -> None:
        """Emit an event and send it now: who dies afterwards does not take it with him."""
        self.emit(event)
        self._send(None)

    def last(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send the final message, after all events; heartbeats end."""
        self._closed = True
        self._send(message, fds)

    def where(self) -> tuple[str, int]:
        """(phase, step) as the driver will see them."""
        return (COMPILING, self._now[1]) if self._compiling else self._now

    def compiling(self, change: int) -> None:
        self._compiling += change
        self._seen_at = time.monotonic()

    def _serve(self) -> None:
        next_beat = time.monotonic()
        while not self._closed:
            if self._wire.readable(next_beat - time.monotonic()):
                self._read()
            elif not self._closed:
                self._send(None)
                next_beat = time.monotonic() + BEAT_S

    def _read(self) -> None:
        try:
            messages = self._wire.receive()
        except Closed:
            end_this_group()
        for body, _ in messages:
            self._stop = body["reason"]

    def _send(self, message: dict[str, Any] | None, fds: tuple[int, ...] = ()) -> None:
        """A heartbeat with what is in the outbox, then the message: nothing overtakes an event."""
        with self._sending:
            events = [self._outbox.popleft() for _ in range(len(self._outbox))]
            now = self.where()
            if now != self._seen:
                self._seen, self._seen_at = now, time.monotonic()
            idle_s = 0.0 if self._asking else time.monotonic() - self._seen_at
            place = json.dumps({"phase": now[0], "step": now[1], "idle_s": idle_s})
            try:
                self._wire.send_text(f'{{"type":"beat",{place[1:-1]},"events":[{",".join(events)}]}}')
                if message is not None:
                    self._wire.send(message, fds)
            except (BrokenPipeError, ConnectionResetError):
                end_this_group()
            except TimeoutError:
                sys.stderr.write(
                    f"manyhands: the driver read no message for {self._timeout_s:.0f} s, so this worker ends. If a "
                    "callback is slow, give a longer timeout_s\n"
                )
                end_this_group()


def end_this_group() -> NoReturn:
    """Kill this worker and the children it has: its process group is its own."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
