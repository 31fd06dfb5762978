from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.driver import Driver
from manyhands.engines.driver.host_processes import HostProcesses, seats_of
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.recording.recorder import Recorder
from manyhands.server.base import ServerSpec


class Scripted(HostProcesses):
    """A crew that says what the test tells it to, and keeps what it is told."""

    def __init__(self, host: str, seats: list[int]) -> None:
        self.host, self.seats = host, seats
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.told: list[tuple[int, dict[str, Any]]] = []
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
        said, self.said = self.said, []
        return said

    @override
    def tell(self, seat: int, body: dict[str, Any]) -> None:
        self.told.append((seat, body))

    @override
    def signal(self, number: int) -> None:
        self.did.append(number)

    @override
    def where(self) -> dict[int, tuple[str, int]]:
        return self.pages

    @override
    def silent_s(self) -> float:
        return self.silence_s

    @override
    def stacks(self) -> dict[int, str]:
        self.did.append("stacks")
        return {seat: f"stack of {seat}" for seat in self.seats}

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
        for seat in seats_of(3, servers):
            self.say(seat, "started")

    def say(self, seat: int, type: str, **body: Any) -> None:
        """A seat says something, and the driver hears it."""
        crew = self.alpha if seat in self.alpha.seats else self.beta
        crew.said.append((seat, {"type": type, **body}))
        self.driver._hear(crew)

    def lease(self, seat: int, **changes: Any) -> None:
        self.say(seat, "lease", segment={**SEGMENT, **changes})

    def told(self) -> list[tuple[int, Any]]:
        """(seat, value) of all leases that were answered since this was last called, by host."""
        told = [*self.alpha.told, *self.beta.told]
        self.alpha.told, self.beta.told = [], []
        return [(seat, body["value"]) for seat, body in told if body["type"] == "leased"]

    def dies(self, seat: int, **place: Any) -> None:
        self.say(seat, "exited", **{"status": -9, "phase": "wait", "step": 0, "detail": "", **place})


SEGMENT = {"epoch": 0, "first": 0, "until": 2, "parts": 3, "size": 3, "left": None, "alone": 0}


def test_all_hosts_start_and_end_and_values_are_in_rank_order() -> None:
    run = Run()
    for crew, seats in ((run.alpha, (1, 0)), (run.beta, (2, -1))):
        crew.said = [(seat, {"type": "value", "value": f"of {seat}" if seat >= 0 else None}) for seat in seats]
    run.driver._listen = lambda: [run.driver._hear(crew) for crew in run.driver.crews]  # type: ignore[method-assign]
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

    run.driver.crews = [stuck := Stuck("alpha", [0, 1]), run.beta]
    with pytest.raises(OSError, match="stuck"):
        run.driver._end(0.0)
    assert stuck.did == run.beta.did == [("end", 0.0)]


def test_every_slice_is_leased_once_across_hosts() -> None:
    run = Run()
    for seat in (0, 2, 1, 2, 2, 1):
        run.lease(seat)
    slices = [(value["index"], value["part"]) for _, value in run.told()]
    assert sorted(slices) == [(index, part) for index in (0, 1) for part in (0, 1, 2)]
    run.lease(0)
    ((seat, end),) = run.told()
    assert (seat, end["reason"]) == (0, "")
    assert all(front == back for front, back in end["left"])


def test_who_waits_while_worker_0_trains_alone_is_answered_when_it_is_done() -> None:
    run = Run()
    for seat in (2, 0):
        run.lease(seat, alone=1)
    assert [(seat, value and value["part"]) for seat, value in run.told()] == [(0, 0), (2, None)]
    run.lease(0, alone=1)
    assert [(seat, value["part"]) for seat, value in run.told()] == [(0, 0), (2, 2)]


def test_a_stop_ends_who_asks_and_who_waits() -> None:
    run = Run()
    run.lease(1, alone=5)
    run.told()
    run.observer.reason = "callback"
    assert run.driver._stop()
    assert run.told() == [(1, {"reason": "callback", "left": [[0, 2]] * 3})]
    run.lease(0, alone=5)
    assert run.told() == [(0, {"reason": "callback", "left": [[0, 2]] * 3})]


def test_every_worker_hears_of_a_stop_and_no_shard_does() -> None:
    run = Run()
    run.observer.reason = "preempted"
    run.driver._stop()
    assert [seat for crew in (run.alpha, run.beta) for seat, body in crew.told if body["type"] == "stop"] == [0, 1, 2]
    assert run.alpha.did == run.beta.did == [signal.SIGTERM]


def test_leases_are_answered_before_events_are_written_and_questions_after() -> None:
    run = Run()
    event = vars(Event(type="step", rank=1, step=4))
    run.say(1, "beat", phase="compute", step=4, idle_s=0.0, events=[event])
    run.lease(1)
    assert (len(run.told()), run.observer.log) == (1, [])
    run.say(0, "ask", event=vars(Event(type="epoch", step=9)))
    assert run.observer.log == [(1, 4), "asked"]
    assert run.alpha.told == [(0, {"type": "answer", "value": {"step": 9}})]


