"""A driver without processes: what it answers, and what it makes of what its hosts say."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from heard import Heard
from scripted_hosts import Scripted
from typing_extensions import override

from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.driver import Driver
from manyhands.engines.driver.host_processes import process_indices_of
from manyhands.engines.faults import Faults
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.recording.recorder import Recorder
from manyhands.server.base import ServerSpec
from manyhands.transport.frame import FrameError

SEGMENT = {"epoch": 0, "first": 0, "until": 2, "parts": 3, "size": 3, "left": None, "rank0_warmup_ticks": 0}
NAMES = {0: "worker 0", 1: "worker 1", 2: "worker 2", -1: "server shard 0"}


class Run:
    """A driver of two hosts: workers 0 and 1 on alpha, worker 2 and the server's shards on beta."""

    def __init__(self, servers: int = 1) -> None:
        self.now = 0.0
        self.observer = Heard(step=9)
        spec = LaunchSpec(
            workers=3, server=ServerSpec(rule="add"), servers=servers, observer=self.observer, timeout_s=10.0
        )
        self.alpha = Scripted("alpha", [0, 1])
        self.beta = Scripted("beta", [2, *(-1 - shard for shard in range(servers))])
        self.driver = Driver([self.alpha, self.beta], spec, clock=lambda: self.now)
        for process_index in process_indices_of(3, servers):
            self.say(process_index, "started")

    def say(self, process_index: int, type: str, **body: Any) -> None:
        """A process sends something, and the driver receives it."""
        host = self.alpha if process_index in self.alpha.process_indices else self.beta
        host.says(process_index, type, **body)
        self.driver._hear(host)

    def beat(self, phase: str, idle_s: float, *process_indices: int, step: int = 7, events: Any = ()) -> None:
        for process_index in process_indices:
            self.say(process_index, "beat", phase=phase, step=step, idle_s=idle_s, events=list(events))

    def fail(self, rank: int, error: str, message: str, **more: Any) -> None:
        body = {"phase": "wait", "step": 0, "detail": "Traceback", "family": "", "exit_code": 1, "secondary": False}
        self.say(rank, "error", **{**body, "rank": rank, "error": error, "message": message, "lost": None, **more})

    def lease(self, process_index: int, **changes: Any) -> list[tuple[int, Any]]:
        """(process index, value) of all leases that are answered then, by host."""
        self.say(process_index, "lease", segment={**SEGMENT, **changes}, replica=process_index)
        return self.sent()

    def sent(self) -> list[tuple[int, Any]]:
        sent = [*self.alpha.sent, *self.beta.sent]
        self.alpha.sent, self.beta.sent = [], []
        return [(process_index, body["value"]) for process_index, body in sent if body["type"] == "leased"]

    def ends_with(self, words: str, error: type[ManyhandsError] = WorkerFailed) -> Any:
        with pytest.raises(error, match=words) as raised:
            self.driver._finished()
        return raised.value


def test_all_hosts_start_and_end_and_values_are_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for host, process_indices in ((run.alpha, (1, 0)), (run.beta, (2, -1))):
        for process_index in process_indices:
            host.says(process_index, "value", value=f"of {process_index}" if process_index >= 0 else None)
    run.driver._listen = lambda: [run.driver._hear(host) for host in run.driver.hosts]  # type: ignore[method-assign]
    assert run.driver.run("the program") == ["of 0", "of 1", "of 2"]
    assert run.alpha.did == run.beta.did == ["start", ("end", 0.5)]
    server = {"rule": "add", "bound": None, "options": {}, "compress": "none", "one_shard": False}
    assert (run.alpha.shared["server"], run.alpha.shared["servers"]) == (server, 1)
    run = Run()  # also where one cannot
    end = Scripted.end

    def stuck(host: Scripted, grace_s: float) -> None:
        end(host, grace_s)
        raise OSError("stuck")

    monkeypatch.setattr(Scripted, "end", stuck)
    with pytest.raises(OSError, match="stuck"):
        run.driver._end(0.0)
    assert run.alpha.did == run.beta.did == [("end", 0.0)]


