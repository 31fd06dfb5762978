"""The driver of a run that goes on: whom it tells what when a worker, a host or a copy of a shard is lost. No process."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from heard import Heard
from scripted_hosts import Scripted
from typing_extensions import override

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.driver.host_processes import Entrance, HostProcesses
from manyhands.engines.survive import Survive
from manyhands.errors import WorkerFailed
from manyhands.server.base import ServerSpec


class Run:
    """Workers 0 and 1 on alpha, which is the driver's, 2 and 3 on beta; in generation 0, at step 4."""

    def __init__(self) -> None:
        self.now = 0.0
        spec = LaunchSpec(workers=4, observer=Heard(), timeout_s=60.0, survive=Survive(max_losses=9))
        self.alpha, self.beta = Scripted("alpha", [0, 1]), Scripted("beta", [2, 3])
        self.alpha.own = True
        self.hosts = {0: self.alpha, 1: self.alpha, 2: self.beta, 3: self.beta}
        self.driver = ElasticDriver([self.alpha, self.beta], spec, clock=lambda: self.now)
        for worker_id in range(4):
            self.hosts[worker_id].says(worker_id, "started")
        self.place(-1, 0, 1, 2, 3, blank=True).turn()
        for worker_id in range(4):
            self.hosts[worker_id].says(worker_id, "beat", phase="compute", step=4, idle_s=0.0, events=[])

    def place(self, generation: int, *ids: int, blank: bool = False, lost: int | None = None) -> Run:
        """These ask for a place after this generation."""
        for worker_id in ids:
            self.hosts[worker_id].says(worker_id, "place", generation=generation, blank=blank, lost=lost)
        return self

    def meet(self, worker_id: int, ids: list[int], generation: int = 0) -> None:
        self.hosts[worker_id].says(worker_id, "arrive", name=f"ring {generation}", process_indices=ids, value=worker_id)

    def exits(self, worker_id: int, phase: str = "exchange") -> None:
        self.hosts[worker_id].exits(worker_id, -9, phase, 4)

    def turn(self, seconds: float = 0.0) -> None:
        """What the driver does in one turn of its loop, so much later; all beat meanwhile."""
        self.now += seconds
        for process in self.driver.monitor.processes.values():
            process.last_beat_at = process.progress_at = self.now
        for host in (self.alpha, self.beta):
            self.driver._hear(host)
        self.driver._finished()

    def lose_beta(self) -> None:
        for worker_id in (2, 3):
            self.beta.says(worker_id, "lost", why="gone", phase="compute", step=4)
        self.turn()

    def sent(self, host: Scripted, type: str) -> list[tuple[int, dict[str, Any]]]:
        return [(worker_id, body) for worker_id, body in host.sent if body["type"] == type]

    def formed(self) -> list[Any]:
        return [did for did in self.alpha.did if did[0] == "form"]

    def losses(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(loss[name] for name in names) for loss in self.driver.membership.losses]  # type: ignore[literal-required]


@pytest.fixture
def run() -> Run:
    return Run()


def test_each_host_forms_with_all_members_by_host(run: Run) -> None:
    """Ranks go by ids, and a host's ranks must be in a row where its workers are to share memory: else they stand alone."""
    place = ("form", 0, [[0, 1], [2, 3]], ["alpha", "beta"])
    assert (run.alpha.did, run.beta.did) == ([place], [place])
    run.driver._host_of[1] = run.beta
    assert run.driver._by_host([0, 1, 2, 3]) == (["alpha", "beta"], [[0], [1, 2, 3]])
    run.driver._host_of[2] = run.alpha
    assert run.driver._by_host([0, 1, 2, 3]) == (["alpha", "beta", "alpha", "beta"], [[0], [1], [2], [3]])


def test_whoever_waits_for_a_lost_worker_at_a_rendezvous_is_told_and_so_is_who_comes_late(run: Run) -> None:
    run.meet(0, [0, 2])
    run.turn()
    assert not run.sent(run.alpha, "dropped")
    run.exits(2, "start")
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
    run.place(0, 0, lost=2).turn()
    assert run.sent(run.beta, "dropped") == [(3, {"type": "dropped"})]
    assert run.sent(run.beta, "broken")[0] == (2, {"type": "broken", "generation": 0, "lost": None, "host": ""})
    run.turn()
    assert len(run.sent(run.beta, "broken")) == 2  # once a generation
    run.place(0, 1, 2, 3).turn()
    assert run.formed()[-1][1] == 1
    for worker_id in (0, 3):
        run.meet(worker_id, [0, 3], generation=1)
    run.turn()
    assert run.sent(run.beta, "complete") == [(3, {"type": "complete", "name": "ring 1", "values": [0, 3]})]


