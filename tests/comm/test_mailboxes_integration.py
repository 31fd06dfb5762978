"""Mailboxes of every group pass the conformance suite, in real processes where they have any; and peers that are lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from harness import Program, forked, on_shared_memory, values
from meshes import Mesh, close, mesh, ring
from sim.sim_world import meeting_of, run

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.mailbox import ring_bytes
from manyhands.comm.solo import SoloGroup
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import BadInput, PeerLost, Unsupported
from manyhands.testing.mailbox_suite import LONGEST, MAILBOX_SUITE
from manyhands.testing.threads import together
from manyhands.transport.channel import Channel


def conformance(group: Group) -> int:
    for check in MAILBOX_SUITE.values():
        check(group)
    return len(MAILBOX_SUITE)


def on_sockets(size: int, program: Program, *, timeout_s: float = 30) -> list[Any]:
    """On `size` processes; each mailbox has sockets of its own."""
    links, more = mesh(size), [mesh(size) for _ in range(len(MAILBOX_SUITE) + 1)]

    def start(rank: int) -> Any:
        for sockets in (links, *more):
            close(sockets, but=rank)
        left = iter(more)

        def connect() -> dict[int, Channel]:
            return {
                peer: Channel(sock, peer=f"worker {peer}", timeout_s=timeout_s)
                for peer, sock in next(left)[rank].items()
            }

        group = ring(links, rank, hosts=[f"host-{peer}" for peer in range(size)], timeout_s=timeout_s, connect=connect)
        try:
            return program(group)
        finally:
            group.close()

    def let_go() -> None:
        for sockets in (links, *more):
            close(sockets)

    try:
        return forked(size, start, 60, then=let_go)
    finally:
        let_go()


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory(size: int) -> None:
    assert values(on_shared_memory(size, conformance, timeout_s=30)) == [len(MAILBOX_SUITE)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_sockets(size: int) -> None:
    assert values(on_sockets(size, conformance)) == [len(MAILBOX_SUITE)] * size


def test_threads() -> None:
    assert together(3, lambda worker: conformance(worker.group)) == [len(MAILBOX_SUITE)] * 3


def test_one_worker() -> None:
    conformance(SoloGroup())


@pytest.mark.parametrize("network", ["", "latency=1ms,bandwidth=1e8"])
def test_simulated(network: str) -> None:
    timeline = Timeline(0)
    meeting = meeting_of(timeline, 3, network)
    groups = [SimGroup(meeting, rank) for rank in range(3)]
    assert run(timeline, [lambda group=group: conformance(group) for group in groups]) == [len(MAILBOX_SUITE)] * 3
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


def _dies(group: Group) -> tuple[PeerLost, float] | None:
    mailbox = group.open_mailbox(LONGEST)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLost) as error:
        mailbox.take([1] * group.size)
    return error.value, time.monotonic() - start


@pytest.mark.parametrize("on", [on_shared_memory, on_sockets])
def test_a_killed_peer_is_lost_to_whoever_waits_for_its_message(on: Any) -> None:
    outcomes = on(2, _dies)
    error, seconds = outcomes[0].value
    assert (error.rank, error.operation) == (1, "take")
    assert seconds < 5


def _fills(group: Group) -> PeerLost | None:
    mailbox, data = group.open_mailbox(LONGEST), torch.zeros(LONGEST, dtype=torch.uint8)

    def fill() -> None:
        for _ in range(2 * ring_bytes(LONGEST) // LONGEST):
            mailbox.post(data)
        mailbox.take([0] * group.size)

    group.barrier()
    if group.rank == 1:
        time.sleep(1.5)  # it neither takes nor leaves
        return None
    with pytest.raises(PeerLost) as error:
        fill()
    return error.value


def test_a_peer_that_takes_nothing_is_lost_after_the_deadline() -> None:
    first, _ = on_shared_memory(2, _fills, timeout_s=0.5)
    assert (first.value.rank, first.value.operation) == (1, "post")


def _closes(group: Group) -> list[str]:
    mailbox = group.open_mailbox(LONGEST)
    mailbox.post(torch.zeros(9, dtype=torch.uint8))
    mailbox.take([1] * group.size)
    group.close()
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def test_its_threads_end_with_the_group() -> None:
    assert values(on_sockets(2, _closes)) == [[], []]


def _too_long(group: Group) -> bool:
    with pytest.raises(BadInput, match="at most 8 were announced"):
        group.open_mailbox(8).post(torch.zeros(9, dtype=torch.uint8))
    return True


def test_a_message_that_is_longer_than_announced_is_refused() -> None:
    assert values(on_shared_memory(1, _too_long)) == [True]


def test_a_group_without_a_way_for_them_says_so() -> None:
    sockets: Mesh = [{}]
    with pytest.raises(Unsupported, match="at their own pace: use engine local, hosts"):
        ring(sockets, 0).open_mailbox(LONGEST)
