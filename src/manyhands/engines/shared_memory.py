"""Shared memory, and other descriptors, for workers of one host that inherit nothing from each other: the first hands
them out over a Unix socket.

It makes the memory and the lifelines and listens in a directory that only this user can enter (0700); the others
learn its path by what they can meet at. The directory is gone when `swap_memory` or `hand_out` returns.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from manyhands.comm.shared_memory.group import SharedMemory, create_table
from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket
from manyhands.errors import ManyhandsError

InheritedMemory = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""What `SharedMemoryGroup` takes: memory (a table, then an arena for each rank) and lifelines, descriptors of this
process."""

Parcel = Sequence[tuple[dict[str, Any], Sequence[int]]]
"""Messages, each with descriptors."""

_SOCKET = "line"
_MEMORY = "the shared memory"


def host_identity() -> str:
    """Equal for processes that can share descriptors: one boot of one kernel, one name, one view of the file system."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {socket.gethostname()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return f"{socket.gethostname()} process {os.getpid()}"  # unknown: then nobody shares with this one


def close_memory(memory: InheritedMemory) -> None:
    """Of a group that was not made."""
    descriptors, lifelines = memory
    for fd in [*descriptors, *(end for pipe in lifelines for end in pipe if end >= 0)]:
        os.close(fd)


def swap_memory(
    rank: int, size: int, exchange: Callable[[Any], list[Any]], timeout_s: float, scratch: str = ""
) -> InheritedMemory:
    """Memory and lifelines for a SharedMemoryGroup of `size` ranks of one host, of which this is one; a collective.

    exchange: each rank gives a value (JSON) and gets all, in rank order. Raises ManyhandsError, with nothing left open,
    when a peer does not come within `timeout_s` after the exchange, or goes away meanwhile. scratch: where rank 0 makes
    its directory.
    """
    if rank == 0:
        return _give(size, exchange, timeout_s, scratch)
    table, *ends = [message.fds for message in take(rank, 1 + size, exchange, timeout_s, _MEMORY)]
    return [*table, *(fds[0] for fds in ends)], [(fds[1], fds[2] if len(fds) > 2 else -1) for fds in ends]


def _give(size: int, exchange: Callable[[Any], list[Any]], timeout_s: float, scratch: str) -> InheritedMemory:
    """Rank 0: everything, handed out to whoever comes; the write end of a lifeline goes to its owner alone."""
    memory = SharedMemory.create(size)
    table, *arenas = memory
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(size)]

    def parcel(peer: int) -> Parcel:
        ends = [
            ({"rank": rank}, [arenas[rank], read, *([write] if rank == peer else [])])
            for rank, (read, write) in enumerate(pipes)
        ]
        return [({}, [table]), *ends]

    with ExitStack() as closed_on_error:
        for fd in [*memory, *(end for pipe in pipes for end in pipe)]:
            closed_on_error.callback(os.close, fd)
        hand_out(parcel, size, exchange, timeout_s, _MEMORY, scratch)
        closed_on_error.pop_all()
    for rank in range(1, size):
        os.close(pipes[rank][1])
    return memory, [(read, write if rank == 0 else -1) for rank, (read, write) in enumerate(pipes)]


class KeptMemory:
    """The arenas and lifelines of a host's members, of which groups of some of them are made besides the group of all."""

    def __init__(self, memory: InheritedMemory, members: Sequence[int], kept: ExitStack) -> None:
        """memory: of all of `members`, in their order; it stays the caller's. kept: closes what is kept of it."""

        def keep(fd: int) -> int:
            if fd < 0:
                return fd
            kept.callback(os.close, copy := os.dup(fd))
            return copy

        (_, *arenas), lifelines = memory
        self._arenas = dict(zip(members, map(keep, arenas), strict=True))
        self._lifelines = {
            member: (keep(read), keep(write)) for member, (read, write) in zip(members, lifelines, strict=True)
        }

    def of(
        self, some: Sequence[int], rank: int, exchange: Callable[[Any], list[Any]], timeout_s: float, scratch: str = ""
    ) -> InheritedMemory:
        """Of these members, of which this process is number `rank`: a collective of them, who get a new table. exchange,
        errors and scratch as of `swap_memory`."""
        if rank == 0:
            table = create_table(len(some))
            try:
                hand_out(lambda peer: [({}, [table])], len(some), exchange, timeout_s, _MEMORY, scratch)
            except BaseException:
                os.close(table)
                raise
        else:
            (message,) = take(rank, 1, exchange, timeout_s, _MEMORY)
            (table,) = message.fds
        lifelines = [[-1 if fd < 0 else os.dup(fd) for fd in self._lifelines[member]] for member in some]
        return [table, *(os.dup(self._arenas[member]) for member in some)], [(read, write) for read, write in lifelines]


