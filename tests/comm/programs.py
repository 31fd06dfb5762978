"""What the ranks of a group run, and what is expected of them: the same for groups of every kind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import Outcome, Program, values
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE

LAST_STEP = 5  # of the one that is killed


def conformance(group: Group) -> int:
    """Every check; how many they are."""
    for check in GROUP_SUITE.values():
        check(group)
    return len(GROUP_SUITE)


def overlapping(elements: int) -> Program:
    """A started mean of the ranks, while the caller computes: (whether it was over before the wait, its weight, its value)."""

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
    """Means until a rank kills itself: (the others' error, seconds until it came)."""

    def program(group: Group) -> tuple[PeerLost, float] | None:
        tensor = _tensor(group, elements, allocated)
        for step in range(1000):
            group.step = step
            if (group.rank, step) == (victim, LAST_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            try:
                group.mean_(tensor)
            except PeerLost as error:
                with pytest.raises(PeerLost):
                    group.barrier()
                return error, time.monotonic() - start
        return None

    return program


def expect_killed(outcomes: Sequence[Outcome], victim: int, within_s: float = 10) -> None:
    """All others named the rank that `killed` killed, of host-1, and sooner than by their deadline."""
    assert outcomes[victim].status == signal.SIGKILL
    for outcome in [*outcomes[:victim], *outcomes[victim + 1 :]]:
        error, seconds = outcome.value
        assert (error.rank, error.host, error.operation) == (victim, "host-1", "mean_")
        assert error.step in (
            LAST_STEP - 1,
            LAST_STEP,
        )  # it may have left before the others saw the end of its last step
        assert seconds < within_s


def silent(sleep_s: float) -> Program:
    """Rank 1 sleeps: (the others' error, seconds until it came)."""

    def program(group: Group) -> tuple[PeerLost, float] | None:
        group.barrier()
        if group.rank == 1:
            time.sleep(sleep_s)
            return None
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            group.mean_(torch.ones(10))
        return caught.value, time.monotonic() - start

    return program


DIFFERENT: dict[str, tuple[Callable[[Group, bool], Any], str, str]] = {
    "operation": (
        lambda group, odd: group.barrier() if odd else group.mean_(torch.ones(3)),
        "mean_ of 3 float32",
        "barrier",
    ),
    "n": (
        lambda group, odd: group.mean_(torch.ones(4 if odd else 3)),
        "mean_ of 3 float32",
        "mean_ of 4 float32",
    ),
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
    for text in values(outcomes):
        assert theirs in text
        assert own in text
        assert f"worker {odd[0]}" in text


def waits(late: int, sleep_s: float, *, allocated: bool = False) -> Program:
    """A mean to which one rank comes late: the seconds that this one waited."""

    def program(group: Group) -> float:
        tensor = _tensor(group, 1000, allocated)
        group.barrier()
        before = group.waited_s
        if group.rank == late:
            time.sleep(sleep_s)
        group.mean_(tensor)
        return group.waited_s - before

    return program


def _tensor(group: Group, elements: int, allocated: bool) -> Tensor:
    return group.allocate(elements, torch.float32) if allocated else torch.ones(elements)