def test_a_lost_host_is_lost_once_with_all_of_its_workers(run: Run) -> None:
    run.lose_beta()
    assert run.losses("worker_id", "host", "cause", "step") == [(2, "beta", "host", 4), (3, "beta", "host", 4)]
    assert run.driver.membership._host_losses == {"beta": 1}
    assert [body["lost"] for worker_id, body in run.sent(run.alpha, "broken") if worker_id == 0] == [2, 3]
    run.place(0, 0, 1).turn()
    assert len(run.formed()) == 1  # rule 3: what is there may live on for silence_s
    run.turn(10.0)
    assert run.formed()[1] == ("form", 1, [[0, 1]], ["alpha"])
    assert ("start_worker", 2) not in run.beta.did


def test_a_host_that_makes_no_sense_is_lost_but_for_the_drivers_own(run: Run) -> None:
    run.beta.error = WorkerFailed("no fork server", rank=-1, host="beta", phase="start", step=0)
    run.turn()
    assert run.losses("cause") == [("host",), ("host",)]
    run.alpha.error = WorkerFailed("no fork server", rank=-1, host="alpha", phase="start", step=0)
    with pytest.raises(WorkerFailed, match="no fork server"):
        run.turn()


def test_a_silent_host_is_judged_as_one_and_a_silent_worker_by_itself(run: Run) -> None:
    run.now = 12.0
    run.beta.silence_s = 9.0
    run.driver.monitor.processes[1].last_beat_at = 12.0  # 12 s ago the others did
    run.driver._lose_silent(run.now)
    assert run.losses("worker_id", "cause") == [(0, "silence")]


def test_a_process_of_a_host_that_has_the_id_no_more_is_not_heard(run: Run) -> None:
    run.driver._host_of[2] = run.alpha
    run.exits(2)
    run.turn()
    assert run.losses() == []


def test_where_a_member_was_lost_nobody_is_accused(run: Run) -> None:
    """Those that leave a broken group in turn look lost to each other."""
    run.exits(3)
    run.place(0, 0, lost=3).place(0, 1, lost=0).turn()
    run.place(0, 2, lost=1).turn(1.0)
    assert run.driver.membership._accusations == []
    assert run.formed()[-1] == ("form", 1, [[0, 1], [2]], ["alpha", "beta"])


def test_a_joiner_with_another_program_is_refused_and_not_started_again(run: Run) -> None:
    run.exits(3)
    run.place(0, 0, 1, 2).turn()
    assert run.beta.did[-1] == ("start_worker", 3)
    run.beta.says(3, "started")
    run.place(-1, 3, blank=True).turn()
    run.place(1, 0, 1, 2).turn()
    assert run.formed()[-1] == ("form", 2, [[0, 1], [2, 3]], ["alpha", "beta"])
    failure = {"rank": 3, "phase": "start", "step": 0, "message": "worker 3 on beta differs", "detail": ""}
    run.beta.says(3, "error", error="Refused", family="BadInput", exit_code=1, secondary=False, lost=None, **failure)
    run.place(2, 0, 1, 2).turn()
    assert run.formed()[-1] == ("form", 3, [[0, 1], [2]], ["alpha", "beta"])
    assert run.beta.did.count(("start_worker", 3)) == 1
    assert (signal.SIGKILL, 3) in run.beta.did
    run.beta.exits(3, 1, "start", 0)
    run.turn(60.0)
    assert run.beta.did.count(("start_worker", 3)) == 1
    assert run.losses("worker_id") == [(3,)]  # the death alone


# -- hosts that come and go ---------------------------------------------------------------------------------------------


class Gate(Entrance):
    """Hosts that wait to be let in, with how many workers they offer."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Scripted, int]] = []
        self.asked: list[list[str]] = []

    @override
    def admit(self, names: Collection[str]) -> tuple[HostProcesses, int] | None:
        self.asked.append(list(names))
        return self.waiting.pop(0) if self.waiting else None


@pytest.fixture
def gate(run: Run, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The run's driver lets hosts in; started hosts note that, and nobody listens to descriptors."""
    run.driver.entrance, run.driver._program_fd, run.driver._selector = Gate(), 7, selectors.DefaultSelector()
    monkeypatch.setattr(Scripted, "start", lambda self, shared, program: self.did.append(("start", program)))
    monkeypatch.setattr(Scripted, "dismiss", lambda self: self.did.append(("dismiss",)))
    return run.driver.entrance


