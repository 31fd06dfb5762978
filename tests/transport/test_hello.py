"""The first words, step by step without a clock: two generators and a socket pair between them."""

import socket

import pytest
from socket_pairs import HELLO, PROOF, TOKEN, credentials, name

from manyhands.transport.frame import Frame, FrameError, pack
from manyhands.transport.hello import HandshakeRefused, Peer, Proof, listen_to, refuse, speak_to, wrapped

NO_TOKEN = "it does not have this run's token"
FORGED = b"".join(pack(Frame(kind=0, a=a, blob=bytes(32))) + bytes(32) for a in (1, 3))


def talk(*sides):
    """Run both sides in turns until both have ended; what each gave or raised."""
    ended = {}
    for _ in range(100):
        for side in sides:
            if side not in ended:
                try:
                    next(side)
                except StopIteration as end:
                    ended[side] = end.value
                except (FrameError, HandshakeRefused, OSError) as error:
                    ended[side] = error
        if len(ended) == len(sides):
            break
    return [ended.get(side, "waits") for side in sides]


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(0)
        far.settimeout(0)
        yield near, far


def test_both_sides_prove_the_token_and_it_never_travels(pair):
    near, far = pair
    assert talk(listen_to(near, PROOF, 2, name), speak_to(far, PROOF, 3, HELLO)) == [
        Peer("worker 3", {"worker": 3}, 3),
        None,
    ]
    client, heard = speak_to(far, PROOF, 0, HELLO), b""
    next(client)
    heard += near.recv(1 << 16)
    near.sendall(FORGED)
    (error,) = talk(client)
    heard += near.recv(1 << 16)
    assert HELLO in heard
    assert TOKEN not in heard
    assert "the other side does not have this run's token" in str(error)


def test_what_was_heard_opens_no_second_connection(pair):
    """A hello, proof and all, that is said again word for word: the challenge is another one."""
    near, far = pair
    server, client = listen_to(near, PROOF, 0, name), speak_to(far, PROOF, 0, HELLO)
    next(server)
    next(client)  # the handshake
    next(server)  # the challenge
    next(client)  # the hello
    words = pack(Frame(kind=0, a=0)) + near.recv(1 << 16)
    other, replayed = socket.socketpair()
    with other, replayed:
        other.settimeout(0)
        replayed.sendall(words)
        (error,) = talk(listen_to(other, PROOF, 0, name))
    assert isinstance(error, FrameError)
    assert NO_TOKEN in str(error)


@pytest.mark.parametrize("last", [b"", b"\x16\x03\x03\x00"])
def test_an_end_in_the_middle_of_the_handshake_is_no_judgement(pair, last):
    near, far = pair
    proof = Proof(credentials(), None)
    with wrapped(far, proof.context(listening=False), listening=False) as sock:
        speaking = speak_to(sock, proof, 0, HELLO)
        next(speaking)
        near.recv(1 << 16)
        near.sendall(last)
        near.close()
        (error,) = talk(speaking)
    assert isinstance(error, ConnectionResetError)


def test_a_refusal_reads_only_so_much(pair):
    near, far = pair
    farewell, sent = refuse(near, "no"), 0
    far.setblocking(False)
    for _ in range(1000):
        try:
            sent += far.send(bytes(1 << 16))
            next(farewell)
        except (StopIteration, BlockingIOError):
            break
    assert sent <= 3 << 20
