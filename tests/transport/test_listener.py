"""A listener on real sockets: who is let in, who is not, and that it goes on whatever comes."""

import errno
import logging
import select
import socket
import ssl
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from socket_pairs import aside, credentials

from manyhands.transport import listener as module
from manyhands.transport.channel import ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import Frame, FrameError, pack, to_json
from manyhands.transport.hello import Proof, speak_to
from manyhands.transport.listener import Listener, RejectedPeers, _drive, connect
from refusals import refused

TOKEN = b"0123456789abcdef"
PLAIN = {"credentials": None, "token": TOKEN}
PROOFS = {"tls": lambda: {"credentials": credentials()}, "plain": lambda: PLAIN}


def check(hello):
    """As a server would: names a worker, or refuses it."""
    if hello["worker"] not in {0, 1, 2, 3}:
        raise FrameError(f"no worker {hello['worker']} here")
    return f"worker {hello['worker']}"


class Serving:
    """A listener that a thread serves: each peer gets its own frames back, once."""

    def __init__(self, how, **options):
        self.proof = PROOFS[how]()
        self.listener = Listener(**self.proof, generation=2, timeout_s=5, **options)
        self.channels = []
        self.done = aside(self.run)

    def run(self):
        while True:
            try:
                channel, _ = self.listener.accept(check, 60)
            except ChannelClosed:
                return
            self.channels.append(channel)
            channel.send(channel.receive())

    def connect(self, worker=0, **options):
        options = {"generation": 2, "timeout_s": 5, "peer": "the server", **self.proof, **options}
        return connect(self.listener.address, {"worker": worker}, **options)

    def still_serves(self):
        channel = self.connect()
        channel.send(Frame(kind=7, blob=b"hello"))
        assert channel.receive().blob == b"hello"
        channel.close()

    def raw(self):
        sock = socket.create_connection(self.listener.address, 5)
        sock.settimeout(5)
        return sock


@contextmanager
def serving(how="tls", **options):
    served = Serving(how, **options)
    try:
        yield served
    finally:
        served.listener.close()
        for channel in served.channels:
            channel.close()
        served.done.result(5)


@pytest.mark.parametrize("how", PROOFS)
def test_a_good_peer(how):
    with serving(how) as served:
        channel = served.connect(worker=3)
        channel.send(Frame(kind=7))
        assert channel.receive().generation == 2
        assert channel.peer == "the server"
        (own,) = served.channels
        assert (own.peer, own.generation) == ("worker 3", 2)
        served.listener.close()
        own.send(Frame(kind=1), torch.ones(5))  # the channels that it gave stay open
        channel.expect(1, into := torch.zeros(5))
        assert into.eq(1).all()
        channel.close()


@pytest.mark.parametrize("how", PROOFS)
def test_who_is_refused_hears_why(how):
    """A member, and a stranger that speaks manyhands."""
    member = [
        ({"worker": 9}, "refused this connection: no worker 9 here"),
        ({"worker": []}, "incomplete or wrong .TypeError"),
        ({"generation": 1}, "a hello of generation 1; this is generation 2"),
    ]
    stranger = {
        "tls": [({"credentials": Credentials.create()}, "same credentials"), (PLAIN, "WRONG_VERSION_NUMBER")],
        "plain": [
            ({"credentials": credentials(), "token": None}, "same credentials"),
            ({"credentials": None, "token": TOKEN[::-1]}, "it does not have this run's token"),
        ],
    }[how]
    with serving(how) as served:
        for options, reason in member + stranger:
            refused(reason, partial(served.connect, **options), kind=ChannelClosed, case=options)
            served.still_serves()


def _tls(sock, context):
    sock = context.wrap_socket(sock)
    sock.settimeout(5)
    return sock


def _bare():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _hello(worker=0, generation=2, **fields):
    blob = to_json({"worker": worker})
    return pack(Frame(kind=0, a=2, generation=generation, blob=blob, **fields)) + blob


