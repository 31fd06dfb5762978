"""Links: frames go out and come in piece by piece; who is blamed for a silence, what an end means, and who hears it."""

import contextlib
import select
import socket
import threading
import time
from functools import partial

import pytest
import torch
from threads import in_threads

from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.link import ARRIVE, CHUNK, GAVE_UP, LEFT, WAITING, Link, LinkEnded, notice
from manyhands.comm.ring.links import Links, Spinning, connect_all
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import HEADER_BYTES, Frame, FrameError, from_json, pack
from manyhands.transport.listener import Listener, connect
from refusals import refused


@pytest.fixture
def pair():
    ends = socket.socketpair()
    links = [Link(1 - rank, end) for rank, end in enumerate(ends)]
    yield links
    for link in links:
        link.close()


def _pull(link, size):
    into = bytearray(size)
    got = 0
    while got < size:
        got += link.pull(memoryview(into)[got:])
    return bytes(into)


def test_a_frame_its_text_and_its_tensor(pair):
    here, there = pair
    assert there.header() is None
    here.enqueue(Frame(kind=ARRIVE, sequence=7, elements=8, weight=2.5, a=-1, b=3), memoryview(b"data"), b"text")
    assert here.full
    assert here.push()
    assert not here.full
    frame = there.header()
    assert (frame.kind, frame.sequence, frame.weight, frame.a, frame.b) == (ARRIVE, 7, 2.5, -1, 3)
    assert _pull(there, 8) == b"textdata"
    assert there.pull(memoryview(bytearray(1))) == 0
    assert here.enqueued == here.sent == HEADER_BYTES + 8


def test_many_frames_at_once_and_one_byte_by_byte(pair):
    """Headers straddle what is read ahead."""
    here, there = pair
    payloads = [bytes([number % 251]) * 31 for number in range(500)]
    for number, payload in enumerate(payloads):
        here.enqueue(Frame(kind=CHUNK, sequence=number, elements=len(payload)), memoryview(payload))
    for number, payload in enumerate(payloads):
        here.push()
        frame = there.header()
        assert (frame.sequence, frame.elements) == (number, len(payload))
        assert _pull(there, len(payload)) == payload
    for byte in pack(Frame(kind=CHUNK, elements=3)):
        assert there.header() is None
        here._sock.send(bytes([byte]))
    here._sock.send(b"abc")
    assert there.header().elements == 3
    assert _pull(there, 3) == b"abc"


@pytest.mark.parametrize("before", [0, 5, 70_000])
def test_the_last_notice_is_found_behind_anything_and_nothing_is_lost(pair, before):
    here, there = pair
    here.enqueue(Frame(kind=CHUNK, elements=before), memoryview(b"z" * before))
    here.push()
    assert there.last_notice() == (0, {})
    here.enqueue(notice(WAITING, {"for": 2}))
    here.push()
    assert there.last_notice() == (WAITING, {"for": 2})
    last = notice(LEFT, {"text": "x" * 5000, "rank": 3})  # of which a part is said
    left = from_json(last.blob)
    assert (set(left["text"]), left["rank"]) == ({"x"}, 3)
    here.enqueue(last)
    here.push()
    here.end_sending()
    assert there.last_notice() == (LEFT, left)
    assert there.header().elements == before
    assert _pull(there, before) == b"z" * before
    for kind, fields in [(WAITING, {"for": 2}), (LEFT, left)]:
        frame = there.header()
        assert (frame.kind, from_json(frame.blob)) == (kind, fields)
    refused("", there.header, kind=LinkEnded)


def test_a_blob_where_none_belongs(pair):
    here, there = pair
    here.enqueue(Frame(kind=CHUNK, blob=b"surprise"))
    here.push()
    refused("blob of 8 bytes", there.header, kind=FrameError)


def test_a_connection_that_was_reset_before_is_an_ended_link():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    there.close()
    assert select.select([here], [], [], 5)[0]
    link = Link(1, here)
    refused("", link.header, kind=LinkEnded)
    link.close()


def test_the_end_and_a_broken_pipe(pair):
    here, there = pair
    here.close()
    refused("", there.pull, memoryview(bytearray(1)), kind=LinkEnded)
    there.enqueue(Frame(kind=CHUNK))
    refused("", there.push, kind=LinkEnded)
    there.end_sending()
    there.shut()


