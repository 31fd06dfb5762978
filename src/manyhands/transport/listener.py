"""Listening and connecting over TCP: authenticated before anything else is read, on loopback by default.

Every connection begins as `hello.py` says; only then is there a Channel. There is no listener without authentication:
without credentials (TLS), both sides prove to each other that they hold the run's token.
"""

from __future__ import annotations

import errno
import logging
import select
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from manyhands.errors import BadInput
from manyhands.transport.address import bound, format_address, is_loopback
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import FrameError, to_json
from manyhands.transport.hello import (
    MAX_HELLO_BYTES,
    Check,
    HandshakeRefused,
    Peer,
    Proof,
    Steps,
    listen_to,
    refuse,
    speak_to,
    wrapped,
)
from manyhands.units import printable

HELLO_S = 10.0  # a peer has so long from its connection to the end of its hello, however it spreads its bytes
_FAREWELL_S = 2.0  # and one that was refused so long to read the reason
_MOST_PENDING = 128  # connections without a hello so far
_PAUSE_S = 0.05
CHECK_S = 0.25
"""How often those who wait for a connection look whether they still want it."""


class PendingConnection:
    """A connection without a hello so far, or one that is being refused."""

    def __init__(self, sock: socket.socket, host: str, steps: Steps[Peer]) -> None:
        self.sock, self.host = sock, host
        self.steps: Steps[Peer | None] = steps
        self.refused, self.deadline = False, time.monotonic() + HELLO_S


