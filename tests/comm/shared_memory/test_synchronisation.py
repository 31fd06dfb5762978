"""Waiting for counters, with two ranks' boards in one process."""

import os
import select
import threading

import pytest

from manyhands.comm.shared_memory import synchronisation as waiting_module
from manyhands.comm.shared_memory.memory import Arena
from manyhands.comm.shared_memory.synchronisation import (
    ARRIVED,
    CLOSED,
    STATE,
    Header,
    LivenessPipes,
    SharedCounters,
    Waiting,
)
from manyhands.comm.shared_memory.table import GroupMemory, SharedMemory
from manyhands.errors import PeerLost


@pytest.fixture
def boards():
    fds = SharedMemory.create(3)
    memories = [GroupMemory(rank, Arena(fds[1 + rank]), fds) for rank in range(3)]
    made = [SharedCounters(rank, 3, memory) for rank, memory in enumerate(memories)]
    yield made
    for board, memory in zip(made, memories, strict=True):
        board.close()
        memory.close()
    for fd in fds:
        os.close(fd)


@pytest.fixture
def pipes():
    made = [os.pipe() for _ in range(3)]
    yield made
    for fd in {end for pipe in made for end in pipe if end >= 0}:
        os.close(fd)


def _waiting(board, pipes=(), timeout_s=30.0, **options):
    return Waiting(board, LivenessPipes(board.rank, pipes), ["a", "b", "c"], range(3), timeout_s, **options)


def test_a_counter_that_is_there_costs_nothing(boards):
    boards[1].raise_to(ARRIVED, 5)
    _waiting(boards[0]).until(1, ARRIVED, 5, "mean_", 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.05])
def test_a_counter_that_comes_later(boards, delay_s):
    timer = threading.Timer(delay_s, boards[1].raise_to, (ARRIVED, 1))
    timer.start()
    _waiting(boards[0]).until(1, ARRIVED, 1, "mean_", 0)
    timer.join()


def test_silence_is_an_error_that_all_learn(boards):
    with pytest.raises(PeerLost, match=r"worker 1 on b showed no progress for 0.05 s.*in mean_ at step 7") as caught:
        _waiting(boards[0], timeout_s=0.05).until(1, ARRIVED, 1, "mean_", 7)
    assert (caught.value.rank, caught.value.host, caught.value.step) == (1, "b", 7)
    assert caught.value.seconds >= 0.05
    with pytest.raises(PeerLost, match="worker 1 on b is gone .worker 0 noticed"):
        _waiting(boards[2]).until(0, ARRIVED, 1, "mean_", 7)


def test_a_peer_that_left_is_an_error_only_for_what_it_did_not_do(boards):
    boards[1].raise_to(ARRIVED, 3)
    boards[1].raise_to(STATE, CLOSED)
    waiting = _waiting(boards[0])
    waiting.until(1, ARRIVED, 3, "mean_", 0)
    with pytest.raises(PeerLost, match="left the group"):
        waiting.until(1, ARRIVED, 4, "mean_", 0)
    with pytest.raises(PeerLost, match="left the group"):
        waiting.check()


def test_a_hung_up_lifeline_is_a_lost_peer_whoever_is_waited_for(boards, pipes):
    mine = [(pipes[0][0], pipes[0][1]), (pipes[1][0], -1), (pipes[2][0], -1)]
    waiting = _waiting(boards[0], [(os.dup(read), os.dup(write) if write >= 0 else -1) for read, write in mine])
    os.close(pipes[2][1])
    pipes[2] = (pipes[2][0], -1)
    with pytest.raises(PeerLost, match="worker 2 on c is gone"):
        waiting.until(1, ARRIVED, 1, "barrier", 0)


def test_a_forked_child_does_not_hold_the_lifeline():
    read, write = os.pipe()
    lifelines = LivenessPipes(0, [(os.dup(read), write)])
    stay, leave = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(leave)
        os.read(stay, 1)
        os._exit(0)
    lifelines.close()
    ready, _, _ = select.select([read], [], [], 5)
    for fd in (stay, leave, read):
        os.close(fd)
    os.waitpid(pid, 0)
    assert ready  # end of file, though the child lived


def test_headers_and_small_blobs_arrive_whole(boards):
    header = Header(3, 1000, 0.1, 4096, 5)
    boards[1].write(9, header, b"hello")
    assert boards[0].read(1, 9) == header
    assert boards[0].inline(1, 9, 5) == b"hello"


def test_the_fence_of_other_processors_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(waiting_module, "_ORDERED_STORES", False)
    waiting_module.fence()
    waiting_module.fence()