# -- waiting on several ------------------------------------------------------------------------------------------------


@pytest.fixture
def make():
    """Links of rank 0 of `size`, and the other ends by peer."""
    made = []

    def links_and_ends(timeout_s=20.0, size=4):
        pairs = {peer: socket.socketpair() for peer in range(1, size)}
        where = {"names": [10 * rank for rank in range(size)], "hosts": [f"host-{rank}" for rank in range(size)]}
        links = Links(0, {peer: Link(peer, here) for peer, (here, _) in pairs.items()}, **where, timeout_s=timeout_s)
        ends = {peer: Link(0, there) for peer, (_, there) in pairs.items()}
        made.extend([links, *ends.values()])
        links.begin("mean_", 7)
        return links, ends

    yield links_and_ends
    for one in made:
        one.close()


def _say(end, *frames):
    for frame in frames:
        end.enqueue(frame)
        end.push()


def _said(end):
    """All notices that reached a peer."""
    output = []
    with contextlib.suppress(LinkEnded):
        while (frame := end.header()) is not None:
            output.append((frame.kind, from_json(frame.blob)))
    return output


def _waits(peer):
    return notice(WAITING, {"for": peer})


lost = partial(refused, kind=PeerLost)


def test_a_silent_peer_and_what_the_others_hear(make):
    links, ends = make(0.05)
    error = lost("", links.header, 2)
    assert (error.rank, error.host, error.operation, error.step) == (20, "host-2", "mean_", 7)
    assert error.seconds >= 0.05
    for end in ends.values():
        waiting, (gave_up, reason) = _said(end)
        assert waiting == (WAITING, {"for": 2})
        assert (gave_up, reason["rank"], reason["host"]) == (GAVE_UP, 20, "host-2")
    lost("worker 20", links.begin, "barrier", 8)
    lost("worker 20", links.check)


def test_who_waits_for_whom_leads_to_the_cause(make):
    for chain, blamed in [
        ({}, 3),
        ({3: 2}, 2),
        ({3: 2, 2: 1}, 1),
        ({3: 2, 2: 3}, 3),  # all wait for each other
        ({3: 0}, 3),
        ({1: 2, 2: 1}, 3),
    ]:
        links, ends = make(0.05)
        for peer, awaited in chain.items():
            _say(ends[peer], _waits(awaited))
        assert lost("", links.header, 3).rank == 10 * blamed, chain
    links, ends = make(0.05)
    _say(ends[2], _waits(1), Frame(kind=CHUNK))
    assert links.header(2).kind == CHUNK, "the notice is passed over"
    lost("worker 20", links.header, 2)  # one that went on after it waited is not excused


def test_a_death_is_noticed_whoever_is_awaited_and_one_that_left_is_no_loss_until_it_is_awaited(make):
    links, ends = make()
    ends[3].close()
    lost("worker 30 on host-3 is gone", links.header, 1)
    for timeout_s in (0.1, 20):
        links, ends = make(timeout_s)
        _say(ends[3], Frame(kind=CHUNK, sequence=5), notice(LEFT, {}))
        ends[3].close()
        if timeout_s < 1:
            lost("worker 10 on host-1 showed no progress", links.header, 1)
        else:
            _say(ends[1], Frame(kind=CHUNK))
            links.header(1)
            assert links.header(3).sequence == 5
            lost("worker 30 on host-3 left the group", links.header, 3)


def test_the_reason_of_one_that_gave_up_is_ones_own(make):
    far = {"rank": 9, "host": "far"}
    for reason, kind, words in [
        (far | {"why": "is gone"}, PeerLost, r"worker 9 on far is gone \(worker 20 noticed\)"),
        (far | {"why": "x (worker 4 noticed)"}, PeerLost, r"worker 9 on far x \(worker 4 noticed\)\."),
        ({"text": "they differ"}, ManyhandsError, "they differ"),
    ]:
        for awaited in (1, 2):
            links, ends = make()
            _say(ends[2], notice(GAVE_UP, reason))
            ends[2].end_sending()
            refused(words, links.header, awaited, kind=kind, case=(reason, awaited))
            assert [kind for kind, _ in _said(ends[3])] == [GAVE_UP], (reason, awaited)
    links, ends = make()
    ends[1]._sock.sendall(b"GET / HTTP/1.1\r\n" * 10)
    words = "worker 10 sent data that cannot be read .expected a frame of manyhands"
    refused(words, links.header, 1, kind=ManyhandsError)


