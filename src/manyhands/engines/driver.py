"""One run on a fork server, seen from the driver: hears the workers, lets the coordinator judge, and acts on the verdict."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manyhands import errors
from manyhands.engines import status
from manyhands.engines.base import Launch
from manyhands.engines.control import Closed, Message, Wire
from manyhands.engines.coordinator import Coordinator, Failed, Failure, Finished, Hung
from manyhands.engines.cores import threads_per_worker
from manyhands.engines.limits import room_for_descriptors
from manyhands.engines.shipping import ship, unship
from manyhands.engines.spawner import Spawner, import_path
from manyhands.engines.status import Status
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.signals import PREEMPTED

_POLL_S = 0.1
_EXIT_GRACE_S = 0.5  # between a worker's last message and its exit
_STACKS_S = 1.0


@dataclass
class Line:
    """The driver's end of one worker: its wire, and the file that its stacks go to."""

    wire: Wire
    stacks: int
    status: Status
    value: Any = None
    open: bool = True

    def close(self) -> None:
        self.wire.close()
        self.status.close()
        if self.stacks >= 0:
            os.close(self.stacks)
            self.stacks = -1


@dataclass
class Driver:
    """Runs one program; afterwards no process and no descriptor of the run is left, however it ended."""

    spawner: Spawner
    plan: Launch
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    lines: list[Line] = field(default_factory=list)

    def run(self, program: Any) -> list[Any]:
        with room_for_descriptors(2 * self.plan.workers):
            try:
                self._start(program)
                self._listen()
                self.spawner.end_run(_EXIT_GRACE_S)
                return [line.value for line in self.lines]
            except BaseException:
                self.spawner.end_run(grace_s=0.0)
                raise
            finally:
                for line in self.lines:
                    line.close()

    def _start(self, program: Any) -> None:
        fd = ship(program, "the program")
        self.coordinator = Coordinator(self.plan.workers, self.plan.timeout_s, self.clock())
        try:
            self.spawner.launch(self._shared(), fd)
            for rank in range(self.plan.workers):
                self._fork(rank)
        except (BrokenPipeError, ConnectionResetError):
            raise self._server_died() from None
        finally:
            os.close(fd)

    def _shared(self) -> dict[str, Any]:
        return {
            "size": self.plan.workers,
            "path": import_path(),
            "argv": sys.argv,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "threads": threads_per_worker(self.plan.workers, self.plan.threads_per_worker),
            "device": self.plan.device,
            "timeout_s": self.plan.timeout_s,
        }

    def _fork(self, rank: int) -> None:
        wire, there = Wire.pair()
        wire.sock.settimeout(self.plan.timeout_s)
        page = status.create()
        try:
            with there:
                stacks = os.memfd_create("manyhands-stacks", os.MFD_CLOEXEC)
                self.lines.append(Line(wire, stacks, Status(page)))
                self.spawner.fork(rank, there.fileno(), stacks, page)
        finally:
            os.close(page)

    def _listen(self) -> None:
        stopped = False
        with selectors.DefaultSelector() as selector:
            selector.register(self.spawner.wire, selectors.EVENT_READ, None)
            for rank, line in enumerate(self.lines):
                selector.register(line.wire, selectors.EVENT_READ, rank)
            while not self._finished():
                for key, _ in selector.select(_POLL_S):
                    self._hear(selector, key.data)
                stopped = stopped or self._stop()

    def _finished(self) -> bool:
        """Whether all have returned; raises what a failure or a hang calls for."""
        verdict = self.coordinator.verdict(self.clock())
        if isinstance(verdict, Failed):
            raise self._error(verdict.failure)
        if isinstance(verdict, Hung):
            raise self._hung(verdict)
        return isinstance(verdict, Finished)

    def _hear(self, selector: selectors.BaseSelector, rank: int | None) -> None:
        if rank is None:
            self._hear_server()
        elif self.lines[rank].open and not self._drain(rank):
            selector.unregister(self.lines[rank].wire)

    def _hear_server(self) -> None:
        try:
            messages = self.spawner.receive()
        except Closed:
            raise self._server_died() from None
        for body, _ in messages:
            if body["type"] == "started":
                self.coordinator.started(body["rank"], self.clock())
            elif body["type"] == "exited":
                self._drain(body["rank"])  # its last words come before the news of its end
                line = self.lines[body["rank"]]
                self.coordinator.exited(body["rank"], body["status"], self.host, self.clock(), line.status.read())

    def _drain(self, rank: int) -> bool:
        """Take what this worker has sent; False once its end is closed."""
        line = self.lines[rank]
        try:
            while messages := line.wire.receive(wait=False):
                for message in messages:
                    self._take(rank, message)
        except Closed:
            line.open = False
        return line.open

    def _take(self, rank: int, message: Message) -> None:
        body = message.body
        if body["type"] == "beat":
            self.coordinator.beat(rank, body["phase"], body["step"], body["idle_s"], self.clock())
            for event in body["events"]:
                self._busy(partial(self.plan.observer.event, Event(**event)))
        elif body["type"] == "ask":
            value = self._busy(partial(self.plan.observer.answer, Event(**body["event"])))
            self._tell(rank, {"type": "answer", "value": value})
        elif body["type"] == "value":
            self.lines[rank].value = _unship(message.fds[0], rank)
            self.coordinator.returned(rank)
        else:
            self._raised(body)

    def _busy(self, call: Callable[[], Any]) -> Any:
        """The observer's own work is no silence of the workers'."""
        began = self.clock()
        value = call()
        self.coordinator.excuse(self.clock() - began)
        return value

    def _stop(self) -> bool:
        reason = self._busy(self.plan.observer.stopping)
        for rank in range(self.plan.workers) if reason else ():
            self._tell(rank, {"type": "stop", "reason": reason})
        if reason == PREEMPTED:
            # A script's own handler may have something to save; the loop of train() ignores the signal.
            self.spawner.signal_workers(signal.SIGTERM)
        return bool(reason)

    def _tell(self, rank: int, body: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: the news of that is on its way
            self.lines[rank].wire.send(body)

    def _raised(self, body: dict[str, Any]) -> None:
        del body["type"]
        if not body["family"]:
            place = f"worker {body['rank']} on {self.host} failed in phase {body['phase']} at step {body['step']}"
            body["message"] = f"{place}: {body['error']}: {body['message']}"
        self.coordinator.raised(Failure(**body), self.clock())

    def _error(self, failure: Failure) -> Exception:
        """What to raise: manyhands' own errors as they were, anything else as `WorkerFailed`."""
        family = getattr(errors, failure.family, ManyhandsError)
        if failure.family and family not in (errors.PeerLost, WorkerFailed):
            error: ManyhandsError = family(failure.message)
            error.add_note(f"raised by worker {failure.rank} on {self.host}:\n{failure.detail}")
            return error
        detail = failure.detail or self._stack(failure.rank)  # a crash wrote its stack, if Python could
        return self._failed(failure.message, failure, detail)

    def _failed(self, message: str, failure: Failure, detail: str) -> WorkerFailed:
        error = WorkerFailed(
            message,
            rank=failure.rank,
            host=self.host,
            phase=failure.phase,
            step=failure.step,
            detail=detail,
            error=failure.error,
        )
        error.exit_code = failure.exit_code
        return error

    def _hung(self, verdict: Hung) -> WorkerFailed:
        now = self.clock()
        seat = self.coordinator.seats[verdict.culprit]
        table = self.coordinator.table(now)
        message = (
            f"worker {seat.rank} on {self.host} made no progress for {verdict.seconds:.1f} s, in phase {seat.phase} at step {seat.step} "
            f"(timeout_s={self.plan.timeout_s:g}). Where every worker is follows; if the work is only slow, give a longer timeout_s."
        )
        failure = Failure(rank=seat.rank, phase=seat.phase, step=seat.step, message=message)
        return self._failed(message, failure, f"{table}\n\n{self._stacks()}")

    def _stacks(self) -> str:
        """Every worker's Python stack: a signal has the interpreter write it, even where the global lock is held."""
        self.spawner.signal_workers(signal.SIGUSR1)
        deadline, before = time.monotonic() + _STACKS_S, None
        while (sizes := [os.fstat(line.stacks).st_size for line in self.lines]) != before or 0 in sizes:
            if time.monotonic() > deadline:
                break
            before = sizes
            time.sleep(0.05)
        missing = "(no stack: the process does not answer, or has ended)"
        return "\n\n".join(f"worker {rank}:\n{self._stack(rank) or missing}" for rank in range(len(self.lines)))

    def _stack(self, rank: int) -> str:
        fd = self.lines[rank].stacks
        return tidy(os.pread(fd, 1 << 20, 0).decode(errors="replace"))

    def _server_died(self) -> WorkerFailed:
        status = self.spawner.died()
        how = (
            f"was killed by signal {-status} ({signal.Signals(-status).name})"
            if status < 0
            else f"ended with exit code {status}"
        )
        message = f"the fork server on {self.host}, the parent of all workers, {how}; its own message, if any, is above"
        return WorkerFailed(message, rank=-1, host=self.host, phase="start", step=0)


def tidy(dump: str) -> str:
    """What `faulthandler` wrote, without the heartbeat's thread and the frames of the engine below the program."""
    kept = []
    for block in dump.split("\n\n"):
        lines = block.splitlines()
        if (
            any(name in line for line in lines for name in ("heartbeat.py", "Extension modules:"))
            and "Current" not in block
        ):
            continue
        ours = [i for i, line in enumerate(lines) if "worker_process.py" in line]
        kept.append("\n".join(lines[: ours[0]] if ours else lines))
    return "\n\n".join(kept).strip()


def _unship(fd: int, rank: int) -> Any:
    """A worker's value. Copied, not mapped: it outlives the run, and no descriptor may."""
    try:
        return unship(fd, mapped=False)
    except Exception as error:  # what a user's __setstate__ raises
        raise ManyhandsError(
            f"the value that worker {rank} returned cannot be rebuilt here ({type(error).__name__}: {error}): return numbers, arrays or tensors"
        ) from error
    finally:
        os.close(fd)
