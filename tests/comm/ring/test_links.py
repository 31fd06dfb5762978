"""Waiting on links: who is blamed for a silence, what an end means, and that errors reach the peers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import torch
from threads import in_threads

from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.link import CHUNK, GAVE_UP, LEFT, WAITING, Link, LinkEnded, notice
from manyhands.comm.ring.links import Links, Spinning, connect_all
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import Frame, from_json
from manyhands.transport.listener import Listener, connect


@pytest.fixture
def make():
    """Links of rank 0 of `size`, and the other ends by peer."""
    made = []

    def links_and_ends(size=4, timeout_s=0.05):
        pairs = {peer: socket.socketpair() for peer in range(1, size)}
        links = Links(
            0,
            {peer: Link(peer, here) for peer, (here, _) in pairs.items()},
            names=[10 * rank for rank in range(size)],
            hosts=[f"host-{rank}" for rank in range(size)],
            timeout_s=timeout_s,
        )
        ends = {peer: Link(0, there) for peer, (_, there) in pairs.items()}
        made.extend([links, *ends.values()])
        links.begin("mean_", 7)
        return links, ends

    yield links_and_ends
    for one in made:
        one.close()


def _say(end, frame):
    end.enqueue(frame)
    end.push()


def _said(end):
    """All notices that reached a peer."""
    output = []
    with contextlib.suppress(LinkEnded):
        while (frame := end.header()) is not None:
            output.append((frame.kind, from_json(frame.blob)))
    return output


def test_a_silent_peer_and_what_the_others_hear(make):
    links, ends = make()
    with pytest.raises(PeerLost) as caught:
        links.header(2)
    lost = caught.value
    assert (lost.rank, lost.host, lost.operation, lost.step) == (20, "host-2", "mean_", 7)
    assert lost.seconds >= 0.05
    for end in ends.values():
        (waiting, waited_for), (gave_up, reason) = _said(end)
        assert (waiting, waited_for) == (WAITING, {"for": 2})
        assert (gave_up, reason["rank"], reason["host"]) == (GAVE_UP, 20, "host-2")
    for again in (lambda: links.begin("barrier", 8), links.check):
        with pytest.raises(PeerLost, match="worker 20"):
            again()


@pytest.mark.parametrize(
    ("chain", "blamed"),
    [
        ({}, 3),
        ({3: 2}, 2),
        ({3: 2, 2: 1}, 1),
        ({3: 2, 2: 3}, 3),  # all wait for each other
        ({3: 0}, 3),
        ({1: 2, 2: 1}, 3),
    ],
)
def test_who_waits_for_whom_leads_to_the_cause(make, chain, blamed):
    links, ends = make()
    for peer, awaited in chain.items():
        _say(ends[peer], notice(WAITING, {"for": awaited}))
    with pytest.raises(PeerLost) as caught:
        links.header(3)
    assert caught.value.rank == 10 * blamed


def test_one_that_went_on_after_it_waited_is_not_excused(make):
    links, ends = make()
    _say(ends[2], notice(WAITING, {"for": 1}))
    _say(ends[2], Frame(kind=CHUNK))
    assert links.header(2).kind == CHUNK  # the notice is passed over
    with pytest.raises(PeerLost, match="worker 20"):
        links.header(2)


def test_a_death_is_noticed_whoever_is_awaited(make):
    links, ends = make(timeout_s=20)
    ends[3].close()
    with pytest.raises(PeerLost, match="worker 30 on host-3 is gone"):
        links.header(1)


def test_one_that_left_is_no_loss_until_it_is_awaited(make):
    links, ends = make(timeout_s=0.1)
    _say(ends[3], Frame(kind=CHUNK, sequence=5))
    _say(ends[3], notice(LEFT, {}))
    ends[3].close()
    with pytest.raises(PeerLost, match="worker 10 on host-1 showed no progress"):
        links.header(1)
    links, ends = make(timeout_s=20)
    _say(ends[3], Frame(kind=CHUNK, sequence=5))
    _say(ends[3], notice(LEFT, {}))
    ends[3].close()
    _say(ends[1], Frame(kind=CHUNK))
    links.header(1)
    assert links.header(3).sequence == 5
    with pytest.raises(PeerLost, match="worker 30 on host-3 left the group"):
        links.header(3)


@pytest.mark.parametrize("awaited", [1, 2])
@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        ({"rank": 99, "host": "far", "why": "is gone"}, PeerLost, r"worker 99 on far is gone \(worker 20 noticed\)"),
        (
            {"rank": 9, "host": "far", "why": "x (worker 4 noticed)"},
            PeerLost,
            r"worker 9 on far x \(worker 4 noticed\)\.",
        ),
        ({"text": "they differ"}, ManyhandsError, "they differ"),
    ],
)
def test_the_reason_of_one_that_gave_up_is_ones_own(make, awaited, reason, error, message):
    links, ends = make(timeout_s=20)
    _say(ends[2], notice(GAVE_UP, reason))
    ends[2].end_sending()
    with pytest.raises(error, match=message):
        links.header(awaited)
    assert [kind for kind, _ in _said(ends[3])] == [GAVE_UP]


def test_rubbish_is_told_by_name(make):
    links, ends = make(timeout_s=20)
    ends[1]._sock.sendall(b"GET / HTTP/1.1\r\n" * 10)
    with pytest.raises(ManyhandsError, match="worker 10 sent data that cannot be read .expected a frame of manyhands"):
        links.header(1)


def test_sending_to_one_that_does_not_read_has_a_deadline(make):
    links, _ = make(timeout_s=0.2)
    links[1].enqueue(Frame(kind=CHUNK), memoryview(bytearray(10_000_000)))
    with pytest.raises(PeerLost, match="worker 10"):
        links.flush()


def test_sending_to_one_that_left_is_no_success(make):
    links, ends = make(timeout_s=20)
    _say(ends[2], notice(LEFT, {}))
    ends[2].close()
    links[2].enqueue(Frame(kind=CHUNK))
    with pytest.raises(PeerLost, match="worker 20 on host-2 left the group"):
        links.flush()


def test_one_that_left_without_reading_is_known_at_once(make):
    links, ends = make(timeout_s=4)
    links[2].enqueue(Frame(kind=CHUNK), memoryview(bytearray(10_000_000)))
    _say(ends[2], notice(LEFT, {}))
    ends[2].end_sending()
    with pytest.raises(PeerLost, match="worker 20 on host-2 left the group"):
        links.flush()
    assert [kind for kind, _ in _said(ends[1])] == [GAVE_UP]  # and nobody heard that it is awaited


def test_one_that_left_is_no_reason_not_to_send_to_others(make, monkeypatch):
    links, ends = make(size=3, timeout_s=0.5)
    say_waiting = links._say_waiting

    def comes_late(awaited):
        say_waiting(awaited)
        links.push()
        _say(ends[1], Frame(kind=CHUNK))

    monkeypatch.setattr(links, "_say_waiting", comes_late)
    _say(ends[2], notice(LEFT, {}))
    ends[2].close()
    assert links.header(1).kind == CHUNK
    assert ends[1].header().kind == WAITING  # it was said, but not to the one that left
    links[1].enqueue(Frame(kind=CHUNK))
    links.flush()


def test_a_peer_that_only_waits_itself_makes_no_progress(make):
    """Each notice of the awaited peer comes just before this one's time is over."""
    links, ends = make(timeout_s=0.2)
    original, notices = links._poll, []

    class Poll:
        def poll(self, milliseconds):
            ready = original.poll(milliseconds)
            if not ready and len(notices) < 20:
                notices.append(_say(ends[3], notice(WAITING, {"for": 2})))
            return ready

        def register(self, *arguments):
            original.register(*arguments)

    links._poll = Poll()
    with pytest.raises(PeerLost, match="worker 20"):
        links.header(3)
    assert len(notices) <= 2
    assert _said(ends[1])[0] == (WAITING, {"for": 3})


