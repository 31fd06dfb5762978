"""Mailboxes of every group pass the conformance suite, in real processes where they have any; lost peers."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_ring, on_shared_memory, values
from meshes import mesh, ring
from programs import silent
from sim.sim_world import meeting_of, run

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.comm.shared_memory.mailbox import ring_bytes
from manyhands.comm.solo import SoloGroup
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import BadInput, PeerLost, Unsupported
from manyhands.testing.mailbox_suite import LONGEST, MAILBOX_SUITE
from manyhands.testing.threads import together

COUNT = len(MAILBOX_SUITE)


def conformance(group: Group) -> int:
    for check in MAILBOX_SUITE.values():
        check(group)
    return COUNT


def test_in_processes() -> None:
    assert values(on_shared_memory(3, conformance, timeout_s=30)) == [COUNT] * 3
    assert values(on_ring(3, conformance, timeout_s=30, mailboxes=COUNT + 1)) == [COUNT] * 3


def test_in_threads_and_alone() -> None:
    assert together(3, lambda worker: conformance(worker.group)) == [COUNT] * 3
    conformance(SoloGroup())


@pytest.mark.parametrize("network", ["", "latency=1ms,bandwidth=1e8"])
def test_simulated(network: str) -> None:
    timeline = Timeline(0)
    meeting = meeting_of(timeline, 3, network)
    groups = [SimGroup(meeting, rank) for rank in range(3)]
    assert run(timeline, [lambda group=group: conformance(group) for group in groups]) == [COUNT] * 3
    assert (timeline.now > 0) is bool(network)


def test_a_simulated_message_comes_when_its_time_has_passed() -> None:
    timeline = Timeline(0)
    meeting = meeting_of(timeline, 2, "latency=1,bandwidth=8e6")  # 1 s, and 1 MB a second
    first, second = (SimGroup(meeting, rank) for rank in range(2))

    def posts() -> float:
        first.open_mailbox(LONGEST).post(torch.zeros(500_000, dtype=torch.uint8))
        return timeline.now

    def takes() -> list[Any]:
        mailbox, seen = second.open_mailbox(LONGEST), []
        began = timeline.now
        for _ in range(3):
            seen.append(len(mailbox.take()[0]))
            timeline.sleep(0.7)
        return [*seen, timeline.now - began, second.waited_s]

    assert run(timeline, [posts, takes])[1] == [0, 0, 0, pytest.approx(2.1), 0.0]


def _dies(group: Group) -> PeerLost | None:
    mailbox = group.open_mailbox(LONGEST)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as error:
        mailbox.take([1] * group.size)
    return error.value


@pytest.mark.parametrize(("on", "options"), [(on_shared_memory, {}), (on_ring, {"mailboxes": 1})])
def test_a_killed_peer_is_lost_to_whoever_waits_for_its_message(on: Any, options: dict[str, int]) -> None:
    error = on(2, _dies, timeout_s=30, **options)[0].value
    assert (error.rank, error.operation) == (1, "take")
    assert error.seconds < 20


def _fills(group: Group) -> Callable[[], None]:
    mailbox, data = group.open_mailbox(LONGEST), torch.zeros(LONGEST, dtype=torch.uint8)

    def fill() -> None:
        for _ in range(2 * ring_bytes(LONGEST) // LONGEST):
            mailbox.post(data)
        mailbox.take([0] * group.size)

    return fill


def test_a_peer_that_takes_nothing_is_lost_after_the_deadline() -> None:
    with silent(_fills) as program:
        first, _ = values(on_shared_memory(2, program, timeout_s=1.0))
    assert (first.rank, first.operation) == (1, "post")


def _closes(group: Group) -> list[str]:
    """Its threads end with the group."""
    mailbox = group.open_mailbox(LONGEST)
    mailbox.post(torch.zeros(9, dtype=torch.uint8))
    mailbox.take([1] * group.size)
    group.close()
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def test_its_threads_end_with_the_group() -> None:
    assert values(on_ring(2, _closes, mailboxes=1)) == [[], []]


def test_a_message_that_is_longer_than_announced_and_a_group_without_a_way_for_them() -> None:
    group = SharedMemoryGroup(0, 1, SharedMemory.create(1))
    with pytest.raises(BadInput, match="at most 8 were announced"):
        group.open_mailbox(8).post(torch.zeros(9, dtype=torch.uint8))
    group.close()
    with pytest.raises(Unsupported, match="at their own pace: use engine local, hosts"):
        ring(mesh(1), 0).open_mailbox(LONGEST)