def test_sending_to_one_that_does_not_read_has_a_deadline_and_one_that_left_is_known_at_once(make):
    much = memoryview(bytearray(10_000_000))
    links, _ = make(0.2)
    links[1].enqueue(Frame(kind=CHUNK), much)
    lost("worker 10", links.flush)
    for data in (much, much[:0]):
        links, ends = make()
        links[2].enqueue(Frame(kind=CHUNK), data)
        _say(ends[2], notice(LEFT, {}))
        ends[2].end_sending() if data else ends[2].close()
        lost("worker 20 on host-2 left the group", links.flush, case=len(data))
        assert [kind for kind, _ in _said(ends[1])] == [GAVE_UP], "and nobody heard that it is awaited"


def test_one_that_left_is_no_reason_not_to_send_to_others(make, monkeypatch):
    links, ends = make(0.5, size=3)
    say_waiting = links._say_waiting

    def comes_late(awaited):
        say_waiting(awaited)
        links.push()
        _say(ends[1], Frame(kind=CHUNK))

    monkeypatch.setattr(links, "_say_waiting", comes_late)
    _say(ends[2], notice(LEFT, {}))
    ends[2].close()
    assert links.header(1).kind == CHUNK
    assert ends[1].header().kind == WAITING, "it was said, but not to the one that left"
    links[1].enqueue(Frame(kind=CHUNK))
    links.flush()


class Polled:
    """A poll of which `hook(milliseconds)` is the waiting."""

    def __init__(self, links, hook):
        self.original, self.poll = links._poll, hook
        links._poll = self

    def register(self, *arguments):
        self.original.register(*arguments)


def test_a_peer_that_only_waits_itself_makes_no_progress(make):
    """Each notice of the awaited peer comes just before this one's time is over."""
    links, ends = make(0.2)
    notices = []

    def poll(milliseconds):
        ready = polled.original.poll(milliseconds)
        if not ready and len(notices) < 20:
            notices.append(_say(ends[3], _waits(2)))
        return ready

    polled = Polled(links, poll)
    lost("worker 20", links.header, 3)
    assert len(notices) <= 2
    assert _said(ends[1])[0] == (WAITING, {"for": 3})


def test_what_was_posted_leaves_while_another_is_awaited(make):
    links, ends = make(size=3)
    data = memoryview(bytearray(5_000_000))
    links[1].enqueue(Frame(kind=CHUNK, elements=len(data)), data)
    over = []

    def poll(milliseconds):
        """Reads at the other end each time that the worker would sleep."""
        into = memoryview(bytearray(1 << 20))
        while ends[1].pull(into):
            pass
        if not links[1].full:
            over.append(True)
            _say(ends[2], Frame(kind=CHUNK))
        return polled.original.poll(10)

    polled = Polled(links, poll)
    assert links.header(2).kind == CHUNK
    assert over


def test_closing_says_goodbye_once_and_a_wait_can_be_interrupted_from_another_thread(make):
    links, ends = make()
    links.close()
    links.close()
    assert _said(ends[1]) == [(LEFT, {})]
    refused("closed", links.check, kind=ManyhandsError)
    links, ends = make()
    links.interrupt()
    lost("", links.header, 1)
    assert ends[1].last_notice() == (0, {})
    refused("closed", links.check, kind=ManyhandsError)


def test_a_peer_whose_end_does_not_show_is_lost_by_what_another_thread_says(make):
    """Not the peer that is awaited, whose link was shut to wake this worker."""
    for awaited, delay_s in ((1, 0.0), (3, 0.0), (1, 0.05), (3, 0.05)):
        links, _ = make()
        telling = threading.Timer(delay_s, links.lose, [30, "host-3"])
        telling.start()
        if not delay_s:
            telling.join()
        words = "worker 30 on host-3 is lost, the driver says"
        assert lost(words, links.header, awaited, case=(awaited, delay_s)).rank == 30
        lost("worker 30 on host-3", links.check)
        telling.join()