def test_a_host_that_joins_is_a_spare_until_a_place_is_free(run: Run, gate: Gate) -> None:
    gamma, gone = Scripted("gamma", []), Scripted("delta", [])
    for spare in (gone, gamma):
        gate.waiting.append((spare, 1))
        run.turn()
        assert spare.did == [("start", 7)]
    assert gate.asked[0] == ["alpha", "beta"]
    gone.lost = "the connection was closed"
    run.driver._hear(gone)
    run.lose_beta()
    run.turn(10.0)  # beta's own workers have ended by then
    assert ("start_worker", 2) in gamma.did
    assert gone.did == [("start", 7)]
    assert gate.asked[-1] == ["alpha", "gamma"]  # a host of the same name may come


@pytest.mark.usefixtures("gate")
def test_a_host_that_is_asked_to_end_leaves_once_its_workers_have_returned(run: Run) -> None:
    run.beta.preempted = True
    run.turn()
    assert run.sent(run.beta, "interrupt") == [(i, {"type": "interrupt", "generation": 0}) for i in (2, 3)]
    run.place(0, 0, 1, 2, 3).turn()
    assert run.sent(run.beta, "over") == [(2, {"type": "over"}), (3, {"type": "over"})]
    assert run.formed()[-1] == ("form", 1, [[0, 1]], ["alpha"])
    assert ("dismiss",) not in run.beta.did
    for worker_id in (2, 3):
        run.beta.says(worker_id, "value")
    run.turn()
    assert run.beta.did[-1] == ("dismiss",)
    assert run.driver.hosts == [run.alpha]
    assert run.losses() == []


# -- server shards with copies, and workers that all stay ------------------------------------------------------------------


class Served:
    """Workers 0 and 1 in generation 0; one shard, whose copies are the processes -1 and -2."""

    def __init__(self, silence_s: float = 10.0) -> None:
        self.now, self.host = 0.0, Scripted("alpha", [0, 1, -1, -2])
        survive = Survive(copies=2, silence_s=silence_s)
        spec = LaunchSpec(workers=2, server=ServerSpec(rule="add"), observer=Heard(), timeout_s=60.0, survive=survive)
        self.driver = ElasticDriver([self.host], spec, clock=lambda: self.now)
        for index in (0, 1, -1, -2):
            self.host.says(index, "started")
        for worker_id in (0, 1):
            self.host.says(worker_id, "place", generation=-1, blank=True, lost=None)
        self.turn()
        self.host.says(-1, "copied", link=0)
        self.turn()

    def lose(self, **statuses: int) -> Served:
        """These processes exit, by name."""
        for name, status in statuses.items():
            self.host.exits({"worker": 1, "primary": -1, "backup": -2}[name], status)
        self.turn()
        return self

    def turn(self, seconds: float = 0.0, silent: Sequence[int] = ()) -> bool:
        self.now += seconds
        for process in self.driver.monitor.processes.values():
            if process.number not in silent:
                process.last_beat_at = process.progress_at = self.now
        self.driver._hear(self.host)
        return self.driver._finished()

    @property
    def changes(self) -> list[str]:
        return [event.values["message"] for event in self.driver._news if event.type == "change"]


def test_a_lost_copy_is_started_again_and_reported_and_a_silent_one_once_it_is_gone() -> None:
    for index, name in ((-1, "primary"), (-2, "backup")):
        run = Served().lose(**{name: -9})
        assert ("start_worker", index) in run.host.did
        (message,) = run.changes
        copy = f"server shard 0 (copy {-1 - index}) on alpha was killed by signal 9"
        assert f"server shard 0 has one copy ({copy}" in message
    run = Served()
    failure = {"rank": -2, "phase": "serve", "step": 4, "message": "no room", "detail": "a traceback"}
    run.host.says(-2, "error", **failure, error="ValueError", family="", exit_code=1, secondary=False, lost=None)
    run.lose(backup=1)  # its error is its loss
    assert ("start_worker", -2) in run.host.did
    assert "ValueError: no room" in run.changes[0]
    for index, name in ((-1, "primary"), (-2, "backup")):
        run = Served(silence_s=2.0)
        run.turn(2.5, silent=[index])
        assert (9, index) in run.host.did
        assert ("start_worker", index) not in run.host.did
        assert run.lose(**{name: -9}).host.did.count(("start_worker", index)) == 1


def test_a_lost_worker_or_both_copies_end_the_run() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 on alpha was killed by signal 9.*max_losses is 0"):
        Served().lose(worker=-9)
    with pytest.raises(WorkerFailed, match=r"copy 1\) on alpha was killed by signal 11.*No copy of .*--resume"):
        Served().lose(primary=-9, backup=-11)