ATTACKS = {
    "garbage": lambda sock: sock.sendall(bytes(range(256)) * 40),
    "http": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "nothing": lambda sock: None,
    "reset": lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"),
    "half a TLS record": lambda sock: sock.sendall(b"\x16\x03\x01\x02\x00\x01"),
    "a huge TLS record": lambda sock: sock.sendall(b"\x16\x03\x01\xff\xff" + bytes(70_000)),
    "plain frames": lambda sock: sock.sendall(_hello()),
    "pickle": lambda sock: sock.sendall(b"\x80\x04\x95cos\nsystem\n(S'false'\ntR."),
}
INSIDE = {  # said by who holds the credentials
    "garbage": b"\xff" * 1000,
    "truncated": _hello()[:70],
    "no hello": pack(Frame(kind=9)),
    "a hello with a tensor": _hello(elements=10**9),
    "too large": pack(Frame(kind=0, a=2, generation=2, blob=bytes(1 << 20))),
    "beyond any limit": pack(Frame(kind=0, a=2))[:32] + b"\xff" * 32,
    "nested": pack(Frame(kind=0, a=2, generation=2, blob=bytes(60_000))) + b"[" * 60_000,
    "a refusal": pack(Frame(kind=0, a=4, blob=b"{}")) + b"{}",
    "a worker that is none": _hello(worker=99),
}


def _until_the_end(sock):
    """What the listener says until it closes; a reset is an end too."""
    heard = b""
    try:
        while data := sock.recv(1 << 16):
            heard += data
    except (ConnectionResetError, ssl.SSLError):
        return heard
    return heard


def _leave(sock):
    with suppress(OSError):  # it may have reset the connection by now
        socket.socket.shutdown(sock, socket.SHUT_WR)
    _until_the_end(sock)


@pytest.mark.parametrize("how", PROOFS)
def test_unauthenticated_peers_are_closed_and_named_once_and_it_still_serves(how, caplog):
    for name, attack in ATTACKS.items():
        caplog.clear()
        with serving(how) as served:
            for _ in range(2):
                with served.raw() as sock:
                    attack(sock)
                    if name != "reset":
                        _leave(sock)
            served.still_serves()
            assert not [record for record in caplog.records if record.levelno > logging.WARNING], name
            assert len([record for record in caplog.records if "127.0.0.1" in record.getMessage()]) == 1, name


def test_nonsense_behind_tls_is_closed_and_it_still_serves(caplog):
    for name, said in INSIDE.items():
        caplog.clear()
        with serving() as served:
            with _tls(served.raw(), credentials().client_context()) as sock:
                sock.sendall(said)
                _leave(sock)
            served.still_serves()
            assert len(caplog.records) == 1, name


def test_a_tls_client_without_or_with_another_certificate():
    with serving() as served:
        for context in (_bare(), Credentials.create().client_context()):
            context.verify_mode = ssl.CERT_NONE
            with _tls(served.raw(), context) as sock:
                sock.sendall(_hello())  # TLS 1.3 lets it say so before it is judged
                assert _until_the_end(sock) == b""
        served.still_serves()


def test_silent_and_slow_peers_hold_up_nobody(monkeypatch, caplog):
    monkeypatch.setattr(module, "HELLO_S", 0.3)
    with serving() as served:
        silent, slow = served.raw(), served.raw()
        with silent, slow:
            slow.sendall(b"\x16")
            served.still_serves()
            for byte in b"\x03\x01\x02\x00\x01\x00":  # progress does not buy it more time
                if select.select([silent], [], [], 0.05)[0]:
                    break
                slow.send(bytes([byte]))
            assert _until_the_end(silent) == _until_the_end(slow) == b""
        served.still_serves()
    assert [record.getMessage() for record in caplog.records if "did not say who it is" in record.getMessage()]