# -- connecting --------------------------------------------------------------------------------------------------------


PLAIN = {"credentials": None, "token": b"t" * 32}


@pytest.fixture
def listening():
    """So many listeners, and their addresses."""
    made = []

    def listeners(size, **secret):
        made.extend(new := [Listener(**(secret or PLAIN)) for _ in range(size)])
        return new, [listener.address for listener in new]

    yield listeners
    for listener in made:
        listener.close()


@pytest.mark.parametrize(("size", "tls"), [(1, False), (2, False), (3, True)])
def test_all_are_linked_with_all(size, tls, listening):
    secret = {"credentials": Credentials.create()} if tls else PLAIN
    listeners, addresses = listening(size, **secret)

    def one(rank):
        group = RingGroup(rank, size, connect_all(rank, listeners[rank], addresses, timeout_s=20, **secret))
        for name in ("place", "mean_sizes", "point_to_point"):
            GROUP_SUITE[name](group)
        mine = torch.full((1_000_001,), float(group.rank + 1))
        group.mean_(mine, 1.0 + group.rank)
        group.barrier()
        group.close()
        return mine.unique().tolist()

    weights = range(1, size + 1)
    wanted = pytest.approx(sum(weight**2 for weight in weights) / sum(weights))
    found = in_threads(size, one)
    assert found == found[:1] * size
    assert all(value == wanted for value in found[0])  # one or two, by the order of sums


def test_a_rank_that_does_not_come_is_named(listening):
    listeners, addresses = listening(3)

    def one(rank):
        where = {"hosts": "abc", "names": [10, 11, 12], "timeout_s": 0.5}
        words = "worker 12 on c could not be connected.*connecting the ring"
        lost(words, partial(connect_all, **PLAIN, **where), rank, listeners[rank], addresses)

    in_threads(2, one)


def test_a_check_ends_the_wait_for_one_that_will_not_come(listening):
    """Of the one that listens, and of the one that knocks where nobody answers, or nobody is."""
    for rank, taken in [(0, True), (1, True), (1, False)]:
        (first, second), addresses = listening(2)
        start = time.monotonic()
        if not taken:
            first.close()

        def check(start=start):
            if time.monotonic() > start + 0.1:
                raise KeyError("it is over")

        with pytest.raises(KeyError, match="it is over"):  # and no deadline of 300 s
            connect_all(rank, (first, second)[rank], addresses, **PLAIN, timeout_s=300, check=check)


def test_who_does_not_belong_is_refused_and_the_others_come(listening):
    listeners, addresses = listening(2)
    good = {"purpose": "ring", "rank": 1, "generation": 0}

    def one(rank):
        wrong = [{"purpose": "server"}, {"rank": 0}, {"rank": 2}, {"rank": "1"}, {"generation": 1}]
        for hello in [*(good | other for other in wrong), {}] if rank else []:
            knock = partial(connect, **PLAIN, peer="worker 0", timeout_s=10)
            refused("expected a worker", knock, addresses[0], hello, kind=ChannelClosed)
        channels = connect_all(rank, listeners[rank], addresses, **PLAIN, timeout_s=10)
        for channel in channels.values():
            channel.close()
        return list(channels)

    assert in_threads(2, one) == [[1], [0]]


# -- spinning ----------------------------------------------------------------------------------------------------------


def test_three_short_sleeps_in_a_row_make_it_pause_for_a_while():
    """It goes on while it finds, and late peers do not count."""
    spinning = Spinning(100)
    for _ in range(10):
        assert spinning.attempts() == 100
        spinning.slept(1e-4)
        spinning.slept(1e-4)
        assert spinning.attempts() == 100
        spinning.found()
    for _ in range(100):
        spinning.slept(0.5)
    for _ in range(3):
        assert spinning.attempts() == 100
        spinning.slept(1e-4)
    for _ in range(64):
        assert spinning.attempts() == 1
        spinning.slept(1e-4)
    assert spinning.attempts() == 100
