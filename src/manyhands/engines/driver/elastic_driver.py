"""The driver of a run that goes on when workers are lost: it acts on what Membership decides."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from typing_extensions import override

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.driver import OUT_OF_MEMORY, Driver
from manyhands.engines.driver.host_processes import Entrance, HostProcesses, shard_of
from manyhands.engines.driver.membership import (
    Action,
    Cause,
    FailRun,
    Form,
    Interrupt,
    Membership,
    Release,
    Report,
    RestartRun,
    StartWorker,
    StopWorker,
)
from manyhands.engines.driver.run_monitor import LAST_WORDS_S, STEPPING, Failure, Hung, how_it_ended, line_of
from manyhands.engines.driver.shard_copies import ShardCopies, copies_changed, pushes_since
from manyhands.engines.driver.stragglers import NAMED_AT, Stragglers
from manyhands.engines.faults import ORDERLY, Fault, Faults
from manyhands.errors import WorkerFailed
from manyhands.events import Event
from manyhands.worker import LastPushes, Refused

_RIGHT_AWAY = ("BadInput", "UnknownName", "Unsupported", "NotFinite", "Preempted")
"""Of manyhands' own errors those that end the run: no other worker would do better."""
_NOBODY = -(1 << 31)
_ACCUSED_AFTER_S = 0.5
"""A peer that was found gone and is still there by then is not dead: it is the connection that broke."""


def driver_of(hosts: list[HostProcesses], spec: LaunchSpec, faults: Faults, entrance: Entrance | None = None) -> Driver:
    """The driver of a launch, which survives what the spec says. entrance: where hosts may come to a run under way."""
    faults = faults.without(spec.fired)
    if spec.survive is None:
        return Driver(hosts, spec, faults=faults.planned)
    lifetime = partial(faults.lifetime, spec.generation)
    return ElasticDriver(hosts, spec, faults=faults.planned, lifetime=lifetime, entrance=entrance)