def hand_out(
    parcel: Callable[[int], Parcel],
    size: int,
    exchange: Callable[[Any], list[Any]],
    timeout_s: float,
    what: str,
    scratch: str = "",
) -> None:
    """Rank 0 of `size` ranks of one host: send each other one, as it comes, its messages with descriptors, which stay open
    here. A collective, with `take` on the others; `exchange` and errors as of `swap_memory`. what: for messages."""
    with (
        _all_come(what),
        tempfile.TemporaryDirectory(prefix="manyhands-", dir=scratch or None) as folder,  # mode 0700
        _entered(folder) as short,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(short)
        listener.listen(128)
        exchange(folder)
        deadline = time.monotonic() + timeout_s
        for _ in range(size - 1):
            with closing(_accept(listener, deadline)) as wire:
                for body, fds in parcel(_receive(wire, deadline)[0].body["rank"]):
                    wire.send(body, fds)


def take(
    rank: int, count: int, exchange: Callable[[Any], list[Any]], timeout_s: float, what: str
) -> list[ControlMessage]:
    """Another rank than the first: the `count` messages that rank 0 hands out to it. See `hand_out`."""
    with _all_come(what):
        folder = exchange(None)[0]
        deadline = time.monotonic() + timeout_s
        with _entered(folder) as short, closing(ControlSocket(socket.socket(socket.AF_UNIX))) as wire:
            wire.sock.settimeout(_left(deadline))
            try:
                wire.sock.connect(short)
            except FileNotFoundError as error:
                raise Closed("the first rank has removed its socket") from error
            wire.send({"rank": rank})
            messages: list[ControlMessage] = []
            while len(messages) < count:
                messages += _receive(wire, deadline)
            return messages


@contextmanager
def _all_come(what: str) -> Iterator[None]:
    """Raise ManyhandsError for a peer that does not."""
    try:
        yield
    except (TimeoutError, ConnectionError) as error:
        late = isinstance(error, TimeoutError)
        how = f"did not connect to {what} in time" if late else f"ended while it connected to {what}"
        raise ManyhandsError(f"a worker on this host {how}: look for its error in the log") from None


@contextmanager
def _entered(folder: str) -> Iterator[str]:
    """A short path of the socket in `folder`: the address of a Unix socket has 108 bytes, TMPDIR may have more."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET}"
    finally:
        os.close(fd)


def _accept(listener: socket.socket, deadline: float) -> ControlSocket:
    listener.settimeout(_left(deadline))
    sock, _ = listener.accept()
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():  # root, who can enter any directory; nobody else can
        sock.close()
        raise ManyhandsError(
            f"a process of user {uid} tried to connect to this run's workers, and only processes of user "
            f"{os.getuid()} may"
        )
    return ControlSocket(sock)


def _receive(wire: ControlSocket, deadline: float) -> list[ControlMessage]:
    messages: list[ControlMessage] = []
    while not messages:
        wire.sock.settimeout(_left(deadline))
        messages = wire.receive()
    return messages


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