def test_a_flood_crowds_out_its_own(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PENDING", 4)
    with serving() as served:
        flood = [served.raw() for _ in range(12)]
        assert _until_the_end(flood[0]) == b""
        served.still_serves()
        for sock in flood:
            sock.close()


class Instead:
    """A listening socket whose `accept` is another one."""

    def __init__(self, sock, accept):
        self.sock, self.accept = sock, accept

    def __getattr__(self, name):
        return getattr(self.sock, name)


def test_without_descriptors_it_waits_and_a_handshake_that_was_cut_off_is_tried_again(monkeypatch):
    with serving() as served:
        own, failures = served.listener._sock, iter([errno.EMFILE, errno.ECONNABORTED])

        def accept():
            for number in failures:
                if number == errno.ECONNABORTED:
                    sock, _ = own.accept()
                    sock.settimeout(5)
                    sock.recv(1 << 16)  # an end with nothing unread is none by reset
                    sock.close()
                raise OSError(number, "none left")
            return own.accept()

        monkeypatch.setattr(served.listener, "_sock", Instead(own, accept))
        served.still_serves()
        assert next(failures, None) is None


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_nobody_listens_without_exactly_one_secret_and_without_tls_only_loopback_unless_said_twice():
    for secret in ({}, {"token": b"short"}, {"token": TOKEN, "credentials": credentials()}):
        options = {"credentials": None, **secret}
        refused("one of them|16 bytes", partial(Listener, **options), case=secret)
        refused("one of them|16 bytes", partial(connect, peer="x", **options), ("127.0.0.1", 1), {}, case=secret)
    for host in ("0.0.0.0", "::"):
        refused("plain_network=True", partial(Listener, **PLAIN), host)
        Listener(host, **PLAIN, plain_network=True).close()
        Listener(host, credentials=credentials()).close()
    for host in ("localhost", "127.0.0.1", "::1"):
        with serving("plain", host=host) as served:
            assert served.listener.address[1] > 0
            served.still_serves()


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_nobody_comes_and_closing_wakes_who_accepts():
    listener = Listener(**PLAIN)
    for timeout_s in (0, 0.02):
        refused("nobody came", listener.accept, check, timeout_s, kind=ChannelTimeout)
    waiting = aside(lambda: listener.accept(check, 60))
    select.select([], [], [], 0.02)
    listener.close()
    refused("", waiting.result, 5, kind=ChannelClosed)
    refused("", listener.accept, check, 1, kind=ChannelClosed)
    listener.close()


def test_who_was_half_way_is_judged_by_the_newest_check():
    def never(hello):
        raise FrameError("not now")

    listener = Listener(**PLAIN)
    half, proof = socket.create_connection(listener.address), Proof(None, TOKEN)
    with half:
        refused("", listener.accept, never, 0, kind=ChannelTimeout)
        half.settimeout(0)
        words = aside(lambda: _drive(speak_to(half, proof, 0, to_json({"worker": 1})), half, time.monotonic() + 5))
        channel, hello = listener.accept(check, 5)
        assert hello == {"worker": 1}
        words.result(5)
        channel.close()
    listener.close()


def test_the_connecting_side_waits_for_a_listener():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        client = aside(lambda: connect(("127.0.0.1", port), {"worker": 0}, **PLAIN, peer="s", timeout_s=10))
        select.select([], [], [], 0.05)
    listener = Listener(**PLAIN, ports=(port, port))
    channel, _ = listener.accept(check, 10)
    client.result(5).close()
    channel.close()
    listener.close()


def test_nobody_listens_or_says_nothing_and_a_hello_has_a_limit():
    knock = partial(connect, **PLAIN, peer="the server", timeout_s=0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        refused("no answer from the server at 127", knock, taken.getsockname(), {}, kind=ChannelTimeout)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        refused("did not answer", knock, mute.getsockname(), {}, kind=ChannelTimeout)
    refused("at most 65536", knock, ("127.0.0.1", 1), {"x": "y" * 70_000})


# -- rejected ----------------------------------------------------------------------------------------------------------


def test_once_for_each_address_and_a_flood_of_them_ends_with_a_word(caplog, monkeypatch):
    named = RejectedPeers()
    for address in ["10.0.0.1", "10.0.0.2", "10.0.0.1"]:
        named.name(address, "garbage")
    assert [record.args[0] for record in caplog.records] == ["10.0.0.1", "10.0.0.2"]
    assert {(record.name, record.levelno) for record in caplog.records} == {("manyhands", logging.WARNING)}
    caplog.clear()
    monkeypatch.setattr(module, "MOST_NAMED", 3)
    named = RejectedPeers()
    for number in range(10):
        named.name(f"fe80::{number}", "garbage" * 1000)
    assert len(caplog.records) == 3
    assert "no more will be" in caplog.records[-1].getMessage()
    assert len(caplog.records[-1].getMessage()) < 500
