"""What the ranks of a group run, and what is expected of them: the same for groups of every kind."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import Outcome, Program, values

from manyhands.comm.group import Group, Work
from manyhands.comm.reducing import naive_mean
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE, vector, vectors

LAST_STEP = 5  # of the one that is killed


def conformance(group: Group) -> int:
    """Every check; how many they are."""
    for check in GROUP_SUITE.values():
        check(group)
    return len(GROUP_SUITE)


def many(group: Group) -> bool:
    """Means of many sizes, weights and bits, in the group's memory and elsewhere, of which some are waited for later."""
    sizes, order = random.Random(1), random.Random(2)
    memory, started = group.allocate(5000, torch.float64), list[Callable[[], None]]()
    for i in range(250):
        n, weights = sizes.randrange(0, 300), [sizes.choice([0.0, 1.0, 2.5]) for _ in range(group.size)]
        mine, bits, later = vector(group.rank, n, seed=i), 1 << i % 50, order.random() < 0.2
        wanted = naive_mean(vectors(group, n, seed=i), weights) if sum(weights) else mine
        place = order.randrange(4000)
        tensor = mine.clone() if later or order.random() < 0.3 else memory[place : place + n].copy_(mine)
        handle = group.start_mean_(tensor, weights[group.rank], bits)

        def expect(handle: Work = handle, tensor: Any = tensor, wanted: Any = wanted, bits: int = bits) -> None:
            assert handle.wait().bits == bits
            assert torch.allclose(tensor, wanted, rtol=1e-12, atol=1e-12)

        started.append(expect)
        if not later:
            for wait in started:
                wait()
            started.clear()
        if order.random() < 0.1:
            assert group.all_gather_json(i) == [i] * group.size
    for wait in started:
        wait()
    return True


def overlapping(elements: int) -> Program:
    """A started mean of the ranks, while the caller computes: (over before the wait?, its weight, its value)."""

    def program(group: Group) -> tuple[bool, float, float]:
        mine = torch.full((elements,), float(group.rank))
        group.barrier()
        handle = group.start_mean_(mine)
        deadline = time.monotonic() + 20
        while not handle.over and time.monotonic() < deadline:
            torch.ones(100).sum()  # what the caller computes
        return handle.over, handle.wait().weight, float(mine[0])

    return program


