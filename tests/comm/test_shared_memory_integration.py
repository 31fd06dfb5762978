"""SharedMemoryGroup in real processes: the exam, many small operations, and every way to lose a peer."""

import os
import random
import signal
import time

import pytest
import torch
from harness import on_shared_memory, values

from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory import SharedMemory, SharedMemoryGroup
from manyhands.errors import ManyhandsError, PeerLost, Unsupported
from manyhands.testing.group_exam import GROUP_EXAM, vector, vectors


def _exam(group):
    for check in GROUP_EXAM.values():
        check(group)
    return len(GROUP_EXAM)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exam(size):
    assert values(on_shared_memory(size, _exam, timeout_s=30)) == [len(GROUP_EXAM)] * size


def _many(group):
    sizes, order = random.Random(1), random.Random(2)
    memory = group.allocate(5000, torch.float64)
    for i in range(2000):
        n, weights = sizes.randrange(0, 300), [sizes.choice([0.0, 1.0, 2.5]) for _ in range(group.size)]
        mine = vector(group.rank, n, seed=i)
        tensor = mine.clone() if order.random() < 0.3 else memory[(start := order.randrange(4000)) : start + n]
        tensor.copy_(mine)
        total = group.mean_(tensor, weights[group.rank], 1 << i % 50)
        assert total.bits == 1 << i % 50
        wanted = naive_mean(vectors(group, n, seed=i), weights) if sum(weights) else mine
        assert torch.allclose(tensor, wanted, rtol=1e-12, atol=1e-12)
        if order.random() < 0.1:
            assert group.all_gather_json(i) == [i] * group.size
    return True


def test_thousands_of_small_operations_of_random_sizes():
    assert values(on_shared_memory(4, _many, timeout_s=30)) == [True] * 4


def _share(group):
    group.allocate(5, torch.float32)
    mine = group.allocate(4, torch.float64)
    shared = group.share(mine, 1)
    group.barrier()
    shared[group.rank] = group.rank + 1.0
    group.barrier()
    with pytest.raises(Unsupported, match="only memory that allocate"):
        group.share(torch.zeros(4), 1)
    group.mean_(shared.clone())  # others go on as before
    return shared.tolist(), mine.tolist()


def test_a_ranks_memory_can_be_everybodys():
    outcomes = values(on_shared_memory(3, _share, timeout_s=30))
    assert [shared for shared, _ in outcomes] == [[1.0, 2.0, 3.0, 0.0]] * 3
    assert [mine for _, mine in outcomes] == [[0.0] * 4, [1.0, 2.0, 3.0, 0.0], [0.0] * 4]


def _killed(group):
    tensor = group.allocate(1000, torch.float32)
    for step in range(1000):
        group.step = step
        if (group.rank, step) == (1, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            start = time.monotonic()
            group.mean_(tensor)
        except PeerLost as error:
            with pytest.raises(PeerLost):
                group.barrier()
            return error.rank, error.host, error.step, time.monotonic() - start
    return None


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_peer_is_named_at_once(size):
    outcomes = on_shared_memory(size, _killed, timeout_s=30)
    assert outcomes[1].status == signal.SIGKILL
    for outcome in outcomes[:1] + outcomes[2:]:
        rank, host, step, seconds = outcome.value
        assert (rank, host) == (1, "host-1")
        assert step in (19, 20)  # the killed one may have left before the others saw the end of its last step
        assert seconds < 1


def _silent(group):
    group.barrier()
    if group.rank == 1:
        time.sleep(1.2)
        return None
    start = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        group.mean_(torch.ones(10))
    return caught.value.rank, time.monotonic() - start


def test_a_silent_peer_is_lost_after_the_deadline():
    first, _, third = values(on_shared_memory(3, _silent, timeout_s=0.5))
    assert first[0] == third[0] == 1
    assert 0.45 < first[1] < 1
    assert 0.45 < third[1] < 1


def _different(group):
    calls = {
        "operation": lambda odd: group.barrier() if odd else group.mean_(torch.ones(3)),
        "n": lambda odd: group.mean_(torch.ones(4 if odd else 3)),
        "dtype": lambda odd: group.all_reduce_(torch.ones(3, dtype=torch.int32 if odd else torch.float32)),
        "source": lambda odd: group.broadcast_(torch.ones(3), int(odd)),
    }
    with pytest.raises(ManyhandsError) as caught:
        calls[os.environ["DIFFERENT"]](group.rank == 1)
    with pytest.raises(ManyhandsError):
        group.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "even", "odd"),
    [
        ("operation", "mean_ of 3 float32", "barrier"),
        ("n", "mean_ of 3 float32", "mean_ of 4 float32"),
        ("dtype", "all_reduce_ of 3 float32", "all_reduce_ of 3 int32"),
        ("source", "broadcast_ from worker 0 of 3 float32", "broadcast_ from worker 1 of 3 float32"),
    ],
)
def test_different_calls_are_told_to_all_with_both_sides(what, even, odd, monkeypatch):
    monkeypatch.setenv("DIFFERENT", what)
    for text in values(on_shared_memory(3, _different, timeout_s=10)):
        assert even in text
        assert odd in text
        assert "worker 1" in text


def _sent_wrongly(group):
    if group.rank == 0:
        with pytest.raises(PeerLost, match="gave up"):
            group.send(torch.zeros(10_000_000), 1)
        return ""
    with pytest.raises(ManyhandsError) as caught:
        group.receive_(torch.zeros(5), 0)
    return str(caught.value)


def test_receiving_something_else_than_was_sent():
    text = values(on_shared_memory(2, _sent_wrongly, timeout_s=10))[1]
    assert "expected send of 5 float32" in text
    assert "send of 10000000 float32 came" in text


def _leaves(group):
    group.barrier()
    if group.rank == 1:
        return  # the harness closes the group
    with pytest.raises(PeerLost, match="left the group|is gone"):
        group.barrier()
    return


def test_a_peer_that_left():
    values(on_shared_memory(2, _leaves, timeout_s=10))


def _finishes_alone(group):
    """Point to point goes on after a third rank has ended well."""
    group.barrier()
    if group.rank == 2:
        return True
    time.sleep(0.1)
    for _ in range(3):
        if group.rank == 0:
            group.send(torch.ones(1_000_000), 1)
        else:
            time.sleep(0.02)
            group.receive_(torch.zeros(1_000_000), 0)
    return True


def test_a_rank_that_ended_well_is_no_loss_for_the_others():
    assert values(on_shared_memory(3, _finishes_alone, timeout_s=10)) == [True] * 3


def _waits(group):
    tensor = group.allocate(1000, torch.float32)
    group.barrier()
    before = group.waited_s
    if group.rank == 1:
        time.sleep(0.2)
    group.mean_(tensor)
    return group.waited_s - before


def test_the_one_who_comes_first_has_waited():
    early, late = values(on_shared_memory(2, _waits))
    assert 0.15 < early < 1
    assert late < 0.1


def test_tensors_and_descriptors_after_close():
    before = set(os.listdir("/proc/self/fd"))
    group = SharedMemoryGroup(0, 1, SharedMemory.create(1), lifelines=[os.pipe()])
    tensor = group.allocate(1000, torch.float32)
    tensor.fill_(2)
    group.mean_(tensor)
    group.close()
    group.close()
    with pytest.raises(ManyhandsError, match="closed"):
        group.mean_(tensor)
    with pytest.raises(ManyhandsError, match="closed"):
        group.allocate(1, torch.float32)
    assert tensor.sum() == 2000
    del tensor
    assert set(os.listdir("/proc/self/fd")) == before
