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
from typing import Any, NamedTuple, NoReturn

from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.data import leases
from manyhands.data.leases import End, Lease, Segment
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.driver.run_monitor import COMPILING
from manyhands.engines.fault_injector import FaultInjector
from manyhands.engines.local.messages import Closed, ControlSocket, Status
from manyhands.engines.shared_memory import close_memory
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.server.replication.copy_host import Orders
from manyhands.worker import DriverClient, LastPushes

BEAT_S = 0.25
ANSWER_S = 600.0
"""The driver may be busy (a callback that writes, say) for so long; if it dies, that is seen at once."""


class PlaceInGroup(NamedTuple):
    """The driver's answer to a worker that asked for its place in the next generation's group."""

    generation: int
    hosts: list[list[int]]  # the members' ids, by host
    names: list[str]  # of the hosts
    memory: tuple[list[int], list[tuple[int, int]]] | None
    """The table and all arenas, and lifelines: descriptors of this process. None: it is the only member on its host."""

    def close(self) -> None:
        """Of a group that was not made."""
        if self.memory is not None:
            close_memory(self.memory)


class BrokenOff(ManyhandsError):
    """A group is not formed: the driver knows that a member is lost, or has left it again."""


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
        self._stop, self._interrupted, self._broken = "", -1, -1
        self._formed: tuple[int, Group] | None = None
        self._closed = False
        self.injector: FaultInjector | None = None  # of faults that this process is to have
        self.orders: Orders | None = None  # where a server shard takes what the driver orders
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
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End | None:
        question = {"type": "lease", "segment": vars(segment), "replica": replica}
        if push is not None:
            question |= {"type": "lease_of_push", "push": push}
        answer = self._question(question, "a request for rows")
        return None if answer["type"] == "dropped" else leases.from_json(answer["value"])

    @override
    def deliver(self, piece: RowPiece) -> None:
        """The bytes go in a file without a name, whose descriptor the driver closes."""
        fd = os.memfd_create("manyhands-rows", os.MFD_CLOEXEC)
        try:
            data = memoryview(piece.data)
            while data.nbytes:  # one call writes 2 GB at most
                data = data[os.write(fd, data) :]
            self._question({"type": "rows", **piece.header()}, "rows that were delivered", (fd,))
        finally:
            os.close(fd)

    def rendezvous(self, name: str, process_indices: Sequence[int], value: Any) -> list[Any]:
        """A rendezvous of these processes, this one among them: give a value (JSON), get all values in their order.

        BrokenOff where one of them will not come any more.
        """
        question = {"type": "arrive", "name": name, "process_indices": list(process_indices), "value": value}
        answer = self._question(question, f"the rendezvous {name!r}")
        if answer["type"] == "dropped":
            raise BrokenOff(f"the rendezvous {name!r} was dropped: one of its processes is lost")
        values: list[Any] = answer["values"]
        return values

    def _question(self, question: dict[str, Any], what: str, fds: tuple[int, ...] = ()) -> dict[str, Any]:
        """Send a message and wait for its answer; `what` names it in the error of a driver that gives none."""
        self._asking = True
        try:
            self._questions.sock.settimeout(self._timeout_s)
            self._questions.send(question, fds)
            while True:
                for body, _ in self._questions.receive():
                    if body.get("value", body) is not None:
                        return body
                    # Rows will come when worker 0 has trained alone, or delivered rows may go on when a slower worker's have
                    # come, however long that takes: the driver watches it, and this wire watches the driver.
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

    def wait_for_place(self, generation: int, blank: bool, lost: int | None) -> PlaceInGroup | None:
        """Ask for this worker's place in the generation after `generation`, and wait for it; None: the run is over.

        All that was emitted has arrived before. The driver decides how long to wait: its own end ends this process.
        """
        self._send(None)
        self._asking, members = True, list[list[int]]()
        try:
            self._questions.sock.settimeout(None)
            self._questions.send({"type": "place", "generation": generation, "blank": blank, "lost": lost})
            while True:
                for body, fds in self._questions.receive():
                    match body["type"]:
                        case "member":
                            members.append(fds)
                        case "formed":
                            lifelines = [(read, write[0] if write else -1) for _, read, *write in members]
                            memory = ([*fds, *(arena for arena, *_ in members)], lifelines) if members else None
                            return PlaceInGroup(body["generation"], body["hosts"], body["names"], memory)
                        case "over":
                            return None
        except (Closed, BrokenPipeError, ConnectionResetError):
            end_this_group()
        finally:
            self._asking, self._seen_at = False, time.monotonic()

    def connect_shard(self, shard: int) -> tuple[dict[str, Any], int]:
        """The driver's answer to a worker that has no connection to a shard's primary, or none any more: what it says, and
        the descriptor of one, or -1 where the worker is to connect by itself.

        The driver decides how long that takes: its own end ends this process.
        """
        self._asking = True
        try:
            self._questions.sock.settimeout(None)
            self._questions.send({"type": "connect", "shard": shard})
            while True:
                for body, fds in self._questions.receive():
                    return body, fds[0] if fds else -1
        except (Closed, BrokenPipeError, ConnectionResetError):
            end_this_group()
        finally:
            self._asking, self._seen_at = False, time.monotonic()

    @override
    def pushes_of_lost(self, generation: int) -> dict[int, LastPushes]:
        question = {"type": "pushes_of_lost", "generation": generation}
        found = self._question(question, "what the server has of lost workers")["value"]
        return {worker_id: LastPushes(numbers, ticks) for worker_id, numbers, ticks in found}

    def check(self, generation: int) -> None:
        """BrokenOff where the driver knows that a member of this generation is lost, or out of its group."""
        if self._broken == generation:
            raise BrokenOff(f"generation {generation} is not formed: one of its members is lost")

    def formed(self, generation: int, group: Group) -> None:
        """This worker is in the group; if the driver hears of a member's end that does not show there, it is told.

        BrokenOff, as `check`.
        """
        self._formed = generation, group
        self.check(generation)

    @override
    def interrupted(self, generation: int) -> bool:
        return self._interrupted == generation

    @override
    def broken(self, generation: int) -> bool:
        return self._broken == generation

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

    def say(self, message: dict[str, Any]) -> None:
        """Send a message of a server shard."""
        self._send(message)

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
        for body, fds in messages:
            match body["type"]:
                case "interrupt":
                    self._interrupted = body["generation"]
                case "broken":
                    self._break_off(body)
                case "stop":
                    self._stop = body["reason"]
                case _ if self.orders is not None:
                    self.orders.put(body, fds)

    def _break_off(self, body: dict[str, Any]) -> None:
        self._broken = body["generation"]
        if self._formed is not None and self._formed[0] == self._broken and body["lost"] is not None:
            self._formed[1].lose(body["lost"], body["host"])

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
