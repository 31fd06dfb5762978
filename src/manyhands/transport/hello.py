"""The first words on a TCP connection, for both sides: who proves what, before anything else is read.

With credentials: TLS 1.3, each side's certificate checked; the hello (JSON) of the connecting side; the welcome, or a
refusal with its reason. Without: an opening frame; a challenge of the listening side; the hello, with a challenge and a
proof that its sender holds the run's token; the welcome, with the other side's proof. The token itself never travels,
and a recorded connection opens no second one.

Each side is a generator that never blocks: it yields what it waits for (select.POLLIN, select.POLLOUT), so that one
thread can hold many such conversations, and a silent peer holds up nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from manyhands.errors import BadInput
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import HEADER_BYTES, Frame, FrameError, from_json, pack, to_json, unpack
from manyhands.units import printable

T = TypeVar("T")
Steps = Generator[int, None, T]
Check = Callable[[dict[str, Any]], str]

KIND = 0
MAX_HELLO_BYTES = 1 << 16
LEAST_TOKEN_BYTES = 16
_OPEN, _CHALLENGE, _HELLO, _WELCOME, _REFUSAL = range(5)  # a frame's `a`
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_DISCARDED = 1 << 20


class HandshakeRefused(Exception):
    """The other side refused, and why."""


@dataclass(frozen=True, repr=False)
class Proof:
    """What a side shows, and wants to be shown: the run's credentials (TLS), else its token (plain TCP)."""

    credentials: Credentials | None
    token: bytes | None

    def __post_init__(self) -> None:
        if (self.credentials is None) == (self.token is None):
            raise BadInput(
                "a connection is opened with the run's credentials (TLS) or its token (without TLS): give one of them; "
                "manyhands does not listen without authentication"
            )
        if self.token is not None and len(self.token) < LEAST_TOKEN_BYTES:
            raise BadInput(
                f"a run's token must have at least {LEAST_TOKEN_BYTES} bytes; got {len(self.token)}: use "
                "secrets.token_bytes(32)"
            )

    def context(self, *, listening: bool) -> ssl.SSLContext | None:
        """For TLS; None without."""
        if self.credentials is None:
            return None
        return self.credentials.server_context() if listening else self.credentials.client_context()


@dataclass(frozen=True)
class Peer:
    """Who came."""

    name: str
    hello: dict[str, Any]
    generation: int


def wrapped(sock: socket.socket, context: ssl.SSLContext | None, *, listening: bool) -> socket.socket:
    """The socket, non-blocking; nothing is sent yet. OSError when the peer has left already."""
    sock.settimeout(0)
    if context is None:
        return sock
    sock.getpeername()  # `wrap_socket` loses the descriptor of a connection that has ended
    return context.wrap_socket(sock, server_side=listening, do_handshake_on_connect=False)


def listen_to(sock: socket.socket, proof: Proof, generation: int, check: Check) -> Steps[Peer]:
    """The listening side: the authenticated peer. FrameError, OSError: not authenticated, or gone."""
    yield from _shake(sock, proof)
    challenge = b""
    if proof.token is not None:
        yield from _receive(sock, _OPEN)  # a side that wants TLS is noticed here, and not after a silence
        challenge = secrets.token_bytes(_NONCE_BYTES)
        yield from _send(sock.send, _CHALLENGE, generation, challenge)
    frame = yield from _receive(sock, _HELLO)
    answer, blob = b"", frame.blob
    if proof.token is not None:
        shown, own, blob = blob[:_PROOF_BYTES], blob[_PROOF_BYTES : 2 * _PROOF_BYTES], blob[2 * _PROOF_BYTES :]
        if not hmac.compare_digest(shown, _mac(proof.token, b"hello", challenge, own, blob)):
            raise FrameError("it does not have this run's token")
        answer = _mac(proof.token, b"welcome", challenge, own, blob)
    if frame.generation < generation:
        raise FrameError(f"a hello of generation {frame.generation}; this is generation {generation}")
    hello = from_json(blob)
    try:
        name = check(hello)
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError(f"its first message is incomplete or wrong ({error!r})") from error
    yield from _send(sock.send, _WELCOME, frame.generation, answer)
    return Peer(name, hello, frame.generation)


