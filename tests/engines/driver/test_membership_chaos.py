"""Searches random schedules of what befalls workers for one in which `Membership` breaks a promise.

Each simulated worker starts, asks for a place, computes steps in lockstep with its generation, notices deaths late, and ends.
Messages of one worker to and from the driver stay in order, those of several do not. `World(seed).run()` repeats a failure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import pytest

import chaos
from chaos import expect, first_broken, keeps
from manyhands.engines.driver.membership import (
    Action,
    FailRun,
    Form,
    Interrupt,
    Membership,
    Release,
    RestartRun,
    StartWorker,
    StopWorker,
)
from manyhands.engines.survive import Survive

STEPS = 4  # of a whole run
TIMEOUT_S, SILENCE_S, WAIT_S, COOLDOWN_S = 30.0, 4.0, 60.0, 5.0
WHATS = ("kill", "kill", "kill", "hang", "cut", "cut", "leave", "join", "lose_host", "silence")


@dataclass(eq=False)
class Process:
    """One process of a worker id. group: the generation that it computes in, None while it waits or starts."""

    worker_id: int
    host: str
    alive: bool = True
    hung: bool = False
    cut_off: bool = False  # the driver does not hear it, nor it the driver
    released: bool = False  # by the driver's answer
    stopped: bool = False
    generation: int = -1
    group: int | None = None
    blank: bool = True
    root: int = -1  # the generation in which its history began at step 0
    step: int = 0
    round: int = 0  # of its generation: 0 is the first collective, each further one is a step
    delivers: bool = False


@dataclass(eq=False)
class Generation:
    number: int
    processes: list[Process]
    arrived: dict[int, set[int]] = field(default_factory=dict)  # by round
    agreed: tuple[int, int] = (0, 0)  # (root, step) after the first collective


class World(chaos.World):
    BOUND_S = 600.0

    def __init__(self, seed: int, kind: type[Membership] = Membership) -> None:
        super().__init__(seed)
        draw = self.random
        size = draw.randint(1, 4)
        hosts = {worker_id: f"host{worker_id * draw.randint(1, 2) // max(1, size)}" for worker_id in range(size)}
        self.rules = Survive(
            max_losses=draw.choice([1, 2, 4, "any", "any"]),
            min_workers=draw.randint(1, min(2, size)),
            max_workers=size + draw.randint(0, 2),
            replace=draw.random() < 0.6,
            max_restarts=draw.randint(0, 1),
            silence_s=SILENCE_S,
            wait_s=WAIT_S,
            cooldown_s=COOLDOWN_S,
        )
        self.membership = kind(self.rules, hosts, 0.0, timeout_s=TIMEOUT_S)
        self.processes: dict[int, Process] = {}
        self.all: list[Process] = []
        self.generations: dict[int, Generation] = {}
        self.actions: set[type] = set()  # whatever kinds of them the driver was given
        self.committed: dict[int, int] = {}  # {step: the root of the history that it is in}
        self.events = 0  # deaths, leaves, joins, accusations: each may change the membership once
        self.harmed: set[int] = set()  # worker ids to which something happened, so that they may be lost
        self.lost_hosts: set[str] = set()
        self.tick_at = float("inf")
        for worker_id, host in hosts.items():
            self.launch(worker_id, host)
        self.befall((0, 1, 1, 2, 3, 4), 2.5, [f"do_{what}" for what in WHATS])

    def run(self) -> None:
        self.decide()
        super().run()

    # -- between workers and the driver ------------------------------------------------------------------------------

    def to_driver(self, process: Process, deliver: Callable[[], None]) -> None:
        """In order for each worker; nothing arrives of a process whose end or loss the driver knows."""

        def arrive() -> None:
            if self.processes.get(process.worker_id) is process and not process.stopped:
                deliver()
                self.decide()

        if not process.cut_off:
            self.send((process, "to the driver"), arrive)

    def to_worker(self, process: Process, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            if process.alive and not process.hung and not process.cut_off:
                deliver()

        self.send((process, "to it"), arrive)

    def decide(self) -> None:
        if self.end:
            return
        for action in self.membership.decide(self.now):
            self.actions.add(type(action))
            self.act(action)
        expect(self.end or self.membership.decide(self.now) == [], "an action was given twice, or too late")
        deadline = self.membership.next_deadline()
        if deadline is not None and not self.end:
            expect(deadline > self.now, f"the next deadline, {deadline}, is not after {self.now}")
            if not self.now < self.tick_at <= deadline:
                self.tick_at = deadline
                self.after(deadline - self.now, self.decide)

    def act(self, action: Any) -> None:
        match action:
            case Form(generation, worker_ids):
                self.form(generation, worker_ids)
            case Interrupt(generation, worker_ids):
                for process in map(self.processes.__getitem__, worker_ids):
                    self.to_worker(process, partial(self.interrupted, process, generation))
            case StartWorker(worker_id, host):
                old = self.processes.pop(worker_id, None)
                expect(old is None or not old.alive, f"worker {worker_id} is started beside its own process")
                self.events += 1
                self.after(self.random.uniform(0, 0.5), lambda: self.launch(worker_id, host))
            case StopWorker(worker_id):
                if process := self.processes.get(worker_id):
                    process.stopped = True
                    if not process.cut_off:
                        self.after(self.late(), partial(self.die, process))
                else:  # it is being started
                    self.after(0.6, partial(self.stop_late, worker_id))
            case Release(worker_ids):
                for process in map(self.processes.__getitem__, worker_ids):
                    process.released = True
                    self.to_worker(process, partial(self.die, process))
            case RestartRun() | FailRun():
                self.check_why(action)
                self.end = type(action).__name__
                for process in self.all:  # as the driver does
                    process.stopped, process.alive = True, False

    def stop_late(self, worker_id: int) -> None:
        if process := self.processes.get(worker_id):
            process.stopped = True
            self.die(process)

    # -- what workers do ---------------------------------------------------------------------------------------------

    def launch(self, worker_id: int, host: str) -> None:
        if self.end:
            return
        process = self.processes[worker_id] = Process(worker_id, host)
        self.all.append(process)
        self.to_driver(process, lambda: self.membership.started(worker_id, self.now))
        if self.random.random() < 0.08:  # it does not come far
            self.after(self.random.uniform(0, 0.3), partial(self.kill, process))
        self.after(self.random.uniform(0, 0.4), partial(self.request, process))

    def request(self, process: Process) -> None:
        if not process.alive or process.hung:
            return
        process.group = None
        arguments = (process.worker_id, process.generation, process.blank)
        for _ in range(self.random.choice((1, 1, 2))):  # a repeated request is harmless
            self.to_driver(process, lambda: self.membership.requested(*arguments, self.now))

    def interrupted(self, process: Process, generation: int) -> None:
        if process.delivers or process.generation < 0:
            return
        if process.group is not None and process.generation == generation:
            self.request(process)

    def form(self, number: int, worker_ids: tuple[int, ...]) -> None:
        expect(number == len(self.generations), f"generation {number} follows {len(self.generations) - 1}")
        expect(list(worker_ids) == sorted(set(worker_ids)), f"{worker_ids} are not in order")
        expect(len(worker_ids) >= self.rules.min_workers, f"{worker_ids} are fewer than min_workers")
        for process in self.all:  # rule 1 and rule 3
            computes = process.alive and process.group is not None
            expect(not computes, f"worker {process.worker_id} computes while generation {number} is formed")
        members = [self.processes[worker_id] for worker_id in worker_ids]
        expect(not any(process.stopped for process in members), "a worker that was stopped gets a place")
        if all(process.blank for process in members):
            ahead = [process.worker_id for process in self.all if process.alive and not process.blank]
            expect(not [one for one in ahead if one not in self.harmed], f"starts anew, and {ahead} have state")
            expect(not self.committed, f"starts anew after steps {list(self.committed)}")
        self.events += any(not process.alive for process in members)  # peers noticed before the driver: once more
        made = self.generations[number] = Generation(number, members)
        for process in members:
            self.to_worker(process, partial(self.join, process, made))

    def join(self, process: Process, made: Generation) -> None:
        process.generation = process.group = made.number
        process.round = 0
        for peer in made.processes:
            if not peer.alive:
                self.notice(process, made.number)
        self.compute(process, made)

    def compute(self, process: Process, made: Generation) -> None:
        number = process.round

        def arrive() -> None:
            if not self.in_step(process, made, number):
                return
            arrived = made.arrived.setdefault(number, set())
            arrived.add(process.worker_id)
            if len(arrived) == len(made.processes):
                if number == 0:  # the source of truth: the furthest, then the lowest rank
                    source = max(made.processes, key=lambda one: (not one.blank, one.step, -one.worker_id))
                    made.agreed = (made.number if source.blank else source.root, source.step)
                for one in made.processes:
                    self.after(self.late(), partial(self.complete, one, made, number))

        self.after(self.random.uniform(0.02, 0.3), arrive)

    def in_step(self, process: Process, made: Generation, number: int) -> bool:
        return process.alive and not process.hung and process.group == made.number and process.round == number

    def complete(self, process: Process, made: Generation, number: int) -> None:
        if not self.in_step(process, made, number):
            return
        if number == 0:
            process.blank, (process.root, process.step) = False, made.agreed
            behind = max(self.committed, default=-1) - process.step
            expect(behind <= 0, f"generation {made.number} goes on {behind + 1} steps behind")
        else:
            self.commit(process, made)
        process.round += 1
        if process.step < STEPS:
            self.compute(process, made)
        elif process is made.processes[0]:
            process.delivers = True
            self.after(self.random.uniform(0, 0.6), partial(self.deliver, process))
        else:
            self.request(process)

    def commit(self, process: Process, made: Generation) -> None:
        expect(made.number == max(self.generations), f"generation {made.number} commits after a newer one was formed")
        root = self.committed.setdefault(process.step, process.root)
        expect(root == process.root, f"step {process.step} is in two histories, {root} and {process.root}")
        process.step += 1
        self.to_driver(process, lambda: self.membership.stepped(process.worker_id, self.now))

    def deliver(self, process: Process) -> None:
        if process.alive and not process.hung:
            self.to_driver(process, lambda: self.membership.finished(process.worker_id, self.now))
            self.after(1.0, partial(self.die, process))  # it has returned

    # -- what befalls ------------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        if process.alive:
            self.events += 1
            self.harmed.add(process.worker_id)
            self.die(process)

    def die(self, process: Process) -> None:
        """The peers notice, and the driver: whatever it sent before arrives before, or never."""
        if not process.alive:
            return
        self.end_process(process)

        def known() -> None:
            if self.processes.get(process.worker_id) is process and not self.end:
                del self.processes[process.worker_id]
                if process.released or process.stopped:
                    self.membership.gone(process.worker_id, self.now)
                else:
                    self.membership.lost(process.worker_id, "death", self.now, place=("compute", process.step))
                self.decide()

        sent_at = self.last_at.get((process, "to the driver"), 0.0)
        self.after(max(self.late(), sent_at - self.now if self.random.random() < 0.5 else 0.0), known)

    def end_process(self, process: Process) -> None:
        process.alive = False
        for peer in self.all:
            if peer.group is not None and process in self.generations[peer.group].processes:
                self.notice(peer, peer.group)

    def notice(self, process: Process, group: int) -> None:
        def peer_lost() -> None:
            if process.alive and not process.hung and not process.delivers and process.group == group:
                self.request(process)

        self.after(self.late(), peer_lost)

    def anyone(self) -> Process | None:
        living = [process for process in self.all if process.alive and not process.hung and not process.cut_off]
        return self.random.choice(living) if living and not self.end else None

    def do_kill(self) -> None:
        if process := self.anyone():
            self.kill(process)

    def do_hang(self) -> None:
        """The run monitor declares it, unless a generation is being gathered: then Membership does."""
        if process := self.anyone():
            process.hung = True
            self.events += 1
            self.harmed.add(process.worker_id)
            self.after(TIMEOUT_S, partial(self.declare, process, "hang"))

    def do_silence(self) -> None:
        """The driver does not hear it; it computes on until it has not heard the driver for as long."""
        if process := self.anyone():
            process.cut_off = True
            self.events += 1
            self.harmed.add(process.worker_id)
            self.after(SILENCE_S - self.random.uniform(0, 1), partial(self.declare, process, "silence"))
            self.after(SILENCE_S - self.random.uniform(0, 0.5), partial(self.ends_itself, process))

    def ends_itself(self, process: Process) -> None:
        """Nobody tells the driver."""
        if process.alive:
            self.end_process(process)

    def declare(self, process: Process, cause: Any) -> None:
        if self.processes.get(process.worker_id) is process and not self.end:
            self.membership.lost(process.worker_id, cause, self.now)
            self.decide()

    def do_cut(self) -> None:
        """A link within a generation: one end notices, or both."""
        groups = [
            [p for p in made.processes if p.group == made.number and p.alive] for made in self.generations.values()
        ]
        pairs = [group for group in groups if len(group) > 1]
        if not pairs or self.end:
            return
        one, other = self.random.sample(self.random.choice(pairs), 2)
        self.events += 1
        self.harmed |= {one.worker_id, other.worker_id}
        for by, of in [(one, other), (other, one)][: self.random.choice((1, 2))]:
            if not by.delivers and not by.hung:
                self.to_driver(by, lambda by=by, of=of: self.membership.accused(by.worker_id, of.worker_id, self.now))
                self.request(by)

    def do_leave(self) -> None:
        """It told the driver; it may be taken away before it has left."""
        if process := self.anyone():
            self.events += 1
            self.harmed.add(process.worker_id)
            self.to_driver(process, lambda: self.membership.leave_announced([process.worker_id], self.now))
            if self.random.random() < 0.4:
                self.after(self.random.uniform(0, 2), partial(self.die, process))

    def do_join(self) -> None:
        if not self.end:
            host = self.random.choice([process.host for process in self.all] + ["other"])
            self.membership.host_joined(host, self.random.randint(1, 2), self.now)
            self.decide()

    def do_lose_host(self) -> None:
        """All processes there die; the driver hears only of the host."""
        if (process := self.anyone()) is None:
            return
        for one in self.all:
            if one.host == process.host and one.alive:
                self.events += 1
                self.harmed.add(one.worker_id)
                one.cut_off = True
                self.after(self.random.uniform(0, 0.5), partial(self.ends_itself, one))

        def known() -> None:
            if not self.end:
                self.lost_hosts.add(process.host)
                for one in self.processes.values():  # whatever was started there meanwhile
                    if one.host == process.host:
                        one.cut_off = True
                        self.after(0.0, partial(self.ends_itself, one))
                self.membership.host_lost(process.host, self.now)
                self.decide()

        self.after(self.random.uniform(0.2, 1.0), known)

    # -- what must be so ---------------------------------------------------------------------------------------------

    def check_why(self, action: Any) -> None:
        """A run ends early only where it must, and is started again where it may."""
        expect(isinstance(action, RestartRun) == bool(self.rules.max_restarts), f"{action} is the other one")
        losses, most = len(self.membership.losses), self.rules.max_losses
        if most != "any" and losses > most:
            return
        able = [p for p in self.all if p.alive and not p.blank and p.worker_id not in self.harmed and not p.stopped]
        expect(len(able) < self.rules.min_workers, f"{action}, and {able} could go on")

    def state(self) -> str:
        return self.membership.phase

    def check_end(self) -> None:
        expect(self.end or self.membership.phase == "finishing", f"it stopped in phase {self.membership.phase}")
        for loss in self.membership.losses:
            harmed = loss["host"] in self.lost_hosts if loss["cause"] == "host" else loss["worker_id"] in self.harmed
            expect(harmed, f"worker {loss['worker_id']} is lost ({loss['cause']}), and nothing happened to it")
        formed = len(self.generations)
        expect(formed <= 1 + self.events, f"{formed} generations of {self.events} events")
        left = [process.worker_id for process in self.all if process.alive]
        expect(not left, f"{left} are left alive")
        if not self.end:
            expect(set(self.committed) == set(range(STEPS)), f"the result came with steps {list(self.committed)}")


def before_all_asked(membership: Membership, now: float) -> None:
    members, generation = membership._members, membership.generation
    if membership.phase == "gathering" and membership._waiting():
        membership._members = set()
    Membership._form(membership, now)
    if membership.generation == generation:
        membership._members = members


RULES_OUT: dict[str, Callable[..., Any]] = {  # a method of Membership, and one that leaves a rule out
    # 1: starts anew at step 0 with whoever is there; does not wait until all live members of the last generation have requested
    "_may_form_of": lambda m, waiting: True,
    "_form": before_all_asked,
    # 2: who has not requested when others have is lost
    "_must_request_by": lambda m, one: m._since if m.phase == "gathering" else Membership._must_request_by(m, one),
    # 3: forms while a lost worker's process may still run
    "_unfenced": lambda m: False,
    # 4: interrupts as often as somebody asks; a repeated request of an older generation counts for this one
    "_interrupt": lambda m: m._interrupted.clear() or Membership._interrupt(m),
    "requested": lambda m, one, of, *args: Membership.requested(m, one, m._workers[one].generation, *args),
    # 5: who requests after the end gets no answer
    "_release": lambda m, *ws: Membership._release(m, *(one for one in ws if m.phase != "finishing" or one.blank)),
    # min_workers without an end of the wait; a joiner that requests while others gather is not taken along
    "_waits_until": lambda m: float("inf"),
    "_waiting": lambda m: [one for one in Membership._waiting(m) if one.generation >= 0] or Membership._waiting(m),
}


def test_some_schedules_keep_all_promises_and_come_everywhere() -> None:
    worlds = list(map(World, range(500)))
    keeps(World.run, worlds)
    causes = {loss["cause"] for world in worlds for loss in world.membership.losses}
    assert causes == {"death", "hang", "silence", "host", "link"}
    assert {world.end for world in worlds} == {"", "RestartRun", "FailRun"}
    assert set().union(*(world.actions for world in worlds)) == set(get_args(Action))
    assert max(len(world.generations) for world in worlds) > 5
    assert min(len(world.generations) for world in worlds) == 0


@pytest.mark.nightly
def test_many_more_schedules_keep_all_promises() -> None:
    keeps(World.run, map(World, range(500, 22_000)))


@pytest.mark.parametrize("method", RULES_OUT)
def test_the_search_finds_a_rule_that_is_left_out(method: str) -> None:
    kind = type("Wrong", (Membership,), {method: RULES_OUT[method]})
    found = first_broken(World.run, (World(seed, kind) for seed in range(10_000)))
    World(found.seed).run()
