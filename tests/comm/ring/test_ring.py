"""Which way a tensor takes, sums and pieces on the way; and one rank against a bare link."""

import contextlib
import select
from contextlib import contextmanager

import pytest
import torch
from meshes import mesh, ring
from threads import in_threads

from manyhands.comm.checks import signature
from manyhands.comm.reducing import naive_mean
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES, Direct, Ring, Swap, add_up, exchange_of
from manyhands.comm.ring.link import ARRIVE, SEND, WAITING, Link, notice
from manyhands.errors import ManyhandsError
from manyhands.transport.frame import Frame
from refusals import refused


@contextmanager
def rings(size):
    groups = [ring(sockets, rank) for sockets in [mesh(size)] for rank in range(size)]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def test_which_way_a_tensor_takes():
    for size, nbytes, dtype, way in [
        (2, SWAP_BYTES, torch.float32, Swap),
        (2, SWAP_BYTES + 4, torch.float32, Ring),
        (2, SWAP_BYTES + 4, torch.bfloat16, Ring),
        (3, DIRECT_BYTES, torch.float32, Direct),
        (3, DIRECT_BYTES + 4, torch.float64, Ring),
        (3, DIRECT_BYTES + 4, torch.float16, Direct),
    ]:
        with rings(size) as groups:
            transfer = groups[0]._transfer(torch.zeros(-(-nbytes // dtype.itemsize), dtype=dtype))
            assert type(exchange_of(transfer)) is way, (size, nbytes, dtype)


def _everywhere(inputs, call):
    """What `call(group, its input)` makes of each rank's."""

    def run(rank):
        mine = inputs[rank].clone()
        call(groups[rank], mine)
        groups[rank].barrier()
        return mine

    with rings(len(inputs)) as groups:
        return in_threads(len(inputs), run)


@pytest.mark.parametrize("way", [Swap, Direct, Ring])
def test_every_way_gives_the_mean(way, monkeypatch):
    monkeypatch.setattr("manyhands.comm.ring.group.exchange_of", way)
    size = 2 if way is Swap else 3
    weights = [0.0, 2.0, 1.0][:size]
    for n in (1, 5, 200_003):
        inputs = [torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(size)]
        inputs[0].fill_(torch.nan)
        results = _everywhere(inputs, lambda group, mine: group.mean_(mine, weights[group.rank]))
        torch.testing.assert_close(results[0], naive_mean(inputs, weights), rtol=1e-12, atol=1e-12)
        assert all(torch.equal(result, results[0]) for result in results), n


def test_sixteen_bit_numbers_are_rounded_once():
    pieces = [torch.tensor([number], dtype=torch.bfloat16) for number in (256.0, 1.0, 1.0, 1.0)]
    into = torch.zeros(1, dtype=torch.bfloat16)
    add_up(pieces, None, into)
    assert into.item() == 260  # 256 + 1 is 256 in bfloat16, 259 is 260


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [0.0, 2.0]])
def test_two_workers_round_sixteen_bit_numbers_once_however_many(weights):
    n = SWAP_BYTES // 2 + 5
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(2)]
    first, second = (tensor.float() for tensor in inputs)
    wanted = first + second if weights is None else naive_mean([first, second], weights)

    def call(group, mine):
        group.all_reduce_(mine) if weights is None else group.mean_(mine, weights[group.rank])

    for result in _everywhere(inputs, call):
        assert torch.equal(result, wanted.bfloat16())


# -- pieces ------------------------------------------------------------------------------------------------------------


# -- one rank against a bare link --------------------------------------------------------------------------------------


@pytest.fixture
def make():
    """The group of rank 0 of `size`, and the other end of its link to rank 1."""
    made = []

    def group_and_peer(size=2, timeout_s=10.0):
        sockets = mesh(size)
        group, peer = ring(sockets, 0, timeout_s=timeout_s), Link(0, sockets[1][0])
        made.extend([group, peer, *(sock for own in sockets[2:] for sock in own.values()), *sockets[1].values()])
        return group, peer

    yield group_and_peer
    for one in made:
        one.close()


def _arrive(peer, operation, dtype=torch.uint8, text=b"", announced=None):
    """The peer arrives first; what it announces is what it says, unless told otherwise."""
    nbytes = len(text) if announced is None else announced
    peer.enqueue(Frame(kind=ARRIVE, sequence=1, elements=nbytes, weight=1.0, a=signature(operation, dtype)), text=text)
    peer.push()


def _stuff(sock):
    """Fill a socket; how many bytes it took."""
    stuffed = 0
    for size in (1 << 16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                stuffed += sock.send(bytes(size))
    return stuffed


def _read(peer, size):
    into, got = memoryview(bytearray(size)), 0
    while got < size:
        assert peer.unread or select.select([peer], [], [], 2.0)[0], f"{size - got} of {size} bytes never left"
        got += peer.pull(into[got:])
    return bytes(into)


@pytest.mark.parametrize(
    ("operation", "dtype", "text", "call"),
    [
        ("barrier", torch.uint8, b"", lambda group: group.barrier()),
        ("all_gather_json", torch.uint8, b"[1]", lambda group: group.all_gather_json([2])),
        ("mean_", torch.float32, b"", lambda group: group.mean_(torch.zeros(0), 1.0, 4)),
        ("mean_", torch.float32, b"", lambda group: group.mean_(torch.zeros(0), 0.0)),
        ("all_reduce_", torch.float32, b"", lambda group: group.all_reduce_(torch.zeros(0))),
    ],
)
def test_all_has_left_when_an_operation_without_data_returns(make, operation, dtype, text, call):
    group, peer = make()
    _arrive(peer, operation, dtype, text)
    stuffed = _stuff(group._links[1]._sock)

    def run(rank):
        if rank == 0:
            call(group)
            assert not group._links[1].full
            return
        _read(peer, stuffed)
        while (frame := peer.header()) is None:
            assert select.select([peer], [], [], 2.0)[0], "the frame never left"
        assert frame.kind == ARRIVE
        _read(peer, frame.elements)

    in_threads(2, run)


def test_sending_waits_for_nobody_but_the_target(make):
    group, peer = make(size=3, timeout_s=0.2)
    _stuff(group._links[2]._sock)
    group._links[2].enqueue(notice(WAITING, {"for": 1}))
    group.send(torch.ones(3), 1)
    assert peer.header().kind == SEND


def test_memory_is_not_taken_for_whatever_a_peer_announces(make):
    group, peer = make(timeout_s=0.2)
    _arrive(peer, "barrier", announced=1 << 27)
    with pytest.raises(ManyhandsError, match="worker 1 announced 134217728 bytes with barrier; expected 0 and at most"):
        group.barrier()


def test_a_text_that_is_too_long_is_refused_before_anything_leaves(make, monkeypatch):
    monkeypatch.setattr("manyhands.comm.ring.group._MOST_TEXT", 100)
    group, peer = make()
    refused("all_gather_json can carry at most 100 bytes of JSON or bits; got 102", group.all_gather_json, "x" * 100)
    assert peer.header() is None
    _arrive(peer, "barrier")
    group.barrier()