def test_who_meets_gets_everybodys_value_in_the_order_agreed() -> None:
    run = Run()
    for seat, value in ((-1, "port 3"), (2, None), (0, [1, 2])):
        assert not run.alpha.told
        run.say(seat, "meet", name="ring", seats=[0, 2, -1], value=value)
    met = {"type": "met", "name": "ring", "values": [[1, 2], None, "port 3"]}
    assert run.alpha.told == [(0, met)]
    assert run.beta.told == [(2, met), (-1, met)]


def test_a_dead_shard_is_the_cause_and_is_named_with_its_host() -> None:
    """CASE 21"""
    run = Run(servers=2)
    lost = {"rank": 0, "phase": "exchange", "step": 3, "message": "lost", "detail": "", "error": "PeerLost"}
    run.say(0, "error", **lost, family="PeerLost", exit_code=1, secondary=True)
    assert not run.driver._finished()
    run.dies(-2)
    with pytest.raises(
        WorkerFailed, match=r"^server shard 1 on beta was killed by signal 9 \(SIGKILL; .*in phase wait"
    ):
        run.driver._finished()


def test_a_shards_own_error_is_told_with_its_traceback() -> None:
    run = Run()
    body = {"rank": -1, "phase": "wait", "step": 0, "message": "3 != 4", "detail": "Traceback", "error": "KeyError"}
    run.say(-1, "error", **body, family="", exit_code=1, secondary=False)
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
    run.say(2, "error", **body, family="BadInput", exit_code=2, secondary=False)
    with pytest.raises(BadInput, match="no such rule") as raised:
        run.driver._finished()
    assert raised.value.__notes__ == ["raised by worker 2 on beta:\nTraceback"]


def test_a_hang_shows_every_stack_of_every_host() -> None:
    run = Run()
    run.say(1, "beat", phase="compute", step=7, idle_s=0.0, events=[])
    run.now = 11.0
    for seat in (0, 2, -1):
        run.say(seat, "beat", phase="wait", step=7, idle_s=0.0, events=[])
    run.say(1, "beat", phase="compute", step=7, idle_s=11.0, events=[])
    with pytest.raises(WorkerFailed, match="worker 1 on alpha made no progress for 11.0 s, in phase compute") as raised:
        run.driver._finished()
    table, *stacks = raised.value.detail.split("\n\n")
    assert "server shard 0 |" in table
    assert stacks == [f"{who}:\nstack of {seat}" for seat, who in NAMES.items()]


def test_a_worker_without_heartbeats_is_called_silent_where_its_page_says_it_is() -> None:
    run = Run()
    run.now = 11.0
    for seat in (0, 2):
        run.say(seat, "beat", phase="validation", step=7, idle_s=10.9, events=[])
    run.alpha.pages = {1: ("validation", 7)}
    with pytest.raises(WorkerFailed, match=r"worker 1 on alpha is silent.* for 11\.0 s, in phase validation") as raised:
        run.driver._finished()
    assert (raised.value.rank, raised.value.phase, raised.value.step) == (1, "validation", 7)
    assert "only slow" not in str(raised.value)
    assert run.alpha.did == run.beta.did == ["stacks"]


def test_a_silent_host_is_called_silent_and_not_asked_for_stacks() -> None:
    run = Run()
    run.now = 11.0
    for seat in (0, 1):
        run.say(seat, "beat", phase="exchange", step=7, idle_s=10.9, events=[])
    run.beta.silence_s = 10.5
    with pytest.raises(
        WorkerFailed, match=r"host beta is silent: nothing came from it for 10\.5 s, and worker 2"
    ) as raised:
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
        ("meet", {"name": "ring", "seats": [2, 9], "value": 1}),
        ("meet", {"name": "ring", "seats": [0, 1], "value": 1}),
        ("meet", {"name": "ring", "seats": [], "value": 1}),
    ],
)
def test_a_meeting_of_others_names_who_came_to_it(type: str, body: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailed, match="worker 2 on beta came to a meeting"):
        Run().say(2, type, **body)


def test_who_asks_for_rows_out_of_turn_is_named() -> None:
    run = Run()
    run.lease(2, alone=1)
    with pytest.raises(WorkerFailed, match="worker 2 on beta asked for rows out of turn"):
        run.lease(2, alone=1)


@pytest.mark.parametrize("family", ["is_whole", "annotations", "TypeGuard", "os", "__builtins__"])
def test_an_error_of_no_family_of_ours_calls_nothing(family: str) -> None:
    run = Run()
    error = {"rank": 2, "phase": "compute", "step": 3, "message": "said", "error": "X", "family": family}
    run.say(2, "error", **error)
    with pytest.raises(ManyhandsError, match="said"):
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

    run.driver.crews = [Slow("alpha", [0, 1]), Slow("beta", [2, -1])]
    verdicts: list[bool] = []
    run.driver._listen = lambda: verdicts.append(run.driver._finished())  # type: ignore[method-assign]
    run.driver._values = dict.fromkeys(range(3))
    run.driver.run("the program")
    assert (run.now, verdicts) == (2000.0, [False])
    run.now += 11.0
    for seat in NAMES:
        run.say(seat, "beat", phase="compute", step=0, idle_s=11.0, events=[])
    with pytest.raises(WorkerFailed, match=r"made no progress for 11\.0 s"):
        run.driver._finished()
