"""Messages between workers over sockets: connections of their own, and two threads for each, so that the worker goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from manyhands.comm.background import Background, Started
from manyhands.comm.checks import tensor_of
from manyhands.comm.mailbox import Mailbox, MailboxOwner
from manyhands.errors import PeerLost
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError
from manyhands.transport.socket_io import close_in_forks

POST = 7  # the kind of a frame; its tensor is the message
_CLOSING_S = 5.0

Connect = Callable[[], Mapping[int, Channel]]
"""Makes connections to all other ranks, by rank, for a mailbox; a collective."""


class SocketMailbox(Mailbox):
    """channels: by rank, its own from now on. names, hosts: of the ranks, for messages. timeout_s: as of the group."""

    def __init__(
        self,
        group: MailboxOwner,
        channels: Mapping[int, Channel],
        names: Sequence[int],
        hosts: Sequence[str],
        timeout_s: float,
    ) -> None:
        super().__init__(group)
        self._names, self._hosts, self._timeout_s = names, hosts, timeout_s
        self._peers = {rank: _Peer(rank, channel) for rank, channel in channels.items()}

    @override
    def _send(self, payload: Tensor) -> None:
        copied = payload.clone()
        for peer in self._peers.values():
            try:
                peer.send(copied, self.posted)
            except (ChannelClosed, ChannelTimeout) as error:
                raise self._lost(peer, "post", str(error), 0.0) from error

    @override
    def _collect(self) -> None:
        for rank, peer in self._peers.items():
            with peer.changed:
                self._take_over(rank, peer)

    def _take_over(self, rank: int, peer: _Peer) -> None:
        self._inbox[rank].extend(peer.came)
        peer.came.clear()

    @override
    def _wait_for(self, rank: int, count: int) -> float:
        peer, start = self._peers[rank], time.perf_counter()
        with peer.changed:
            self._take_over(rank, peer)
            while len(self._inbox[rank]) < count:
                left = self._timeout_s - (time.perf_counter() - start)
                if peer.ended or left <= 0:
                    why = peer.ended or f"sent nothing for {self._timeout_s:g} s"
                    raise self._lost(peer, "take", why, time.perf_counter() - start)
                peer.changed.wait(left)
                self._take_over(rank, peer)
        return time.perf_counter() - start

    def _lost(self, peer: _Peer, operation: str, why: str, seconds: float) -> PeerLost:
        name, host = self._names[peer.rank], self._hosts[peer.rank]
        return PeerLost(name, host, operation, self._group.step, seconds, why)

    @override
    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """The connection to one, the thread that sends there and the one that receives."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.changed = threading.Condition()  # of what follows
        self.came: deque[Tensor] = deque()
        self.ended = ""  # why nothing more comes
        self._channel, self._unsent = channel, deque[Started[None]]()
        self._sender = Background("manyhands-post")
        self._receiver = threading.Thread(target=self._receive, name="manyhands-mailbox", daemon=True)
        close_in_forks(channel.detach())
        self._receiver.start()

    def send(self, payload: Tensor, number: int) -> None:
        """Raises what ended the connection, if something sent before has met it."""
        while self._unsent and self._unsent[0].over:
            self._unsent.popleft().wait()
        frame = Frame(kind=POST, elements=payload.nbytes, sequence=number)
        self._unsent.append(self._sender.start(lambda: self._channel.send(frame, payload)))

    def _receive(self) -> None:
        try:
            while True:
                try:
                    frame = self._channel.receive()
                except ChannelTimeout:
                    if self._channel.fileno() < 0:
                        raise
                    continue  # it has nothing to say: whoever waits for it has a deadline
                if frame.kind != POST:
                    raise FrameError(f"a frame of kind {frame.kind} came to a mailbox")
                data = bytearray(frame.tensor_bytes)
                self._channel.receive_into(memoryview(data))
                with self.changed:
                    self.came.append(tensor_of(data))
                    self.changed.notify_all()
        except (ChannelClosed, ChannelTimeout, FrameError) as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def close(self) -> None:
        """What was posted leaves, if the peer reads it; idempotent."""
        if not self.ended:
            self._sender.close(_CLOSING_S)
        self._end("was closed here")
        self._channel.close()
        self._sender.close(_CLOSING_S)
        self._receiver.join(_CLOSING_S)
