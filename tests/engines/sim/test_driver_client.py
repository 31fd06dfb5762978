"""Each simulated worker's line: what takes time, what happens at a step, who gets which rows, and the end of a backward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heard import Heard
from sim_world import run

from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.sim.compute import Compute, ComputeSpeed
from manyhands.engines.sim.driver_client import LeaseServer, SimDriverClient, backward_in_turn
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import PeerLost
from manyhands.worker import Worker, set_current

SEGMENT = Segment(epoch=0, first=0, until=3, parts=2)
ALONE = Segment(epoch=0, first=0, until=30, parts=2, rank0_warmup_ticks=20)


class World:
    def __init__(self, compute: str = "row=1", workers: int = 2) -> None:
        self.timeline, self.observer = Timeline(), Heard()
        speeds = Compute.parse(compute)
        self.lease_server = LeaseServer(self.timeline, self.observer, speeds.lease)
        ranks = range(workers)
        self.lines = [SimDriverClient(self.lease_server, rank, ComputeSpeed(speeds, rank, 0)) for rank in ranks]

    def run(self, program: Callable[[SimDriverClient], Any]) -> list[Any]:
        return run(self.timeline, [lambda line=line: program(line) for line in self.lines])  # type: ignore[misc]

    def leases(self, segment: Segment = SEGMENT) -> list[list[tuple[float, int, int]]]:
        """(when, global batch, part) of what each worker gets until the end; each takes its time."""

        def program(line: SimDriverClient) -> list[tuple[float, int, int]]:
            got = []
            while isinstance(lease := line.lease(segment, line._rank), Lease):
                got.append((self.timeline.now, lease.index, lease.part))
                line.computed(1)
            return got

        return self.run(program)


def end_of(*pauses: tuple[float, float], own_turn_s: float = 0.0) -> float:
    """When four seconds of work are over."""
    world = World(workers=1)

    def program(line: SimDriverClient) -> float:
        line.computed(4)
        world.timeline.programs[0].pause(own_turn_s)
        line.computed(0)
        return world.timeline.now

    for at, seconds in pauses:
        world.timeline.at(at, lambda seconds=seconds: world.timeline.programs[0].pause(seconds))  # type: ignore[misc]
    return float(*world.run(program))


def test_a_pause_is_no_time_to_compute_in() -> None:
    """One pause after the other; where they overlap they are one. In its own turn it comes before the next work."""
    assert [end_of((1, 2)), end_of((1, 7)), end_of((4, 2)), end_of(own_turn_s=10)] == [6, 11, 4, 14]
    assert end_of((1, 7), (2, 1)) == 11
    assert end_of((0.5, 1), (1, 2), (5, 1)) == pytest.approx(4 + 2.5 + 1)


def test_each_slice_is_leased_once_and_the_fast_take_from_the_slow() -> None:
    first, second = World("row=1,1=5x").leases()
    assert sorted((index, part) for _, index, part in first + second) == [(i, p) for i in range(3) for p in range(2)]
    assert [(index, part) for _, index, part in first] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1)]
    assert [time for time, _, _ in first] == [0, 1, 2, 3, 4]
    (got,) = World("row=0,lease=0.25", workers=1).leases(Segment(epoch=0, first=0, until=3, parts=1))
    assert [time for time, _, _ in got] == [0.25, 0.5, 0.75]  # a lease takes time
    first, second = World().leases(Segment(epoch=0, first=0, until=3, parts=2, rank0_warmup_ticks=2))
    assert [time for time, _, _ in first][:2] == [0, 1]
    assert second[0][0] == 2  # others wait while worker 0 trains alone


def test_a_stop_ends_the_leases_of_all_also_of_those_who_wait() -> None:
    world = World()
    world.timeline.at(3.5, lambda: setattr(world.observer, "reason", "enough"))

    def program(line: SimDriverClient) -> tuple[str, float, str]:
        while isinstance(answer := line.lease(ALONE, line._rank), Lease):
            line.computed(1)
        assert isinstance(answer, End)
        return answer.reason, world.timeline.now, line.should_stop()

    assert world.lines[0].should_stop() == ""
    assert world.run(program) == [("enough", 4.0, "enough")] * 2


def test_who_waits_too_long_for_worker_0_hears_it() -> None:
    """Not while it trains, however long that takes."""
    world = World("row=1")
    world.lease_server.timeout_s = 3.0

    def slow(line: SimDriverClient) -> None:
        for rows in (2,) * 5 + (50,):
            line.lease(ALONE, line._rank)
            line.computed(rows)

    with pytest.raises(PeerLost, match="worker 0 on host0 took no lease for 3 s") as raised:
        world.run(slow)
    assert (raised.value.operation, raised.value.seconds, world.timeline.now) == ("lease", 13.0, 13.0)


# -- after a backward --------------------------------------------------------------------------------------------------


@pytest.fixture
def line() -> Iterator[SimDriverClient]:
    """Of the worker in whose turn this is."""
    (own,) = World(workers=1).lines
    set_current(Worker(driver=own))
    plain = torch.autograd.backward
    with backward_in_turn():
        yield own
    set_current(None)
    assert torch.autograd.backward is plain


def hooked(line: Any, *words: str) -> tuple[torch.Tensor, list[str]]:
    """A tensor whose backward asks for this to be said after it, with the number of autograd's task that runs then."""
    said: list[str] = []
    with torch.enable_grad():
        y = torch.ones(1, requires_grad=True) * 2
    for word in words:
        y.register_hook(
            lambda _, word=word: line.after_backward(lambda: said.append(f"{word} {torch._C._current_graph_task_id()}"))
        )
    return y, said


def test_what_comes_after_a_backward_comes_when_autograd_is_done(line: SimDriverClient) -> None:
    """In the worker's turn, once, and in the order of asking; elsewhere it comes inside of autograd's engine."""
    y, said = hooked(line, "first", "second")
    y.sum().backward()
    assert said == ["first -1", "second -1"]
    torch.autograd.backward((torch.ones(1, requires_grad=True) * 2).sum())
    assert said == ["first -1", "second -1"]
    y, said = hooked(Worker().driver, "inside")
    y.backward()
    assert [one for one in said if one != "inside -1"] == said
    assert len(said) == 1


def test_a_backward_inside_of_another_ends_nothing(line: SimDriverClient) -> None:
    """As reentrant checkpoints have it: what waits for the end would run inside of the outer one."""
    inside, said = hooked(line, "after")

    def inner(gradient: torch.Tensor) -> None:
        inside.backward()
        said.append("inner is over")

    y = torch.ones(1, requires_grad=True) * 3
    y.register_hook(inner)
    y.sum().backward()
    assert said == ["inner is over", "after -1"]


def test_a_backward_that_raises_leaves_nothing_to_the_next(line: SimDriverClient) -> None:
    stale: list[int] = []

    def fails(gradient: torch.Tensor) -> None:
        raise ArithmeticError("no such gradient")

    y = torch.ones(1, requires_grad=True) * 3
    y.register_hook(fails)
    z = y * 1
    z.register_hook(lambda gradient: line.after_backward(lambda: stale.append(1)))
    with pytest.raises(ArithmeticError):
        z.sum().backward()
    other, said = hooked(line, "after")
    other.sum().backward()
    assert (stale, said) == ([], ["after -1"])
