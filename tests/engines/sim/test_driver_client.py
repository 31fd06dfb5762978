"""Each simulated worker's line: what takes time, what happens at a step, who gets which rows, and the end of a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim_world import run

from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.base import Observer
from manyhands.engines.fault_injector import FaultInjector
from manyhands.engines.faults import Fault, Faults
from manyhands.engines.sim.compute import Compute, ComputeSpeed
from manyhands.engines.sim.driver_client import LeaseServer, SimDriverClient, backward_in_turn
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import PeerLost
from manyhands.worker import Worker, set_current

SEGMENT = Segment(epoch=0, first=0, until=3, parts=2)


class Asked(Observer):
    """Wants a stop as soon as it is told to."""

    reason = ""

    def stopping(self) -> str:
        return self.reason


class World:
    def __init__(self, compute: str = "row=1", workers: int = 2) -> None:
        self.timeline, self.observer = Timeline(), Asked()
        output = Compute.parse(compute)
        self.lease_server = LeaseServer(self.timeline, self.observer, output.lease)
        self.lines = [
            SimDriverClient(self.lease_server, rank, ComputeSpeed(output, rank, 0)) for rank in range(workers)
        ]

    def run(self, program: Callable[[SimDriverClient, int], Any]) -> list[Any]:
        return run(
            self.timeline, [lambda rank=rank: program(self.lines[rank], rank) for rank in range(len(self.lines))]
        )  # type: ignore[misc]

    def leases(self, line: SimDriverClient, segment: Segment = SEGMENT, rows: int = 1) -> list[tuple[float, int, int]]:
        """(when, global batch, part) of what a worker gets until the end; each takes its time."""
        got = []
        while isinstance(lease := line.lease(segment, line._rank), Lease):
            got.append((self.timeline.now, lease.index, lease.part))
            line.computed(rows)
        return got


def test_computing_takes_the_workers_own_time() -> None:
    world = World("row=1,step=0.5,1=3x")

    def program(line: SimDriverClient, rank: int) -> float:
        for rows in (2, 0, 1):
            line.computed(rows)
        return world.timeline.now

    assert world.run(program) == [4.0, 12.0]


@pytest.mark.parametrize(
    ("pauses", "end"), [([(1, 2)], 6), ([(1, 7)], 11), ([(0.5, 1), (1, 2), (5, 1)], 4 + 2.5 + 1), ([(4, 2)], 4)]
)
def test_a_pause_is_no_time_to_compute_in(pauses: list[tuple[float, float]], end: float) -> None:
    """Four seconds of work, one pause after the other; where they overlap they are one."""
    world = World(workers=1)
    for at, seconds in pauses:
        world.timeline.at(at, lambda seconds=seconds: world.timeline.programs[0].pause(seconds))  # type: ignore[misc]

    def program(line: SimDriverClient, rank: int) -> float:
        line.computed(4)
        return world.timeline.now

    assert world.run(program) == [pytest.approx(end)]


def test_what_happens_at_a_step_happens_once_and_in_the_workers_turn() -> None:
    world, happened = World(), []

    def strike(fault: Fault, step: int) -> None:
        happened.append((str(fault), step, world.timeline.running.name))
        world.timeline.sleep(5)

    planned = Faults.parse("pause=1@step:2+5,pause=1@step:3:exchange+5").planned
    world.lines[1].injector = FaultInjector(planned, strike)

    def program(line: SimDriverClient, rank: int) -> float:
        for phase, step in (("compute", 1), ("exchange", 2), ("compute", 2), ("compute", 2), ("compute", 3)):
            line.progress(phase, step)
        assert (line.phase, line.step) == ("compute", 3)
        return world.timeline.now

    assert world.run(program) == [0.0, 5.0]
    assert happened == [("pause=1@step:2+5", 2, 1)]


def test_each_slice_is_leased_once_and_the_fast_take_from_the_slow() -> None:
    world = World("row=1,1=5x")
    first, second = world.run(lambda line, rank: world.leases(line))
    assert sorted((index, part) for _, index, part in first + second) == [(i, p) for i in range(3) for p in range(2)]
    assert [(index, part) for _, index, part in first] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1)]
    assert [time for time, _, _ in first] == [0, 1, 2, 3, 4]


def test_a_lease_takes_time() -> None:
    world = World("row=0,lease=0.25", workers=1)
    (got,) = world.run(lambda line, rank: world.leases(line, Segment(epoch=0, first=0, until=3, parts=1)))
    assert [time for time, _, _ in got] == [0.25, 0.5, 0.75]


def test_others_wait_while_worker_0_trains_alone() -> None:
    world = World()
    alone = Segment(epoch=0, first=0, until=3, parts=2, rank0_warmup_ticks=2)
    first, second = world.run(lambda line, rank: world.leases(line, alone))
    assert [time for time, _, _ in first][:2] == [0, 1]
    assert second[0][0] == 2


def test_a_stop_ends_the_leases_of_all_also_of_those_who_wait() -> None:
    world = World()
    alone = Segment(epoch=0, first=0, until=30, parts=2, rank0_warmup_ticks=20)
    world.timeline.at(3.5, lambda: setattr(world.observer, "reason", "enough"))

    def program(line: SimDriverClient, rank: int) -> tuple[str, float]:
        while isinstance(answer := line.lease(alone, line._rank), Lease):
            line.computed(1)
        assert isinstance(answer, End)
        return answer.reason, world.timeline.now

    assert world.run(program) == [("enough", 4.0)] * 2


def test_a_stop_is_heard_at_the_very_next_look() -> None:
    world = World("row=0", workers=1)

    def program(line: SimDriverClient, rank: int) -> tuple[str, str]:
        before = line.should_stop()
        world.observer.reason = "enough"
        return before, line.should_stop()

    assert world.run(program) == [("", "enough")]


def test_a_pause_in_ones_own_turn_comes_before_the_next_work() -> None:
    """Also where that takes no time of its own."""
    world = World(workers=1)

    def program(line: SimDriverClient, rank: int) -> list[float]:
        times = []
        for rows in (2, 0):
            world.timeline.programs[0].pause(10)
            line.computed(rows)
            times.append(world.timeline.now)
        return times

    assert world.run(program) == [[12.0, 22.0]]


def test_who_waits_too_long_for_worker_0_hears_it() -> None:
    """Not while it trains, however long that takes."""
    world = World("row=1")
    world.lease_server.timeout_s = 3.0
    alone = Segment(epoch=0, first=0, until=30, parts=2, rank0_warmup_ticks=20)

    def slow(line: SimDriverClient, rank: int) -> None:
        for rows in (2,) * 5 + (50,):
            line.lease(alone, line._rank)
            line.computed(rows)

    with pytest.raises(PeerLost, match="worker 0 on host0 took no lease for 3 s") as raised:
        world.run(slow)
    assert (raised.value.operation, raised.value.seconds, world.timeline.now) == ("lease", 13.0, 13.0)


def hooked(line: SimDriverClient, output: list[str]) -> torch.Tensor:
    with torch.enable_grad():
        y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(
        lambda gradient: line.after_backward(lambda: output.append(f"after {torch._C._current_graph_task_id()}"))
    )
    return y


def test_a_backward_inside_of_another_ends_nothing() -> None:
    """As reentrant checkpoints have it: what waits for the end would run inside of the outer one."""
    world, output = World(workers=1), []
    line = world.lines[0]

    def inner(gradient: torch.Tensor) -> None:
        hooked(line, output).backward()
        output.append("inner is over")

    set_current(Worker(driver=line))
    try:
        with backward_in_turn():
            y = torch.ones(1, requires_grad=True) * 3
            y.register_hook(inner)
            y.sum().backward()
    finally:
        set_current(None)
    assert output == ["inner is over", "after -1"]


def test_a_backward_that_raises_leaves_nothing_to_the_next() -> None:
    world, output = World(workers=1), []
    line = world.lines[0]

    def fails(gradient: torch.Tensor) -> None:
        raise ArithmeticError("no such gradient")

    set_current(Worker(driver=line))
    try:
        with backward_in_turn():
            x = torch.ones(1, requires_grad=True)
            y = x * 3
            y.register_hook(fails)
            z = y * 1
            z.register_hook(lambda gradient: line.after_backward(lambda: output.append("stale")))
            with pytest.raises(ArithmeticError):
                z.sum().backward()
            hooked(line, output).sum().backward()
    finally:
        set_current(None)
    assert output == ["after -1"]


def test_what_comes_after_a_backward_comes_when_autograd_is_done() -> None:
    """In the worker's turn, once, and in the order of asking; elsewhere inside of autograd's engine."""
    world, output = World(workers=1), []
    x = torch.ones(1, requires_grad=True)

    def backward() -> None:
        y = x * 2
        y.register_hook(lambda gradient: line.after_backward(lambda: output.append(torch._C._current_graph_task_id())))
        y.register_hook(lambda gradient: line.after_backward(lambda: output.append("second")))
        y.sum().backward()

    line = world.lines[0]
    plain = torch.autograd.backward
    set_current(Worker(driver=line))
    try:
        with backward_in_turn():
            backward()
            assert output == [-1, "second"]
            torch.autograd.backward((x * 2).sum())
            assert output == [-1, "second"]
    finally:
        set_current(None)
    assert torch.autograd.backward is plain
    Worker().driver  # noqa: B018 - the default line has autograd itself call back
    inside: list[int] = []
    z = x * 2
    z.register_hook(lambda gradient: Worker().driver.after_backward(lambda: inside.append(1)))
    z.sum().backward()
    assert inside == [1]