def test_what_was_posted_leaves_while_another_is_awaited(make):
    links, ends = make(size=3, timeout_s=20)
    data = memoryview(bytearray(5_000_000))
    links[1].enqueue(Frame(kind=CHUNK, elements=len(data)), data)
    poll_is_over, original = [], links._poll

    class Poll:
        """Reads at the other end each time that the worker would sleep."""

        def poll(self, milliseconds):
            into = memoryview(bytearray(1 << 20))
            while ends[1].pull(into):
                pass
            if not links[1].full:
                poll_is_over.append(True)
                _say(ends[2], Frame(kind=CHUNK))
            return original.poll(10)

        def register(self, *arguments):
            original.register(*arguments)

    links._poll = Poll()
    assert links.header(2).kind == CHUNK
    assert poll_is_over


def test_closing_says_goodbye_once(make):
    links, ends = make()
    links.close()
    links.close()
    assert _said(ends[1]) == [(LEFT, {})]
    with pytest.raises(ManyhandsError, match="closed"):
        links.check()


def test_a_wait_can_be_interrupted_from_another_thread(make):
    links, ends = make(timeout_s=20)
    links.interrupt()
    with pytest.raises(PeerLost):
        links.header(1)
    assert ends[1].last_notice() == (0, {})
    with pytest.raises(ManyhandsError, match="closed"):
        links.check()


@pytest.mark.parametrize("awaited", [1, 3])
@pytest.mark.parametrize("before", [True, False])
def test_a_peer_whose_end_does_not_show_is_lost_by_what_another_thread_says(make, awaited, before):
    """Not the peer that is awaited, whose link was shut to wake this worker."""
    links, _ = make(timeout_s=20)
    telling = threading.Timer(0.0 if before else 0.2, links.lose, [30, "host-3"])
    telling.start()
    if before:
        telling.join()
    with pytest.raises(PeerLost, match="worker 30 on host-3 is lost, the driver says") as lost:
        links.header(awaited)
    assert lost.value.rank == 30
    with pytest.raises(PeerLost, match="worker 30 on host-3"):
        links.check()
    telling.join()


