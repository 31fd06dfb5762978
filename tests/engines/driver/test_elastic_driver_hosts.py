"""The driver of a run that goes on, over two hosts: whom it tells what when a worker or a host is lost. No process."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from test_driver import Scripted, Writing
from typing_extensions import override

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.driver.host_processes import Entrance, HostProcesses
from manyhands.engines.survive import Survive
from manyhands.errors import WorkerFailed


class Elastic(Scripted):
    """It is abandoned, too, where it is not the driver's own."""

    error: WorkerFailed | None = None
    own = False

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().receive()

    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        self.did.append(("start_worker", worker_id))

    @override
    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self.did.append(("form", generation, list(hosts), list(names)))

    @override
    def abandon(self, why: str) -> bool:
        self.output += [(i, {"type": "lost", "why": why, "phase": "x", "step": 0}) for i in self.process_indices]
        return not self.own


class Run:
    """Workers 0 and 1 on alpha, which is the driver's, 2 and 3 on beta; in generation 0, at step 4."""

    def __init__(self) -> None:
        self.now = 0.0
        spec = LaunchSpec(workers=4, observer=Writing(), timeout_s=60.0, survive=Survive(max_losses=9))
        self.alpha, self.beta = Elastic("alpha", [0, 1]), Elastic("beta", [2, 3])
        self.alpha.own = True
        self.hosts = {0: self.alpha, 1: self.alpha, 2: self.beta, 3: self.beta}
        self.driver = ElasticDriver([self.alpha, self.beta], spec, clock=lambda: self.now)
        for worker_id in range(4):
            self.say(worker_id, "started")
            self.place(worker_id, -1, blank=True)
        self.turn()
        for worker_id in range(4):
            self.say(worker_id, "beat", phase="compute", step=4, idle_s=0.0, events=[])

    def say(self, worker_id: int, type: str, **body: Any) -> None:
        self.hosts[worker_id].output.append((worker_id, {"type": type, **body}))

    def place(self, worker_id: int, generation: int, *, blank: bool = False, lost: int | None = None) -> None:
        self.say(worker_id, "place", generation=generation, blank=blank, lost=lost)

    def meet(self, worker_id: int, ids: list[int], generation: int = 0) -> None:
        self.say(worker_id, "arrive", name=f"ring {generation}", process_indices=ids, value=worker_id)

    def turn(self, seconds: float = 0.0) -> None:
        """What the driver does in one turn of its loop, so much later; all beat meanwhile."""
        self.now += seconds
        for process in self.driver.monitor.processes.values():
            process.last_beat_at = process.progress_at = self.now
        for host_processes in (self.alpha, self.beta):
            self.driver._hear(host_processes)
        self.driver._finished()

    def lose_beta(self) -> None:
        self.beta.output += [(i, {"type": "lost", "why": "gone", "phase": "compute", "step": 4}) for i in (2, 3)]

    def sent(self, host: Elastic, type: str) -> list[tuple[int, dict[str, Any]]]:
        return [(worker_id, body) for worker_id, body in host.sent if body["type"] == type]

    def formed(self) -> list[Any]:
        return [did for did in self.alpha.did if did[0] == "form"]


@pytest.fixture
def run() -> Run:
    return Run()


def test_each_host_forms_with_all_members_by_host(run: Run) -> None:
    place = ("form", 0, [[0, 1], [2, 3]], ["alpha", "beta"])
    assert (run.alpha.did, run.beta.did) == ([place], [place])


def test_members_of_a_host_whose_ids_are_not_in_a_row_stand_alone(run: Run) -> None:
    """Ranks go by ids, and a host's ranks must be in a row where its workers are to share memory."""
    run.driver._host_of[1] = run.beta
    names, hosts = run.driver._by_host([0, 1, 2, 3])
    assert (names, hosts) == (["alpha", "beta"], [[0], [1, 2, 3]])
    run.driver._host_of[2] = run.alpha
    names, hosts = run.driver._by_host([0, 1, 2, 3])
    assert (names, hosts) == (["alpha", "beta", "alpha", "beta"], [[0], [1], [2], [3]])


def test_whoever_waits_for_a_lost_worker_at_a_rendezvous_is_told_and_so_is_who_comes_late(run: Run) -> None:
    run.meet(0, [0, 2])
    run.turn()
    assert not run.sent(run.alpha, "dropped")
    run.say(2, "exited", status=-9, phase="start", step=4, detail="")
    run.turn()
    assert run.sent(run.alpha, "dropped") == [(0, {"type": "dropped"})]
    told = {"type": "broken", "generation": 0, "lost": 2, "host": "beta"}
    assert run.sent(run.alpha, "broken") == [(0, told), (1, told)]
    assert run.sent(run.beta, "broken") == [(3, told)]
    run.meet(3, [0, 2, 3])
    run.turn()
    assert run.sent(run.beta, "dropped") == [(3, {"type": "dropped"})]


