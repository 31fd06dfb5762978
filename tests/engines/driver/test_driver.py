from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.driver import Driver, Rendezvous
from manyhands.engines.driver.host_processes import HostProcesses, process_indices_of
from manyhands.engines.faults import Faults
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.recording.recorder import Recorder
from manyhands.server.base import ServerSpec


class Scripted(HostProcesses):
    """Processes that send what the test gives them, and keep what is sent to them."""

    def __init__(self, host: str, process_indices: list[int]) -> None:
        self.host, self.process_indices = host, process_indices
        self.output: list[tuple[int, dict[str, Any]]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.did: list[Any] = []
        self.pages: dict[int, tuple[str, int]] = {}
        self.silence_s = 0.0
        self.shared: dict[str, Any] = {}

    @override
    def start(self, shared: dict[str, Any], program: int) -> None:
        self.shared = shared
        self.did.append("start")

    @override
    def filenos(self) -> list[int]:
        return []

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        output, self.output = self.output, []
        return output

    @override
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        self.sent.append((process_index, body))

    @override
    def signal(self, number: int, process_indices: Sequence[int] | None = None) -> None:
        self.did.append(number if process_indices is None else (number, *process_indices))

    @override
    def where(self) -> dict[int, tuple[str, int]]:
        return self.pages

    @override
    def silent_s(self) -> float:
        return self.silence_s

    @override
    def stacks(self) -> dict[int, str]:
        self.did.append("stacks")
        return {process_index: f"stack of {process_index}" for process_index in self.process_indices}

    @override
    def end(self, grace_s: float) -> None:
        self.did.append(("end", grace_s))


class Writing(Observer):
    """Keeps what happens, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.reason = ""

    @override
    def event(self, event: Event) -> None:
        self.log.append((event.rank, event.step))

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        self.log.append("asked")
        return {"step": event.step}

    @override
    def stopping(self) -> str:
        return self.reason


class Run:
    """A driver of two hosts: workers 0 and 1 on alpha, worker 2 and the server's shards on beta."""

    def __init__(self, servers: int = 1) -> None:
        self.now = 0.0
        self.observer = Writing()
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
        host_processes = self.alpha if process_index in self.alpha.process_indices else self.beta
        host_processes.output.append((process_index, {"type": type, **body}))
        self.driver._hear(host_processes)

    def lease(self, process_index: int, **changes: Any) -> None:
        self.say(process_index, "lease", segment={**SEGMENT, **changes}, replica=process_index)

    def sent(self) -> list[tuple[int, Any]]:
        """(process index, value) of all leases that were answered since this was last called, by host."""
        sent = [*self.alpha.sent, *self.beta.sent]
        self.alpha.sent, self.beta.sent = [], []
        return [(process_index, body["value"]) for process_index, body in sent if body["type"] == "leased"]

    def dies(self, process_index: int, **place: Any) -> None:
        self.say(process_index, "exited", **{"status": -9, "phase": "wait", "step": 0, "detail": "", **place})


SEGMENT = {"epoch": 0, "first": 0, "until": 2, "parts": 3, "size": 3, "left": None, "rank0_warmup_ticks": 0}


def test_all_hosts_start_and_end_and_values_are_in_rank_order() -> None:
    run = Run()
    for host_processes, process_indices in ((run.alpha, (1, 0)), (run.beta, (2, -1))):
        host_processes.output = [
            (process_index, {"type": "value", "value": f"of {process_index}" if process_index >= 0 else None})
            for process_index in process_indices
        ]
    run.driver._listen = lambda: [run.driver._hear(host_processes) for host_processes in run.driver.hosts]  # type: ignore[method-assign]
    assert run.driver.run("the program") == ["of 0", "of 1", "of 2"]
    assert run.alpha.did == run.beta.did == ["start", ("end", 0.5)]
    assert run.alpha.shared["server"] == {
        "rule": "add",
        "bound": None,
        "options": {},
        "compress": "none",
        "one_shard": False,
    }
    assert run.alpha.shared["servers"] == 1


def test_all_hosts_end_where_one_cannot() -> None:
    run = Run()

    class Stuck(Scripted):
        @override
        def end(self, grace_s: float) -> None:
            super().end(grace_s)
            raise OSError("stuck")

    run.driver.hosts = [stuck := Stuck("alpha", [0, 1]), run.beta]
    with pytest.raises(OSError, match="stuck"):
        run.driver._end(0.0)
    assert stuck.did == run.beta.did == [("end", 0.0)]


def test_every_slice_is_leased_once_across_hosts() -> None:
    run = Run()
    for process_index in (0, 2, 1, 2, 2, 1):
        run.lease(process_index)
    slices = [(value["index"], value["part"]) for _, value in run.sent()]
    assert sorted(slices) == [(index, part) for index in (0, 1) for part in (0, 1, 2)]
    run.lease(0)
    ((process_index, end),) = run.sent()
    assert (process_index, end["reason"]) == (0, "")
    assert all(front == back for front, back in end["left"])


def test_who_waits_while_worker_0_trains_alone_is_answered_when_it_is_done() -> None:
    run = Run()
    for process_index in (2, 0):
        run.lease(process_index, rank0_warmup_ticks=1)
    assert [(process_index, value and value["part"]) for process_index, value in run.sent()] == [(0, 0), (2, None)]
    run.lease(0, rank0_warmup_ticks=1)
    assert [(process_index, value["part"]) for process_index, value in run.sent()] == [(0, 0), (2, 2)]


def test_a_stop_ends_who_asks_and_who_waits() -> None:
    run = Run()
    run.lease(1, rank0_warmup_ticks=5)
    run.sent()
    run.observer.reason = "callback"
    assert run.driver._stop()
    assert run.sent() == [(1, {"reason": "callback", "left": [[0, 2]] * 3})]
    run.lease(0, rank0_warmup_ticks=5)
    assert run.sent() == [(0, {"reason": "callback", "left": [[0, 2]] * 3})]


def test_every_worker_hears_of_a_stop_and_no_shard_does() -> None:
    run = Run()
    run.observer.reason = "preempted"
    run.driver._stop()
    assert [
        process_index
        for host_processes in (run.alpha, run.beta)
        for process_index, body in host_processes.sent
        if body["type"] == "stop"
    ] == [0, 1, 2]
    assert run.alpha.did == run.beta.did == [signal.SIGTERM]


def test_leases_are_answered_before_events_are_written_and_questions_after() -> None:
    run = Run()
    event = vars(Event(type="step", rank=1, step=4))
    run.say(1, "beat", phase="compute", step=4, idle_s=0.0, events=[event])
    run.lease(1)
    assert (len(run.sent()), run.observer.log) == (1, [])
    run.say(0, "ask", event=vars(Event(type="epoch", step=9)))
    assert run.observer.log == [(1, 4), "asked"]
    assert run.alpha.sent == [(0, {"type": "answer", "value": {"step": 9}})]


def test_who_meets_gets_everybodys_value_in_the_order_agreed() -> None:
    run = Run()
    for process_index, value in ((-1, "port 3"), (2, None), (0, [1, 2])):
        assert not run.alpha.sent
        run.say(process_index, "arrive", name="ring", process_indices=[0, 2, -1], value=value)
    met = {"type": "complete", "name": "ring", "values": [[1, 2], None, "port 3"]}
    assert run.alpha.sent == [(0, met)]
    assert run.beta.sent == [(2, met), (-1, met)]


def test_a_dead_shard_is_the_cause_and_is_named_with_its_host() -> None:
    """CASE 21"""
    run = Run(servers=2)
    lost = {"rank": 0, "phase": "exchange", "step": 3, "message": "lost", "detail": "", "error": "PeerLost"}
    run.say(0, "error", **lost, family="PeerLost", exit_code=1, secondary=True, lost=-2)
    assert not run.driver._finished()
    run.dies(-2)
    with pytest.raises(
        WorkerFailed, match=r"^server shard 1 on beta was killed by signal 9 \(SIGKILL; .*in phase wait"
    ):
        run.driver._finished()


def test_a_shards_own_error_is_told_with_its_traceback() -> None:
    run = Run()
    body = {"rank": -1, "phase": "wait", "step": 0, "message": "3 != 4", "detail": "Traceback", "error": "KeyError"}
    run.say(-1, "error", **body, family="", exit_code=1, secondary=False, lost=None)
    with pytest.raises(
        WorkerFailed, match=r"server shard 0 on beta failed in phase wait .*KeyError: 3 != 4\n\nTraceback"
    ):
        run.driver._finished()


def test_our_own_errors_say_who_raised_them() -> None:
    run = Run()
    body = {
        "rank": 2,
        "phase": "start",
        "step": 0,
        "message": "no such rule",
        "detail": "Traceback",
        "error": "BadInput",
    }
    run.say(2, "error", **body, family="BadInput", exit_code=2, secondary=False, lost=None)
    with pytest.raises(BadInput, match="no such rule") as raised:
        run.driver._finished()
    assert raised.value.__notes__ == ["raised by worker 2 on beta:\nTraceback"]


def test_a_hang_shows_every_stack_of_every_host() -> None:
    run = Run()
    run.say(1, "beat", phase="compute", step=7, idle_s=0.0, events=[])
    run.now = 11.0
    for process_index in (0, 2, -1):
        run.say(process_index, "beat", phase="wait", step=7, idle_s=0.0, events=[])
    run.say(1, "beat", phase="compute", step=7, idle_s=11.0, events=[])
    with pytest.raises(WorkerFailed, match="worker 1 on alpha made no progress for 11.0 s, in phase compute") as raised:
        run.driver._finished()
    table, *stacks = raised.value.detail.split("\n\n")
    assert "server shard 0 |" in table
    assert stacks == [f"{who}:\nstack of {process_index}" for process_index, who in NAMES.items()]


def test_a_worker_without_heartbeats_is_called_silent_where_its_page_says_it_is() -> None:
    run = Run()
    run.now = 11.0
    for process_index in (0, 2):
        run.say(process_index, "beat", phase="validation", step=7, idle_s=10.9, events=[])
    run.alpha.pages = {1: ("validation", 7)}
    with pytest.raises(
        WorkerFailed, match=r"worker 1 on alpha sent no heartbeat for 11\.0 s, in phase validation"
    ) as raised:
        run.driver._finished()
    assert (raised.value.rank, raised.value.phase, raised.value.step) == (1, "validation", 7)
    assert "only slow" not in str(raised.value)
    assert run.alpha.did == run.beta.did == ["stacks"]


def test_a_silent_host_is_called_silent_and_not_asked_for_stacks() -> None:
    run = Run()
    run.now = 11.0
    for process_index in (0, 1):
        run.say(process_index, "beat", phase="exchange", step=7, idle_s=10.9, events=[])
    run.beta.silence_s = 10.5
    with pytest.raises(WorkerFailed, match=r"nothing came from host beta for 10\.5 s, and worker 2") as raised:
        run.driver._finished()
    assert "only slow" not in str(raised.value)
    assert (run.alpha.did, run.beta.did) == (["stacks"], [])
    assert "worker 2:\n(no stack" in raised.value.detail


NAMES = {0: "worker 0", 1: "worker 1", 2: "worker 2", -1: "server shard 0"}


def test_a_message_of_no_known_type_is_an_error() -> None:
    run = Run()
    with pytest.raises(ManyhandsError, match="worker 2 on beta sent a message of unknown type 'hello'"):
        run.say(2, "hello")


@pytest.mark.parametrize(
    ("type", "body"),
    [
        ("arrive", {"name": "ring", "process_indices": [2, 9], "value": 1}),
        ("arrive", {"name": "ring", "process_indices": [0, 1], "value": 1}),
        ("arrive", {"name": "ring", "process_indices": [], "value": 1}),
    ],
)
def test_a_meeting_of_others_names_who_came_to_it(type: str, body: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailed, match="worker 2 on beta arrived at a rendezvous"):
        Run().say(2, type, **body)


def test_who_asks_for_rows_out_of_turn_is_named() -> None:
    run = Run()
    run.lease(2, rank0_warmup_ticks=1)
    with pytest.raises(WorkerFailed, match="worker 2 on beta asked for rows out of turn"):
        run.lease(2, rank0_warmup_ticks=1)


@pytest.mark.parametrize("family", ["is_whole", "annotations", "TypeGuard", "os", "__builtins__"])
def test_an_error_of_no_family_of_ours_calls_nothing(family: str) -> None:
    run = Run()
    error = {"rank": 2, "phase": "compute", "step": 3, "message": "output", "error": "X", "family": family}
    run.say(2, "error", **error)
    with pytest.raises(ManyhandsError, match="output"):
        run.driver._finished()


def test_an_event_that_makes_no_sense_names_its_worker_and_host() -> None:
    run = Run()
    run.driver.spec = replace(run.driver.spec, observer=Recorder(workers=3))
    event = {"type": "step", "rank": 2, "step": 4, "values": {"epoch": 0}}
    run.say(2, "beat", phase="compute", step=4, idle_s=0.0, events=[event])
    with pytest.raises(WorkerFailed, match="worker 2 on beta sent an event.* 'step': it has no"):
        run.driver._tell_observer()


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
    for process_index in NAMES:
        run.say(process_index, "beat", phase="compute", step=0, idle_s=11.0, events=[])
    with pytest.raises(WorkerFailed, match=r"made no progress for 11\.0 s"):
        run.driver._finished()


# -- rendezvous ----------------------------------------------------------------------------------------------------------


def test_the_last_to_arrive_gets_all_values_in_order() -> None:
    rendezvous = Rendezvous()
    assert rendezvous.arrive(2, "ring", [0, 2, -1], "c") is None
    assert rendezvous.arrive(-1, "ring", [0, 2, -1], None) is None
    assert rendezvous.arrive(0, "ring", [0, 2, -1], "a") == ["a", "c", None]


def test_meetings_of_other_names_are_apart_and_names_may_be_used_again() -> None:
    rendezvous = Rendezvous()
    assert rendezvous.arrive(0, "a", [0, 1], 1) is None
    assert rendezvous.arrive(1, "b", [0, 1], 2) is None
    assert rendezvous.arrive(1, "a", [0, 1], 3) == [1, 3]
    assert rendezvous.arrive(0, "a", [0, 1], 4) is None
    assert rendezvous.arrive(1, "a", [0, 1], 5) == [4, 5]


@pytest.mark.parametrize("values", [{}, {"fault": [1]}, {"fault": "pause=7@step:1+1"}, {"fault": "lunch"}])
def test_a_fault_that_nobody_planned_ends_nothing(values: dict[str, Any]) -> None:
    """A worker of another host may send anything."""
    run = Run()
    run.driver = Driver([run.alpha, run.beta], run.driver.spec, faults=Faults.parse("pause=2@step:1+1").planned)
    run.say(2, "beat", phase="compute", step=1, idle_s=0.0, events=[{"type": "fault", "rank": 2, "values": values}])
    run.driver._inject_faults()
    assert [host.did for host in (run.alpha, run.beta)] == [[], []]
    run.driver._tell_unfired()
    assert run.observer.log == [(0, 0)]