class Listener:
    """A bound address. Strangers are closed and named once in the log (logger `manyhands`); the listener goes on.

    host: a name or address of this machine. Default: loopback.
    credentials, token: exactly one of them. Credentials: TLS. A token (16 bytes or more, as secret as a key): plain
        TCP, `tls=off`: BadInput unless the address is loopback or `plain_network` is set, since what follows the hello
        can then be read and changed by whoever is on the way.
    ports: (first, last), None: any free one; `address` has the one that it became.
    generation: a hello of an older one is refused; may be raised while the listener lives.
    timeout_s: of the channels.

    Silent and slow peers hold up nobody: each has HELLO_S, and where too many come at once, the oldest of the address
    with the most has to leave.
    """

    address: tuple[str, int]
    generation: int

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        credentials: Credentials | None,
        token: bytes | None = None,
        ports: tuple[int, int] | None = None,
        plain_network: bool = False,
        generation: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self._proof = Proof(credentials, token)
        self._context = self._proof.context(listening=True)
        self._sock = bound(host, ports)
        self._sock.settimeout(0)
        self.address = self._sock.getsockname()[:2]
        if credentials is None and not is_loopback(self.address[0]) and not plain_network:
            self._sock.close()
            raise BadInput(
                f"{self.address[0]} can be reached from other machines, and without TLS anybody on that network can "
                "read and change parameters: give credentials (MANYHANDS_CREDENTIALS), or give plain_network=True too"
            )
        self.generation, self._timeout_s = generation, timeout_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ, None)
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._rejected, self._lock, self._closed = RejectedPeers(), threading.RLock(), False
        self._check: Check = _nobody  # of the newest `accept`: a visitor may be half-way when the last one returns

    def accept(self, check: Check, timeout_s: float) -> tuple[Channel, dict[str, Any]]:
        """The next good connection and its hello (JSON). `check(hello)` names it, or raises FrameError to refuse it.

        Raises ChannelTimeout when none came within timeout_s (0: only what is here already), ChannelClosed after
        `close`, also one from another thread.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check = check
            while not self._closed:
                first = min([deadline, *(pending.deadline for pending in self._pending)])
                for key, _ in self._selector.select(max(0.0, first - time.monotonic())):
                    if key.data is None:
                        self._let_in()
                    elif key.data in self._pending and (good := self._go_on(key.data)):
                        return good
                now = time.monotonic()
                for late in [pending for pending in self._pending if pending.deadline < now]:
                    self._turn_away(late, f"it did not say who it is within {HELLO_S:g} s")
                if time.monotonic() >= deadline:
                    raise ChannelTimeout(f"nobody came to {format_address(self.address)} within {timeout_s:g} s")
        raise ChannelClosed(f"the listener on {format_address(self.address)} was closed")

    def fileno(self) -> int:
        """Readable when `accept` has something to do, good or not: call it with timeout_s=0 then."""
        return self._selector.fileno()

    def close(self) -> None:
        """Idempotent; wakes `accept`. The channels it gave stay open."""
        if self._closed:
            return
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # a process that was forked with this socket has shut it down
                raise
        with self._lock:
            for pending in list(self._pending):
                self._drop(pending)
            self._selector.close()
            self._sock.close()

    def _let_in(self) -> None:
        if self._closed:
            return
        if len(self._pending) >= _MOST_PENDING:
            self._make_room()
        try:
            sock, place = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:  # it left already; or no descriptor is free, and the next select would not wait
            self._rejected.name("the network", f"accept: {error.strerror}")
            self._make_room()
            time.sleep(_PAUSE_S)
            return
        try:
            sock = wrapped(sock, self._context, listening=True)
        except OSError as error:
            self._rejected.name(place[0], str(error))
            sock.close()
            return
        steps = listen_to(sock, self._proof, self.generation, lambda hello: self._check(hello))
        pending = PendingConnection(sock, place[0], steps)
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, pending)  # it sends first: `accept` goes on then

    def _make_room(self) -> None:
        """The oldest of the host with the most visitors leaves: one that floods us crowds out its own."""
        if self._pending:
            ((host, _),) = Counter(pending.host for pending in self._pending).most_common(1)
            oldest = next(pending for pending in self._pending if pending.host == host)
            self._turn_away(oldest, f"more than {_MOST_PENDING} connections that did not say who they are")

    def _go_on(self, pending: PendingConnection) -> tuple[Channel, dict[str, Any]] | None:
        try:
            wanted = next(pending.steps)
        except StopIteration as end:
            peer: Peer | None = end.value
            if peer is None:  # it was refused, with the reason
                self._drop(pending)
                return None
            self._selector.unregister(pending.sock)
            del self._pending[pending]
            channel = Channel(pending.sock, peer=peer.name, timeout_s=self._timeout_s, generation=peer.generation)
            return channel, peer.hello
        except (FrameError, ssl.SSLError) as error:
            self._refuse(pending, str(error))
        except OSError as error:
            self._turn_away(pending, str(error))
        else:
            events = selectors.EVENT_READ if wanted == select.POLLIN else selectors.EVENT_WRITE
            if self._selector.get_key(pending.sock).events != events:
                self._selector.modify(pending.sock, events, pending)
        return None

    def _refuse(self, pending: PendingConnection, why: str) -> None:
        if pending.refused:
            self._drop(pending)
            return
        self._rejected.name(pending.host, why)
        pending.refused, pending.steps = True, refuse(pending.sock, why)
        pending.deadline = time.monotonic() + _FAREWELL_S
        self._go_on(pending)

    def _turn_away(self, pending: PendingConnection, why: str) -> None:
        if not pending.refused:
            self._rejected.name(pending.host, why)
        self._drop(pending)

    def _drop(self, pending: PendingConnection) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.sock)
        pending.sock.close()


def _nobody(hello: dict[str, Any]) -> str:
    raise FrameError("nobody is expected yet")


def connect(
    address: tuple[str, int],
    hello: dict[str, Any],
    *,
    credentials: Credentials | None,
    peer: str,
    token: bytes | None = None,
    generation: int = 0,
    timeout_s: float = 300.0,
    check: Callable[[], None] = lambda: None,
) -> Channel:
    """The connecting side: a channel once the other side has accepted.

    hello: JSON, at most MAX_HELLO_BYTES. credentials, token: as the listener's.
    Tries again while nobody listens yet, until timeout_s (ChannelTimeout). ChannelClosed with the other side's reason
    when it refuses. check: called about four times a second once the other side has taken the connection, and between
    tries; raises what ends the wait before.
    """
    proof, blob = Proof(credentials, token), to_json(hello)
    if len(blob) > MAX_HELLO_BYTES:
        raise BadInput(f"a hello can have at most {MAX_HELLO_BYTES} bytes; got {len(blob)}")
    context = proof.context(listening=False)
    where, deadline, pause_s = f"{peer} at {format_address(address)}", time.monotonic() + timeout_s, _PAUSE_S
    while True:
        try:
            sock = socket.create_connection(address, max(0.01, min(HELLO_S, deadline - time.monotonic())))
            try:
                if sock.getsockname() == sock.getpeername():
                    raise ConnectionRefusedError("the connection reached itself: nobody listens there")
                sock = wrapped(sock, context, listening=False)
                _drive(speak_to(sock, proof, generation, blob), sock, deadline, check)
                return Channel(sock, peer=peer, timeout_s=timeout_s, generation=generation)
            except BaseException:
                sock.close()
                raise
        except HandshakeRefused as error:
            raise ChannelClosed(f"{where} refused this connection: {error}") from error
        except (FrameError, ssl.SSLError) as error:
            raise ChannelClosed(
                f"{where} did not take this connection: {error}. Both sides need the same credentials file (or both none and "
                "the same token) and the same version of manyhands"
            ) from error
        except OSError as error:  # nobody there yet, or it had too many visitors
            if time.monotonic() + pause_s >= deadline:
                raise ChannelTimeout(
                    f"no answer from {where} within {timeout_s:g} s. The last try failed: "
                    f"{str(error) or type(error).__name__}. Is it started, and can its port be reached from here?"
                ) from error
        check()
        time.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)


def _drive(steps: Steps[None], sock: socket.socket, deadline: float, check: Callable[[], None] = lambda: None) -> None:
    poll = select.poll()
    for events in steps:
        poll.register(sock, events)
        while not poll.poll(min(CHECK_S, max(0.0, deadline - time.monotonic())) * 1e3):
            check()
            if time.monotonic() >= deadline:
                raise TimeoutError("it took the connection but did not answer")


LOG = logging.getLogger("manyhands")
MOST_NAMED = 1000  # one IPv6 network alone has 2^64 addresses


class RejectedPeers:
    """Names each address once; only one thread uses it."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def name(self, address: str, why: str) -> None:
        if address in self._named or len(self._named) >= MOST_NAMED:
            return
        self._named.add(address)
        more = "" if len(self._named) < MOST_NAMED else f" ({MOST_NAMED} addresses were reported, and no more will be)"
        LOG.warning(
            "refused a connection from %s: %s. More connections from this address are not reported%s",
            address,
            printable(why, 300),
            more,
        )