def test_a_member_that_left_its_group_is_not_waited_for_either(run: Run) -> None:
    """It found a connection broken: nobody is lost, and those who still connect are told to begin anew."""
    run.meet(3, [0, 3])
    run.place(0, 0, lost=2)
    run.turn()
    assert run.sent(run.beta, "dropped") == [(3, {"type": "dropped"})]
    assert run.sent(run.beta, "broken")[0] == (2, {"type": "broken", "generation": 0, "lost": None, "host": ""})
    run.turn()
    assert len(run.sent(run.beta, "broken")) == 2  # once a generation
    for worker_id in (1, 2, 3):
        run.place(worker_id, 0)
    run.turn()
    assert run.formed()[-1][1] == 1
    for worker_id in (0, 3):
        run.meet(worker_id, [0, 3], generation=1)
    run.turn()
    assert run.sent(run.beta, "complete") == [(3, {"type": "complete", "name": "ring 1", "values": [0, 3]})]


def test_a_lost_host_is_lost_once_with_all_of_its_workers(run: Run) -> None:
    run.lose_beta()
    run.turn()
    losses = [(loss["worker_id"], loss["host"], loss["cause"], loss["step"]) for loss in run.driver.membership.losses]
    assert losses == [(2, "beta", "host", 4), (3, "beta", "host", 4)]
    assert run.driver.membership._host_losses == {"beta": 1}
    assert [body["lost"] for worker_id, body in run.sent(run.alpha, "broken") if worker_id == 0] == [2, 3]
    for worker_id in (0, 1):
        run.place(worker_id, 0)
    run.turn()
    assert len(run.formed()) == 1  # rule 3: what is there may live on for silence_s
    run.turn(10.0)
    assert run.formed()[1] == ("form", 1, [[0, 1]], ["alpha"])
    assert ("start_worker", 2) not in run.beta.did


def test_a_host_that_makes_no_sense_is_lost_but_for_the_drivers_own(run: Run) -> None:
    run.beta.error = WorkerFailed("no fork server", rank=-1, host="beta", phase="start", step=0)
    run.turn()
    assert [loss["cause"] for loss in run.driver.membership.losses] == ["host", "host"]
    run.alpha.error = WorkerFailed("no fork server", rank=-1, host="alpha", phase="start", step=0)
    with pytest.raises(WorkerFailed, match="no fork server"):
        run.turn()


def test_a_silent_host_is_judged_as_one_and_a_silent_worker_by_itself(run: Run) -> None:
    run.now = 12.0
    run.beta.silence_s = 9.0
    run.driver.monitor.processes[1].last_beat_at = 12.0  # 12 s ago the others did
    run.driver._lose_silent(run.now)
    assert [(loss["worker_id"], loss["cause"]) for loss in run.driver.membership.losses] == [(0, "silence")]


def test_a_process_of_a_host_that_has_the_id_no_more_is_not_heard(run: Run) -> None:
    run.driver._host_of[2] = run.alpha
    run.say(2, "exited", status=-9, phase="start", step=4, detail="")
    run.turn()
    assert run.driver.membership.losses == []


def test_where_a_member_was_lost_nobody_is_accused(run: Run) -> None:
    """Those that leave a broken group in turn look lost to each other."""
    run.say(3, "exited", status=-9, phase="exchange", step=4, detail="")
    run.place(0, 0, lost=3)
    run.place(1, 0, lost=0)
    run.turn()
    run.place(2, 0, lost=1)
    run.turn(1.0)
    assert run.driver.membership._accusations == []
    assert run.formed()[-1] == ("form", 1, [[0, 1], [2]], ["alpha", "beta"])