# -- leases, stops, events ---------------------------------------------------------------------------------------------


def test_who_waits_while_worker_0_trains_alone_is_answered_when_it_is_done() -> None:
    run = Run()
    assert run.lease(2, rank0_warmup_ticks=1) == [(2, None)]
    assert [(who, value["part"]) for who, value in run.lease(0, rank0_warmup_ticks=1)] == [(0, 0)]
    assert [(who, value["part"]) for who, value in run.lease(0, rank0_warmup_ticks=1)] == [(0, 0), (2, 2)]


def test_a_stop_ends_who_asks_and_who_waits() -> None:
    """Every worker hears of it, and no shard."""
    run, end = Run(), {"reason": "preempted", "left": [[0, 2]] * 3}
    run.lease(1, rank0_warmup_ticks=5)
    run.observer.reason = "preempted"
    assert run.driver._stop()
    stopped = [index for host in (run.alpha, run.beta) for index, body in host.sent if body["type"] == "stop"]
    assert stopped == [0, 1, 2]
    assert run.alpha.did == run.beta.did == [signal.SIGTERM]
    assert run.sent() == [(1, end)]
    assert run.lease(0, rank0_warmup_ticks=5) == [(0, end)]


def test_leases_are_answered_before_events_are_written_and_questions_after() -> None:
    run = Run()
    run.beat("compute", 0.0, 1, events=[vars(Event(type="step", rank=1, step=4))])
    assert (len(run.lease(1)), run.observer.log) == (1, [])
    run.say(0, "ask", event=vars(Event(type="epoch", step=9)))
    assert run.observer.steps == [(1, 4)]
    assert run.observer.log == [*run.observer.events, *run.observer.asked]
    assert run.alpha.sent == [(0, {"type": "answer", "value": {"step": 9}})]


def test_who_meets_gets_everybodys_value_in_the_order_agreed() -> None:
    run = Run()
    for process_index, value in ((-1, "port 3"), (2, None), (0, [1, 2])):
        assert not run.alpha.sent
        run.say(process_index, "arrive", name="ring", process_indices=[0, 2, -1], value=value)
    met = {"type": "complete", "name": "ring", "values": [[1, 2], None, "port 3"]}
    assert run.alpha.sent == [(0, met)]
    assert run.beta.sent == [(2, met), (-1, met)]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_dead_shard_is_the_cause_and_is_named_with_its_host() -> None:
    """CASE 21"""
    run = Run(servers=2)
    run.fail(0, "PeerLost", "lost", family="PeerLost", secondary=True, lost=-2)
    assert not run.driver._finished()
    run.say(-2, "exited", status=-9, phase="wait", step=0, detail="")
    run.ends_with(r"^server shard 1 on beta was killed by signal 9 \(SIGKILL; .*in phase wait")


def test_an_error_of_no_family_of_ours_calls_nothing() -> None:
    for family in ("is_whole", "annotations", "TypeGuard", "os", "__builtins__"):
        run = Run()
        run.say(2, "error", rank=2, phase="compute", step=3, message="output", error="X", family=family)
        run.ends_with("output", ManyhandsError)


def test_a_hang_shows_every_stack_of_every_host() -> None:
    run = Run()
    run.now = 11.0
    run.beat("wait", 0.0, 0, 2, -1)
    run.beat("compute", 11.0, 1)
    error = run.ends_with("worker 1 on alpha made no progress for 11.0 s, in phase compute")
    table, *stacks = error.detail.split("\n\n")
    assert "server shard 0 |" in table
    assert stacks == [f"{who}:\nstack of {process_index}" for process_index, who in NAMES.items()]


