"""Shared memory for workers of one host that inherit nothing from each other: they swap descriptors over a Unix socket.

Rank 0 makes the memory and the lifelines and listens in a directory that only this user can enter (0700); the others
learn its path through a group that exists already. The directory is gone when `adopt` returns.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket
from manyhands.errors import ManyhandsError

_SOCKET = "line"


def host_identity() -> str:
    """Equal for processes that can share descriptors: one boot of one kernel, one name, one view of the file system."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {socket.gethostname()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return f"{socket.gethostname()} process {os.getpid()}"  # unknown: then nobody shares with this one


def adopt(group: Group, hosts: Sequence[str], timeout_s: float) -> SharedMemoryGroup:
    """A SharedMemoryGroup of the same ranks as `group`; a collective, for ranks of one host. `group` stays open.

    Raises ManyhandsError, with nothing left open, when a peer does not come within `timeout_s` or goes away meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if group.rank == 0:
            memory, lifelines = _give(group, deadline)
        else:
            (path, *_) = group.all_gather_json(None)
            memory, lifelines = _take(group.rank, group.size, path, deadline)
    except (TimeoutError, ConnectionError) as error:
        late = isinstance(error, TimeoutError)
        what = "did not come to share memory in time" if late else "ended while memory was being shared"
        raise ManyhandsError(f"a worker of this host {what}: see the other workers' errors") from None
    return SharedMemoryGroup(
        group.rank, group.size, memory, lifelines=lifelines, hosts=list(hosts), timeout_s=timeout_s
    )


def _give(group: Group, deadline: float) -> tuple[list[int], list[tuple[int, int]]]:
    """Rank 0: everything, handed out to whoever comes; the write end of a lifeline goes to its owner alone."""
    memory = list(SharedMemory.create(group.size))
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(group.size)]
    with ExitStack() as closed_on_error:
        for fd in [*memory, *(end for pipe in pipes for end in pipe)]:
            closed_on_error.callback(os.close, fd)
        with (
            tempfile.TemporaryDirectory(prefix="manyhands-") as folder,  # mode 0700
            _entered(folder) as short,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(short)
            listener.listen(128)
            group.all_gather_json(folder)
            for _ in range(group.size - 1):
                with closing(_accept(listener, deadline)) as wire:
                    peer = _receive(wire, deadline)[0].body["rank"]
                    for rank, (read, write) in enumerate(pipes):
                        wire.send({"rank": rank}, [memory[rank], read, *([write] if rank == peer else [])])
        closed_on_error.pop_all()
    for rank in range(1, group.size):
        os.close(pipes[rank][1])
    return memory, [(read, write if rank == 0 else -1) for rank, (read, write) in enumerate(pipes)]


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
            f"a process of user {uid} came to swap shared memory; only this user's, {os.getuid()}, may"
        )
    return ControlSocket(sock)


def _take(rank: int, size: int, folder: str, deadline: float) -> tuple[list[int], list[tuple[int, int]]]:
    with _entered(folder) as short, closing(ControlSocket(socket.socket(socket.AF_UNIX))) as wire:
        wire.sock.settimeout(_left(deadline))
        try:
            wire.sock.connect(short)
        except FileNotFoundError as error:
            raise Closed("the first rank has removed its socket") from error
        wire.send({"rank": rank})
        messages: list[ControlMessage] = []
        while len(messages) < size:
            messages += _receive(wire, deadline)
    ends = [message.fds for message in messages]
    return [fds[0] for fds in ends], [(fds[1], fds[2] if len(fds) > 2 else -1) for fds in ends]


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