def test_a_joiner_with_another_program_is_refused_and_not_started_again(run: Run) -> None:
    run.say(3, "exited", status=-9, phase="exchange", step=4, detail="")
    for worker_id in (0, 1, 2):
        run.place(worker_id, 0)
    run.turn()
    assert run.beta.did[-1] == ("start_worker", 3)
    run.say(3, "started")
    run.place(3, -1, blank=True)
    run.turn()
    for worker_id in (0, 1, 2):
        run.place(worker_id, 1)
    run.turn()
    assert run.formed()[-1] == ("form", 2, [[0, 1], [2, 3]], ["alpha", "beta"])
    failure = {"rank": 3, "phase": "start", "step": 0, "message": "worker 3 on beta differs", "detail": ""}
    run.say(3, "error", error="Refused", family="BadInput", exit_code=1, secondary=False, lost=None, **failure)
    for worker_id in (0, 1, 2):
        run.place(worker_id, 2)
    run.turn()
    assert run.formed()[-1] == ("form", 3, [[0, 1], [2]], ["alpha", "beta"])
    assert run.beta.did.count(("start_worker", 3)) == 1
    assert (signal.SIGKILL, 3) in run.beta.did
    run.say(3, "exited", status=1, phase="start", step=0, detail="")
    run.turn(60.0)
    assert run.beta.did.count(("start_worker", 3)) == 1
    assert [loss["worker_id"] for loss in run.driver.membership.losses] == [3]  # the death alone


# -- hosts that come and go ---------------------------------------------------------------------------------------------


class Gate(Entrance):
    """Hosts that wait to be let in, with how many workers they offer."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Elastic, int]] = []
        self.asked: list[list[str]] = []

    @override
    def admit(self, names: Collection[str]) -> tuple[HostProcesses, int] | None:
        self.asked.append(list(names))
        return self.waiting.pop(0) if self.waiting else None


@pytest.fixture
def open_run(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Gate]:
    """Whose driver lets hosts in; started hosts note that, and nobody listens to descriptors."""
    run, gate = Run(), Gate()
    run.driver.entrance, run.driver._program_fd, run.driver._selector = gate, 7, selectors.DefaultSelector()
    monkeypatch.setattr(Elastic, "start", lambda self, shared, program: self.did.append(("start", program)))
    monkeypatch.setattr(Elastic, "filenos", lambda self: [])
    monkeypatch.setattr(Elastic, "dismiss", lambda self: self.did.append(("dismiss",)))
    return run, gate


def test_a_host_that_joins_is_a_spare_until_a_place_is_free(open_run: tuple[Run, Gate]) -> None:
    run, gate = open_run
    gamma = Elastic("gamma", [])
    gate.waiting.append((gamma, 1))
    run.turn()
    assert gamma.did == [("start", 7)]
    assert gate.asked[0] == ["alpha", "beta"]
    run.lose_beta()
    run.turn()
    run.turn(10.0)  # beta's own workers have ended by then
    assert ("start_worker", 2) in gamma.did
    assert gate.asked[-1] == ["alpha", "gamma"]  # a host of the same name may come


def test_a_host_that_comes_back_gets_its_workers_under_its_old_name(open_run: tuple[Run, Gate]) -> None:
    """Once its cooldown is over; what is lost gets none."""
    run, gate = open_run
    run.lose_beta()
    run.turn()
    again = Elastic("beta", [])
    gate.waiting.append((again, 1))
    run.turn(1.0)
    assert again.did == [("start", 7)]
    run.turn(9.5)
    assert ("start_worker", 2) in again.did
    assert not [did for did in run.beta.did if did[0] == "start_worker"]


def test_a_spare_that_is_gone_gets_no_worker(open_run: tuple[Run, Gate]) -> None:
    run, gate = open_run
    gamma = Elastic("gamma", [])
    gate.waiting.append((gamma, 1))
    run.turn()
    gamma.lost = "the connection was closed"
    run.driver._hear(gamma)
    run.lose_beta()
    run.turn()
    run.turn(10.0)
    assert gamma.did == [("start", 7)]


def test_a_host_that_is_asked_to_end_leaves_once_its_workers_have_returned(open_run: tuple[Run, Gate]) -> None:
    run, _ = open_run
    run.beta.preempted = True
    run.turn()
    assert run.sent(run.beta, "interrupt") == [(i, {"type": "interrupt", "generation": 0}) for i in (2, 3)]
    for worker_id in range(4):
        run.place(worker_id, 0)
    run.turn()
    assert run.sent(run.beta, "over") == [(2, {"type": "over"}), (3, {"type": "over"})]
    assert run.formed()[-1] == ("form", 1, [[0, 1]], ["alpha"])
    assert ("dismiss",) not in run.beta.did
    for worker_id in (2, 3):
        run.say(worker_id, "value")
    run.turn()
    assert run.beta.did[-1] == ("dismiss",)
    assert run.driver.hosts == [run.alpha]
    assert run.driver.membership.losses == []