# -- connecting --------------------------------------------------------------------------------------------------------


TOKEN = b"t" * 32


@pytest.fixture(scope="module")
def credentials():
    return Credentials.create()


def _listeners(size, **secret):
    return [Listener(**secret) for _ in range(size)]


def _groups(size, secret, run):
    listeners = _listeners(size, **secret)
    addresses = [listener.address for listener in listeners]

    def one(rank):
        group = RingGroup(rank, size, connect_all(rank, listeners[rank], addresses, timeout_s=20, **secret))
        listeners[rank].close()
        try:
            return run(group)
        finally:
            group.close()

    return in_threads(size, one)


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_are_linked_with_all(size, tls, credentials):
    secret = {"credentials": credentials} if tls else {"credentials": None, "token": TOKEN}

    def run(group):
        for name in ("place", "mean_sizes", "bits", "handles", "broadcast", "point_to_point", "ledger"):
            GROUP_SUITE[name](group)
        return True

    assert _groups(size, secret, run) == [True] * size


def test_large_tensors_through_tls(credentials):
    def run(group):
        mine = torch.full((3_000_001,), float(group.rank + 1))
        group.mean_(mine, 1.0 + group.rank)
        group.barrier()
        return mine.unique().tolist()

    first, second = _groups(2, {"credentials": credentials}, run)
    assert first == second
    assert first == pytest.approx([5 / 3])


def test_a_rank_that_does_not_come_is_named():
    listeners = _listeners(3, credentials=None, token=TOKEN)
    addresses = [listener.address for listener in listeners]
    start = time.monotonic()

    def one(rank):
        with pytest.raises(PeerLost, match=r"worker 12 on c could not be connected.*connecting the ring"):
            connect_all(
                rank,
                listeners[rank],
                addresses,
                credentials=None,
                token=TOKEN,
                hosts="abc",
                names=[10, 11, 12],
                timeout_s=0.5,
            )

    in_threads(2, one)
    assert time.monotonic() - start < 10
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(("rank", "taken"), [(0, True), (1, True), (1, False)])
def test_a_check_ends_the_wait_for_one_that_will_not_come(rank, taken):
    """Of the one that listens, and of the one that knocks where nobody answers, or nobody is."""
    listeners = _listeners(2, credentials=None, token=TOKEN)
    addresses, start = [listener.address for listener in listeners], time.monotonic()
    if not taken:
        listeners[0].close()

    def check():
        if time.monotonic() > start + 0.3:
            raise KeyError("it is over")

    with pytest.raises(KeyError, match="it is over"):
        connect_all(rank, listeners[rank], addresses, credentials=None, token=TOKEN, timeout_s=30, check=check)
    assert time.monotonic() - start < 5
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"purpose": "server", "rank": 1, "generation": 0},
        {"purpose": "ring", "rank": 0, "generation": 0},
        {"purpose": "ring", "rank": 2, "generation": 0},
        {"purpose": "ring", "rank": "1", "generation": 0},
        {"purpose": "ring", "rank": 1, "generation": 1},
        {},
    ],
)
def test_who_does_not_belong_is_refused_and_the_others_come(hello):
    listeners = _listeners(2, credentials=None, token=TOKEN)
    addresses = [listener.address for listener in listeners]

    def one(rank):
        if rank == 1:
            with pytest.raises(ChannelClosed, match="expected a worker"):
                connect(addresses[0], hello, credentials=None, token=TOKEN, peer="worker 0", timeout_s=10)
        channels = connect_all(rank, listeners[rank], addresses, credentials=None, token=TOKEN, timeout_s=10)
        for channel in channels.values():
            channel.close()
        return list(channels)

    assert in_threads(2, one) == [[1], [0]]
    for listener in listeners:
        listener.close()


# -- spinning ----------------------------------------------------------------------------------------------------------


def test_it_goes_on_while_it_finds():
    spinning = Spinning(100)
    for _ in range(10):
        assert spinning.attempts() == 100
        spinning.slept(1e-4)
        spinning.slept(1e-4)
        assert spinning.attempts() == 100
        spinning.found()


def test_three_short_sleeps_in_a_row_make_it_pause_for_a_while():
    spinning = Spinning(100)
    for _ in range(3):
        assert spinning.attempts() == 100
        spinning.slept(1e-4)
    for _ in range(64):
        assert spinning.attempts() == 1
        spinning.slept(1e-4)
    assert spinning.attempts() == 100


def test_late_peers_do_not_count():
    spinning = Spinning(100)
    for _ in range(100):
        spinning.slept(0.5)
    assert spinning.attempts() == 100