def test_a_silent_worker_or_host_is_called_so_where_its_page_says_it_is() -> None:
    """A silent host is not asked for stacks."""
    run = Run()
    run.now = 11.0
    run.beat("validation", 10.9, 0, 2)
    run.alpha.pages = {1: ("validation", 7)}
    error = run.ends_with(r"worker 1 on alpha sent no heartbeat for 11\.0 s, in phase validation")
    assert (error.rank, error.phase, error.step) == (1, "validation", 7)
    assert "only slow" not in str(error)
    assert run.alpha.did == run.beta.did == ["stacks"]
    run = Run()
    run.now = 11.0
    run.beat("exchange", 10.9, 0, 1)
    run.beta.silence_s = 10.5
    error = run.ends_with(r"nothing came from host beta for 10\.5 s, and worker 2")
    assert "only slow" not in str(error)
    assert (run.alpha.did, run.beta.did) == (["stacks"], [])
    assert "worker 2:\n(no stack" in error.detail


def test_shipping_the_program_is_no_silence_of_the_workers() -> None:
    run = Run()

    class Slow(Scripted):
        @override
        def start(self, shared: dict[str, Any], program: int) -> None:
            run.now += 1000.0
            super().start(shared, program)

    run.driver.hosts = [Slow("alpha", [0, 1]), Slow("beta", [2, -1])]
    verdicts: list[bool] = []
    run.driver._listen = lambda: verdicts.append(run.driver._finished())  # type: ignore[method-assign]
    run.driver._values = dict.fromkeys(range(3))
    run.driver.run("the program")
    assert (run.now, verdicts) == (2000.0, [False])
    run.now += 11.0
    run.beat("compute", 11.0, *NAMES)
    run.ends_with(r"made no progress for 11\.0 s")


# -- what makes no sense -----------------------------------------------------------------------------------------------


def test_what_makes_no_sense_names_its_worker_and_host() -> None:
    with pytest.raises(ManyhandsError, match="worker 2 on beta sent a message of unknown type 'hello'"):
        Run().say(2, "hello")
    for others in ([2, 9], [0, 1], []):
        with pytest.raises(WorkerFailed, match="worker 2 on beta arrived at a rendezvous"):
            Run().say(2, "arrive", name="ring", process_indices=others, value=1)
    run = Run()
    run.lease(2, rank0_warmup_ticks=1)
    with pytest.raises(WorkerFailed, match="worker 2 on beta asked for rows out of turn"):
        run.lease(2, rank0_warmup_ticks=1)
    run.driver.spec = replace(run.driver.spec, observer=Recorder(workers=3))
    run.beat("compute", 0.0, 2, events=[{"type": "step", "rank": 2, "step": 4, "values": {"epoch": 0}}])
    with pytest.raises(WorkerFailed, match="worker 2 on beta sent an event.* 'step': it has no"):
        run.driver._tell_observer()


def test_a_fault_that_nobody_planned_ends_nothing() -> None:
    """A worker of another host may send anything."""
    for values in ({}, {"fault": [1]}, {"fault": "pause=7@step:1+1"}, {"fault": "lunch"}):
        run = Run()
        run.driver = Driver([run.alpha, run.beta], run.driver.spec, faults=Faults.parse("pause=2@step:1+1").planned)
        run.beat("compute", 0.0, 2, step=1, events=[{"type": "fault", "rank": 2, "values": values}])
        run.driver._inject_faults()
        assert [host.did for host in (run.alpha, run.beta)] == [[], []]
        run.driver._tell_unfired()
        assert run.observer.steps == [(0, 0)]


def test_rows_that_cannot_be_read_name_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the others are taken, or wait until there is room, the engines' suite says."""

    def unreadable(observer: Observer, piece: RowPiece) -> None:
        raise FrameError("nonsense")

    monkeypatch.setattr(Heard, "take_rows", unreadable)
    with pytest.raises(WorkerFailed, match="worker 2 on beta sent rows that cannot be read: nonsense"):
        Run().say(2, "rows", number=0, part=0, last=True, parts=0, rows=1, data=b"nonsense")