def refuse(sock: socket.socket, why: str) -> Steps[None]:
    """Refuse a peer, then read until it leaves: closing with unread bytes would discard the refusal."""
    shaken = isinstance(sock, ssl.SSLSocket) and sock.version() is not None
    send = sock.send if shaken else partial(socket.socket.send, sock)  # in plain text without TLS to say it in
    yield from _send(send, _REFUSAL, 0, to_json({"reason": why[:500]}))
    socket.socket.shutdown(sock, socket.SHUT_WR)
    left = _MOST_DISCARDED
    while left > 0:
        data = yield from _turn(partial(socket.socket.recv, sock, 1 << 16))
        if not data:
            return
        left -= len(data)


def speak_to(sock: socket.socket, proof: Proof, generation: int, hello: bytes) -> Steps[None]:
    """The connecting side: returns when welcome. Refused with the other side's reason; FrameError, OSError."""
    yield from _shake(sock, proof)
    if proof.token is None:
        yield from _send(sock.send, _HELLO, generation, hello)
        yield from _receive(sock, _WELCOME)
        return
    yield from _send(sock.send, _OPEN, generation, b"")
    challenge = (yield from _receive(sock, _CHALLENGE)).blob
    own = secrets.token_bytes(_NONCE_BYTES)
    yield from _send(sock.send, _HELLO, generation, _mac(proof.token, b"hello", challenge, own, hello) + own + hello)
    answer = (yield from _receive(sock, _WELCOME)).blob
    if not hmac.compare_digest(answer, _mac(proof.token, b"welcome", challenge, own, hello)):
        raise FrameError("the other side does not have this run's token")


def _mac(token: bytes, role: bytes, challenge: bytes, own: bytes, hello: bytes) -> bytes:
    parts = b"".join(len(part).to_bytes(8, "little") + part for part in (role, challenge, own, hello))
    return hmac.new(token, parts, hashlib.sha256).digest()


def _shake(sock: socket.socket, proof: Proof) -> Steps[None]:
    if proof.credentials is None:
        return
    if not isinstance(sock, ssl.SSLSocket):
        raise FrameError("this connection is not encrypted")
    try:
        yield from _turn(sock.do_handshake)
    except ssl.SSLError as error:
        raise FrameError(f"expected TLS with this run's certificate; {error.reason or error}") from error
    if not proof.credentials.is_peer(sock):
        raise FrameError("the other side has another certificate than this run")


def _send(send: Callable[[memoryview], int], what: int, generation: int, blob: bytes) -> Steps[None]:
    frame = Frame(kind=KIND, a=what, generation=generation, blob=blob)
    data = memoryview(pack(frame) + blob)
    while data:
        sent = yield from _turn(partial(send, data), select.POLLOUT)
        data = data[sent:]


def _receive(sock: socket.socket, what: int) -> Steps[Frame]:
    frame, size = unpack((yield from _exactly(sock, HEADER_BYTES)))
    welcome = (what, _REFUSAL) if what in (_CHALLENGE, _WELCOME) else (what,)
    if frame.kind != KIND or frame.a not in welcome or frame.elements or size > MAX_HELLO_BYTES + 2 * _PROOF_BYTES:
        raise FrameError(f"expected a hello of at most {MAX_HELLO_BYTES} bytes; got {frame} with {size} bytes")
    blob = yield from _exactly(sock, size)
    if frame.a == _REFUSAL:
        raise HandshakeRefused(printable(from_json(blob).get("reason", "no reason was given"), 500))
    return Frame(kind=KIND, a=frame.a, generation=frame.generation, blob=blob)


def _exactly(sock: socket.socket, size: int) -> Steps[bytes]:
    data = b""
    while len(data) < size:
        part = yield from _turn(partial(sock.recv, size - len(data)))
        if not part:
            raise ConnectionResetError(f"the connection ended after {len(data)} of {size} bytes of a hello")
        data += part
    return data


def _turn(call: Callable[[], T], wanted: int = select.POLLIN) -> Steps[T]:
    while True:
        try:
            return call()
        except BlockingIOError:
            yield wanted
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # no judgement of anybody: it may start again
            raise ConnectionResetError("the connection ended in the middle of TLS") from error