def killed(victim: int, elements: int = 1000, *, allocated: bool = False) -> Program:
    """Means until a rank kills itself: the others' error."""

    def program(group: Group) -> PeerLost | None:
        tensor = group.allocate(elements, torch.float32) if allocated else torch.ones(elements)
        for step in range(1000):
            group.step = step
            if (group.rank, step) == (victim, LAST_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                group.mean_(tensor)
            except PeerLost as error:
                with pytest.raises(PeerLost):
                    group.barrier()
                return error
        return None

    return program


def expect_killed(outcomes: Sequence[Outcome], victim: int) -> None:
    """All others named the rank that `killed` killed, of host-1, and sooner than by the deadline of 30 s."""
    assert outcomes[victim].status == signal.SIGKILL
    for outcome in [*outcomes[:victim], *outcomes[victim + 1 :]]:
        error = outcome.value
        assert (error.rank, error.host, error.operation) == (victim, "host-1", "mean_")
        assert error.step in (LAST_STEP - 1, LAST_STEP)  # others may not have seen the end of the step before
        assert error.seconds < 20


def a_mean(group: Group) -> Callable[[], object]:
    return lambda: group.mean_(torch.ones(10))


@contextmanager
def silent(prepare: Callable[[Group], Callable[[], object]] = a_mean) -> Iterator[Program]:
    """Rank 1 neither takes part nor leaves until the others have given up: their errors. prepare: gives what they call."""
    told, tell = os.pipe()

    def program(group: Group) -> PeerLost | None:
        call = prepare(group)
        group.barrier()
        if group.rank == 1:
            left = group.size - 1
            while left:
                left -= len(os.read(told, left))
            return None
        try:
            with pytest.raises(PeerLost) as caught:
                call()
        finally:
            os.write(tell, b".")
        return caught.value

    try:
        yield program
    finally:
        os.close(told)
        os.close(tell)


DIFFERENT: dict[str, tuple[Callable[[Group, bool], Any], str, str]] = {
    "operation": (
        lambda group, odd: group.barrier() if odd else group.mean_(torch.ones(3)),
        "mean_ of 3 float32",
        "barrier",
    ),
    "n": (lambda group, odd: group.mean_(torch.ones(4 if odd else 3)), "mean_ of 3 float32", "mean_ of 4 float32"),
    "dtype": (
        lambda group, odd: group.all_reduce_(torch.ones(3, dtype=torch.int32 if odd else torch.float32)),
        "all_reduce_ of 3 float32",
        "all_reduce_ of 3 int32",
    ),
    "source": (
        lambda group, odd: group.broadcast_(torch.ones(3), int(odd)),
        "broadcast_ from worker 0 of 3 float32",
        "broadcast_ from worker 1 of 3 float32",
    ),
    "large": (
        lambda group, odd: group.mean_(torch.ones(5_000_000 if odd else 3)),
        "mean_ of 3 float32",
        "mean_ of 5000000 float32",
    ),
}
"""By what one rank calls otherwise than the others: (the call, what theirs is in the error, what its own is)."""


def different(what: str, odd: Sequence[int] = (1,)) -> Program:
    """Ranks that disagree: the error's text."""

    def program(group: Group) -> str:
        with pytest.raises(ManyhandsError) as caught:
            DIFFERENT[what][0](group, group.rank in odd)
        with pytest.raises(ManyhandsError):
            group.barrier()
        return str(caught.value)

    return program


def expect_told(outcomes: list[Outcome], what: str, odd: Sequence[int] = (1,)) -> None:
    """All ranks of `different` heard both sides, and whose the odd one is."""
    _, theirs, own = DIFFERENT[what]
    for rank, text in enumerate(values(outcomes)):
        assert all(words in text for words in (theirs, own, f"worker {odd[0]}")), (what, rank, text)


def sent_wrongly(group: Group) -> str:
    """Rank 0 sends another tensor than rank 1 receives: the error's text."""
    with pytest.raises(ManyhandsError) as caught:
        group.receive_(torch.zeros(5), 0) if group.rank else group.send(torch.zeros(10_000_000), 1)
    return str(caught.value)


def finishes_alone(group: Group) -> bool:
    """Point to point goes on between two after a third rank has ended well."""
    group.barrier()
    if group.rank == 2:
        return True
    for i in range(3):
        tensor = torch.full((1_000_000,), float(i))
        if group.rank == 0:
            group.send(tensor, 1)
        else:
            group.receive_(tensor.zero_(), 0)
            assert tensor[-1] == i
    if group.rank == 0:
        with pytest.raises(PeerLost, match="left the group|is gone"):
            group.barrier()
    return True


def waits(late: int, sleep_s: float = 1.0, *, allocated: bool = False) -> Program:
    """A mean to which one rank comes late: the seconds that this one waited."""

    def program(group: Group) -> float:
        tensor = group.allocate(1000, torch.float32) if allocated else torch.ones(1000)
        group.barrier()
        before = group.waited_s
        if group.rank == late:
            time.sleep(sleep_s)
        group.mean_(tensor)
        return group.waited_s - before

    return program


OF_THREE: dict[str, Program] = {"many": many, "alone": finishes_alone, "sent": sent_wrongly}
OF_THREE |= {what: different(what) for what in DIFFERENT}


def expect_three(found: dict[str, list[Outcome]]) -> None:
    """What comes of `OF_THREE` in groups of three."""
    assert values(found["many"]) == values(found["alone"]) == [True] * 3
    text = values(found["sent"])[1]
    assert "expected send of 5 float32" in text
    assert "send of 10000000 float32 came" in text
    for what in DIFFERENT:
        expect_told(found[what], what)
