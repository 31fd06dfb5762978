"""Connected channels of every sort, a raw socket at the other end of one, and a hello."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from manyhands.transport.channel import Channel
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import to_json
from manyhands.transport.hello import Proof

T = TypeVar("T")
SORTS = ("unix", "tcp", "tls")


@cache
def credentials() -> Credentials:
    """One run's."""
    return Credentials.create()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def tls_pair() -> tuple[socket.socket, socket.socket]:
    near, far = tcp_pair()
    ours = credentials()
    other = aside(lambda: ours.server_context().wrap_socket(far, server_side=True))
    return ours.client_context().wrap_socket(near), other.result(5)


@contextmanager
def channels(sort: str = "unix", timeout_s: float = 5.0, **options: Any) -> Iterator[tuple[Channel, Channel]]:
    """Two ends of one connection."""
    near, far = {"unix": socket.socketpair, "tcp": tcp_pair, "tls": tls_pair}[sort]()
    ends = [Channel(sock, peer=name, timeout_s=timeout_s, **options) for sock, name in ((near, "far"), (far, "near"))]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


@contextmanager
def raw(timeout_s: float = 5.0, **options: Any) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at its other end."""
    near, far = socket.socketpair()
    channel = Channel(near, peer="far", timeout_s=timeout_s, **options)
    with far:
        try:
            yield channel, far
        finally:
            channel.close()


def aside(work: Callable[[], T]) -> Future[T]:
    """Run in a thread; `result` gives the value or raises."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


TOKEN = bytes(range(16))
PROOF = Proof(None, TOKEN)
HELLO = to_json({"worker": 3})


def name(hello: dict[str, Any]) -> str:
    return f"worker {hello['worker']}"