@dataclass
class ElasticDriver(Driver):
    """See Driver, and Membership for the rules. A worker's id is its process index.

    lifetime: (worker id, number of its process) -> seconds after which it is killed, see `Faults.lifetime`.
    entrance: where further hosts come in. They take free places, or wait as spares.
    """

    entrance: Entrance | None = field(default=None, kw_only=True)
    lifetime: Callable[[int, int], float] = field(default=lambda worker_id, process: math.inf, kw_only=True)
    _processes: Counter[int] = field(default_factory=Counter, init=False)  # that each worker id has had
    _dies_at: dict[int, float] = field(default_factory=dict, init=False)
    _result: Any = field(default=None, init=False)
    _result_at: float = field(default=0.0, init=False)
    _failures: dict[int, Failure] = field(default_factory=dict, init=False)  # worker id -> how it was lost, the newest
    _lost_in: dict[int, int] = field(default_factory=dict, init=False)  # worker id -> in which generation, the newest
    _hung_at: float = field(default=-math.inf, init=False)  # when a worker was last lost by a hang
    _stragglers: Stragglers = field(default_factory=Stragglers, init=False)
    _accusations: list[tuple[float, int, int, int]] = field(default_factory=list, init=False)
    """(when, by, of whom, in which generation), not yet passed on."""
    _fenced_in: dict[int, int] = field(default_factory=dict, init=False)  # worker id -> generation, until shards answer
    _pushes_of_lost: list[tuple[int, int, LastPushes]] = field(default_factory=list, init=False)
    """(the generation in which it was lost, worker id, what the server has of it), oldest first."""
    _asking_of_lost: list[tuple[int, int]] = field(
        default_factory=list, init=False
    )  # (who asks, since which generation)
    _to_tell: list[int] = field(default_factory=list, init=False)  # who was lost, and the other members are not told
    _ordered_finish: bool = field(default=False, init=False)  # of the server's shards
    _shared: dict[str, Any] = field(default_factory=dict, init=False)  # with what hosts that come later are started
    _program_fd: int = field(default=-1, init=False)
    _lost_hosts: list[HostProcesses] = field(default_factory=list, init=False)
    _leaving: list[HostProcesses] = field(default_factory=list, init=False)
    _broken: int = field(default=-1, init=False)  # the newest generation whose members were told that it is over

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.spec.survive is not None
        workers = {worker_id: self._host(worker_id) for worker_id in range(self.spec.workers)}
        # a worker that makes no progress is the monitor's to find: it knows who validates, and who waits for whom
        self.membership = Membership(
            self.spec.survive,
            workers,
            self.clock(),
            timeout_s=math.inf,
            generation=self.spec.generation,
            replica=self.spec.replica,
        )
        self.copies = ShardCopies(
            self.spec.shards,
            self.spec.copies,
            self._host_of,
            start=self._start_copy,
            stop=self._stop_process,
            report=self._report_copies,
            lost=self._lost_shard,
            closed=self._shards_closed,
        )

    @override
    def _results(self) -> list[Any]:
        """What the first member of the last generation returned, whatever its id; nothing of the others."""
        return [self._result, *[None] * (self.spec.workers - 1)]

    # -- hosts that come and go ----------------------------------------------------------------------------------------

    @override
    def _keep_for_hosts_to_come(self, shared: dict[str, Any], program: int) -> None:
        if self.entrance is not None:
            self._shared, self._program_fd = shared, os.dup(program)

    @override
    def _end(self, grace_s: float) -> None:
        if self._program_fd >= 0:
            os.close(self._program_fd)
            self._program_fd = -1
        super()._end(grace_s)

    def _admit(self, now: float) -> None:
        """Let in who waits at the entrance, unless the run is about to end."""
        over = self.membership.phase == "finishing" or self.spec.fixed_members
        if self.entrance is None or self._program_fd < 0 or over:
            return
        while admitted := self.entrance.admit([host.host for host in self.hosts if host not in self._lost_hosts]):
            host, offered = admitted
            self.hosts.append(host)
            self._busy(partial(host.start, self._shared, self._program_fd))
            self._listen_to(host)
            self.membership.host_joined(host.host, offered, now)

    def _let_leave(self, now: float) -> None:
        """Hosts that were asked to end: their workers leave in order, then the host itself."""
        for host in [host for host in self.hosts if host.preempted and host not in self._lost_hosts]:
            there = [number for number, place in self._host_of.items() if place is host]
            if host not in self._leaving:
                self._leaving.append(host)
                if self.spec.fixed_members:  # they take part from the beginning to the end
                    self.membership.host_lost(host.host, now)
                else:
                    self.membership.host_left(host.host, now)
            if all(self.monitor.processes[number].done for number in there):
                for fd in host.filenos():
                    self._selector.unregister(fd)
                for number in there:
                    self.membership.gone(number, now)
                self.hosts.remove(host)
                self._leaving.remove(host)
                host.dismiss()

    # -- hearing -----------------------------------------------------------------------------------------------------

    @override
    def _hear(self, host_processes: HostProcesses) -> None:
        """A host that starts no processes, or whose messages make no sense, is lost as one that is gone."""
        try:
            messages = host_processes.receive()
        except WorkerFailed as error:
            if not host_processes.abandon(str(error)):
                raise
            messages = host_processes.receive()
        for process_index, body in messages:
            self._take(host_processes, process_index, body)
        lost = host_processes.lost or any(body["type"] == "lost" for _, body in messages)
        if lost and host_processes not in self._lost_hosts:
            self._lost_hosts.append(host_processes)
            self.membership.host_lost(host_processes.host, self.clock())

    @override
    def _take(self, host_processes: HostProcesses, process_index: int, body: dict[str, Any]) -> None:
        now, membership = self.clock(), self.membership
        if self._host_of.get(process_index) is not host_processes:
            return  # the id is another host's by now
        if process_index < 0:
            self._take_of_shard(host_processes, process_index, body)
            return
        known = self.monitor.processes[process_index]
        match body["type"]:
            case "connect":
                self.copies.connect(process_index, body["shard"], now)
            case "pushes_of_lost":
                self._asking_of_lost.append((process_index, body["generation"]))
            case "place":
                if body["lost"] is not None:
                    self._accusations.append((now, process_index, body["lost"], body["generation"]))
                membership.requested(process_index, body["generation"], body["blank"], now)
            case "error" if body["error"] == Refused.__name__:
                self.monitor.left(process_index)
                membership.refused(process_index, now, body["message"])
            case "error" if body["family"] not in _RIGHT_AWAY:
                cause: Cause = "memory" if body["error"] in OUT_OF_MEMORY else "error"
                failure = self._error_of(process_index, body)
                self._lose(failure, cause, (body["error"], line_of(body["detail"])), f"raised {body['error']}")
            case "lost":
                self._lose(self._loss_of(process_index, body), "host")
            case "exited":
                if not known.done:
                    how = how_it_ended(body["status"])
                    if body["phase"] is not None:  # newer than its last heartbeat
                        known.phase, known.step = body["phase"], body["step"]
                        self._note_step(process_index, body, now)
                    message = f"{self._who(process_index)} {how} in phase {known.phase} at step {known.step}"
                    failure = self._failure_at(process_index, message)
                    self._lose(replace(failure, detail=body["detail"]), "death", detail=how.partition(" (")[0])
                if not (
                    self.spec.fixed_members and process_index in self._values
                ):  # else it has returned before the first
                    membership.gone(process_index, now)
            case kind:
                super()._take(host_processes, process_index, body)
                if kind == "started":
                    membership.started(process_index, now)
                    self._processes[process_index] += 1
                    self._dies_at[process_index] = now + self.lifetime(process_index, self._processes[process_index])
                elif kind == "beat":
                    self._note_step(process_index, body, now)
                    for event in body["events"]:
                        if event["type"] == "step":
                            self._stragglers.step(process_index, event.get("generation", 0), event.get("values", {}))
                elif kind == "value" and membership.phase != "finishing":
                    self._returned(process_index, body, now)

    def _take_of_shard(self, host_processes: HostProcesses, process_index: int, body: dict[str, Any]) -> None:
        """A shard without a copy ends the run when it fails, as without `survive`."""
        known = self.monitor.processes[process_index]
        match body["type"]:
            case "connection_closed":
                self.copies.connection_closed(process_index, body["worker_id"], body["applied"], body["tick"])
            case "listens":
                self.copies.listens(process_index, body["address"])
            case "copied":
                self.copies.copied(process_index, body["link"])
            case "backup_lost":
                self.copies.backup_lost(process_index, body["link"])
            case "started":
                super()._take(host_processes, process_index, body)
                self.copies.started(process_index)
            case "error" | "lost" | "exited" if self.spec.copies > 1:
                if not known.done:
                    self._failures[process_index] = self._failure_of_shard(process_index, body)
                    self.monitor.left(process_index)
                if body["type"] != "error":  # after an error it exits
                    self._paused.pop(process_index, None)
                    self.copies.gone(process_index)
            case _:
                super()._take(host_processes, process_index, body)

    def _failure_of_shard(self, process_index: int, body: dict[str, Any]) -> Failure:
        match body["type"]:
            case "error":
                return self._error_of(process_index, body)
            case "lost":
                return self._loss_of(process_index, body)
        return self._failure_at(process_index, f"{self._who(process_index)} {how_it_ended(body['status'])}")

    def _note_step(self, worker_id: int, body: dict[str, Any], now: float) -> None:
        """By its phase and step; in other phases the number is of something else."""
        if body["phase"] in STEPPING and body["step"] > 0:
            self.membership.stepped(worker_id, now, body["step"])

    def _returned(self, worker_id: int, body: dict[str, Any], now: float) -> None:
        """The first member's value is the run's result; others return once they are released, or because they leave."""
        if worker_id == self.membership.members[0]:
            self._result, self._result_at = body.get("value"), now
            self.membership.finished(worker_id, now)

    def _shards_closed(self, worker_id: int, pushes: LastPushes) -> None:
        """Nothing of this lost worker's process enters any more."""
        generation = self._fenced_in.pop(worker_id, self.membership.generation)
        self._pushes_of_lost.append((generation, worker_id, pushes))
        self._leases.recover(worker_id, pushes.numbers)
        self._release()

    def _tell_of_lost(self) -> None:
        """Who asks what the server has of lost workers is answered once all shards have said so."""
        if self.copies.fences:
            return
        asking, self._asking_of_lost = self._asking_of_lost, []
        for process_index, since in asking:
            found = pushes_since(since, self._pushes_of_lost)
            value = [[worker_id, *pushes] for worker_id, pushes in found.items()]
            self._host_of[process_index].send(process_index, {"type": "pushes_of_lost", "value": value})

    def _failure_at(self, worker_id: int, message: str) -> Failure:
        known = self.monitor.processes[worker_id]
        return Failure(rank=worker_id, phase=known.phase, step=known.step, message=message)

    def _lose(self, failure: Failure, cause: Cause, error: tuple[str, str] | None = None, detail: str = "") -> None:
        self.monitor.left(failure.rank)
        self._failures[failure.rank] = failure
        self._lost_in[failure.rank] = self.membership.generation
        self._paused.pop(failure.rank, None)
        self._to_tell.append(failure.rank)
        self._take_back(failure.rank)
        place = (failure.phase, failure.step)
        self.membership.lost(failure.rank, cause, self.clock(), place=place, error=error, detail=detail)

    def _take_back(self, worker_id: int) -> None:
        """Its process is lost, or has left: the shards refuse what still comes of it, and slices of which they have
        nothing are leased again. Idempotent."""
        if self.membership.phase == "finishing":
            return
        if self._leases.holds(worker_id):
            self._leases.lose(worker_id)
        self._asking_of_lost = [one for one in self._asking_of_lost if one[0] != worker_id]
        if self.copies.fence(worker_id):
            self._fenced_in[worker_id] = self.membership.generation
        elif not self.spec.shards and self._leases.holds(worker_id):
            self._leases.recover(worker_id, [])
            self._release()

    # -- faults that the engine was given ----------------------------------------------------------------------------

    @override
    def _inject_faults(self) -> None:
        """Besides: who leaves or joins, at a time, or once any worker has reported the step; and who has lived its time."""
        super()._inject_faults()
        now = self.clock()
        for worker_id in [worker_id for worker_id, dies_at in self._dies_at.items() if now >= dies_at]:
            del self._dies_at[worker_id]
            if not self.monitor.processes[worker_id].done and self.membership.phase != "finishing":
                self._tell_fault("mtbf", self.monitor.processes[worker_id].step)
                self._signal(worker_id, signal.SIGKILL)
        furthest = max((one.step for one in self.monitor.processes.values() if one.phase == "compute"), default=0)
        for text, fault in [*self._planned.items()]:
            due = furthest >= fault.step if fault.step is not None else now - self._began >= (fault.time or 0.0)
            if fault.what in ORDERLY and due and self.membership.generation >= 0:
                if fault.what == "leave" and fault.node not in self.monitor.processes:
                    continue  # it is reported as missed
                self._fired(text)
                self._tell_fault(text, furthest)
                if fault.what == "leave":
                    self.membership.leave_announced([fault.node], now)
                else:
                    self.membership.host_joined(self.hosts[0].host, fault.node, now)

    @override
    def _struck(self, fault: Fault) -> int:
        """Of a shard, whatever process is its primary or its backup now."""
        if fault.node >= 0:
            return fault.node
        found = self.copies.copy_of(shard_of(fault.node), "backup" if fault.backup else "primary")
        return _NOBODY if found is None else found

    def _tell_fault(self, text: str, step: int) -> None:
        seconds = self.clock() - self._began
        self._news.append(Event(type="fault", time_s=seconds, step=step, values={"fault": text}))

    # -- judging -----------------------------------------------------------------------------------------------------

    @override
    def _finished(self) -> bool:
        now = self.clock()
        self._admit(now)
        self._let_leave(now)
        self._lose_silent(now)
        self._judge_pace()
        self._accuse(now)
        self._break_off()
        for action in self.membership.decide(now):
            self._act(action)
        if self.membership.phase != "finishing":
            self.copies.act(now)
            self._tell_of_lost()
        if self.membership.phase == "finishing":
            if not self._ordered_finish:
                self._ordered_finish = True
                self.copies.finish()
            all_done = all(process.done for process in self.monitor.processes.values())
            return all_done or now - self._result_at >= LAST_WORDS_S
        super()._finished()
        return False  # workers that left in order have returned as well

    def _lose_silent(self, now: float) -> None:
        assert self.spec.survive is not None
        for known in self.monitor.processes.values():
            silent_s = known.unheard_s(now)
            if self.monitor.is_silent(self._host_of[known.number].silent_s()):
                continue  # its whole host is, which is lost by itself after silence_s
            may_be_lost = known.number >= 0 or self.spec.copies > 1
            if may_be_lost and known.started and not known.done and silent_s >= self.spec.survive.silence_s:
                heard = f"sent no heartbeat for {silent_s:.1f} s"
                failure = self._failure_at(known.number, f"{self._who(known.number)} {heard}")
                if known.number >= 0:
                    self._lose(failure, "silence", detail=heard)
                else:
                    self._failures[known.number] = failure
                    self.copies.stopped(known.number)

    def _judge_pace(self) -> None:
        """Whoever is much slower than the others leaves, as the rules say, or is named."""
        straggler = self._stragglers.judge(self.membership.members)
        if straggler is None:
            return
        worker_id, how = straggler.worker_id, f"takes {straggler}"
        if self.membership.spares(worker_id, straggler.factor):
            self._lose(self._failure_at(worker_id, f"{self._who(worker_id)} {how}"), "slow", detail=how)
        elif straggler.factor >= NAMED_AT:
            self.membership.straggles(worker_id, how)

    def _accuse(self, now: float) -> None:
        """Pass on that a member found another gone, unless that was lost meanwhile."""
        due = [one for one in self._accusations if now - one[0] >= _ACCUSED_AFTER_S]
        self._accusations = self._accusations[len(due) :]
        for _, by, of, generation in due:
            if max(self._lost_in.values(), default=-1) < generation:  # else that loss is why
                self.membership.accused(by, of, now, generation)

    @override
    def _judge_hang(self, verdict: Hung) -> None:
        if verdict.culprit < 0:
            raise self._hung(verdict)
        now = self.clock()
        if now - self._hung_at < self.spec.timeout_s:
            return  # whoever waited for the one before has made no progress either: it has its own time now
        self._hung_at = now
        known = self.monitor.processes[verdict.culprit]
        message = self._how_it_hangs(verdict, self._host_of[verdict.culprit], known)
        self._lose(self._failure_at(known.number, message), "hang", detail=f"no progress for {verdict.seconds:.0f} s")

    # -- acting ------------------------------------------------------------------------------------------------------

    def _break_off(self) -> None:
        """A generation is over: nobody waits any longer for a member that is lost, or has left it.

        Most notice by themselves. Not those who still connect, nor those whose connection to a silent host is open.
        Whoever comes late to a rendezvous while the members gather is sent away in the same turn.
        """
        membership, generation = self.membership, self.membership.generation
        lost, self._to_tell = self._to_tell, []
        if membership.phase != "gathering":
            return
        unnamed: list[int | None] = [None] if self._broken < generation else []  # a member has asked for its next place
        for worker_id in lost or unnamed:
            host = "" if worker_id is None else self._host(worker_id)
            body = {"type": "broken", "generation": generation, "lost": worker_id, "host": host}
            self._send_to(membership.members, body)
        self._broken = generation
        self._send_to([*self._rendezvous.drop(), *self._leases.send_away()], {"type": "dropped"})

    def _act(self, action: Action) -> None:
        now = self.clock()
        match action:
            case Form(generation, worker_ids):
                names, hosts = self._by_host(worker_ids)
                for host in dict.fromkeys(self._host_of[worker_id] for worker_id in worker_ids):
                    host.form(generation, hosts, names)
            case Interrupt(generation, worker_ids):
                self._send_to(worker_ids, {"type": "interrupt", "generation": generation})
            case Release(worker_ids):
                for worker_id in worker_ids:
                    self._take_back(worker_id)  # before the others can come to an epoch's end
                self._send_to(worker_ids, {"type": "over"})
            case StartWorker(worker_id, name):
                host = next(host for host in self.hosts if host.host == name and host not in self._lost_hosts)
                self._host_of[worker_id] = host
                self.copies.fence(worker_id)
                self.monitor.added(worker_id, now)
                host.start_worker(worker_id, self._faults_at_steps())
            case StopWorker(worker_id):
                self._take_back(worker_id)
                self._stop_process(worker_id)
            case Report():
                self._news.append(action.event(now - self._began))
            case FailRun(message, worker_id, _):
                error = self._given_up(message, worker_id)
                error.final = True
                raise error
            case RestartRun(message):
                raise self._given_up(message, None)

    def _stop_process(self, process_index: int) -> None:
        self.monitor.left(process_index)
        self._signal(process_index, signal.SIGKILL)

    def _start_copy(self, process_index: int) -> None:
        self.monitor.added(process_index, self.clock())
        self._host_of[process_index].start_worker(process_index, "")

    def _report_copies(self, shard: int, copies: int, lost: int | None) -> None:
        how = self._failures[lost].message if lost in self._failures else ""
        self._news.append(copies_changed(shard, copies, self.clock() - self._began, how))

    def _lost_shard(self, shard: int, process_index: int) -> None:
        """Both copies are lost."""
        failure = self._failures.get(process_index, Failure(rank=process_index, phase="", step=0, message=""))
        message = (
            f"{failure.message}. No copy of server shard {shard} is left, and with it the parameters that it held: start the "
            "run again from its newest checkpoint with resume=True (--resume)"
        )
        self._tell_observer()
        raise self._failed(replace(failure, message=message.removeprefix(". ")))

    def _by_host(self, worker_ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """The members' hosts, and who is there. Where the ids of one host are not in a row, each member stands alone: then
        all of them form a ring."""
        found: dict[str, list[int]] = {}
        for worker_id in worker_ids:
            found.setdefault(self._host(worker_id), []).append(worker_id)
        if [worker_id for ids in found.values() for worker_id in ids] == list(worker_ids):
            return list(found), list(found.values())
        return [self._host(worker_id) for worker_id in worker_ids], [[worker_id] for worker_id in worker_ids]

    def _send_to(self, worker_ids: Sequence[int], body: dict[str, Any]) -> None:
        for worker_id in worker_ids:
            self._host_of[worker_id].send(worker_id, body)

    def _given_up(self, message: str, worker_id: int | None) -> WorkerFailed:
        """Why the run does not go on, with the traceback or the stack of that loss."""
        self._tell_observer()
        first = next(iter(self._failures), -1) if worker_id is None else worker_id
        failure = self._failures.get(first, Failure(rank=first, phase="", step=0, message=""))
        error = self._failed(replace(failure, message=f"{failure.message}. {message}".lstrip(". ")))
        error.cause = next((loss["cause"] for loss in self.membership.losses if loss["worker_id"] == first), "")
        return error
