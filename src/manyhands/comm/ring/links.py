"""How a worker waits on its links: it sends and receives at once, from one thread, and it never waits for ever.

Whatever it waits for, it goes on sending what was enqueued for any peer, so that no two workers wait for each other's
full buffers. It spins briefly, then sleeps in poll. A peer that dies is noticed by all, since all are linked with all.
When one falls silent, each worker that has waited half of `timeout_s` sends the others the rank for which it waits; at the
end of it this chain leads to the silent rank, the cause. The first worker that knows sends the others why it gives
up.
"""

from __future__ import annotations

import copy
import os
import select
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from manyhands.comm.checks import FirstError, check_rank, closed
from manyhands.comm.ring.link import GAVE_UP, LEFT, NOTICES, RDHUP, WAITING, Link, LinkEnded, notice
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.transport.address import format_address
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import Frame, FrameError, from_json
from manyhands.transport.hello import Check
from manyhands.transport.listener import CHECK_S, Listener, connect

_LOOKS = 100  # at a socket, some 1.5 µs each, before sleeping in poll
_FAREWELL_S = 0.2  # at most, to get a last notice out
_DEAF = -1  # the mask of a peer that left and is not polled any more

T = TypeVar("T")


class Links(FirstError):
    """All links of worker `rank`, by peer.

    names: how messages call each rank; hosts: where it is. timeout_s: as of `RingGroup`.
    at_home: whether the operation is in the thread that made this, not in one beside it.
    """

    def __init__(
        self, rank: int, links: Mapping[int, Link], *, names: Sequence[int], hosts: Sequence[str], timeout_s: float
    ) -> None:
        self._rank, self._links, self.names, self._hosts = rank, dict(sorted(links.items())), names, hosts
        self.peers = list(self._links)  # all other ranks, in rank order
        self._timeout_s = timeout_s
        self._operation, self._step = "", 0
        self._told: PeerLost | None = None  # what another thread knows
        self._waiting_for: dict[int, int] = {}  # by peer: its newest waiting-for frame, where nothing else came
        self._poll, self._masks = select.poll(), dict.fromkeys(self._links, 0)
        self._by_fd = {link.fileno(): link for link in self._links.values()}
        crowded = list(hosts).count(hosts[rank]) > len(os.sched_getaffinity(0))
        self._spinning = Spinning(1 if crowded else _LOOKS)  # a spin would keep the awaited one from its core
        self.at_home, self._home = True, threading.get_ident()

    def __getitem__(self, rank: int) -> Link:
        return self._links[rank]

    # -- an operation ------------------------------------------------------------------------------------------------

    def begin(self, operation: str, step: int) -> None:
        """What messages say from now on. Raises the error that made the group unusable, if one did."""
        self.check()
        self._operation, self._step = operation, step
        self.at_home = threading.get_ident() == self._home

    def push(self) -> bool:
        """Send what can leave now, to any peer; whether something did."""
        moved = False
        for link in self._links.values():
            if link.full:
                try:
                    moved = link.push() or moved
                except LinkEnded:
                    link.drop()
                    self._ended(link)
        return moved

    def header(self, rank: int) -> Frame:
        """The next frame of a peer that is no notice. A notice is no progress: the wait goes on as if none had come."""
        link = self._links[rank]
        frame = self._until(link, lambda: self._after_notices(link))
        self._waiting_for.pop(rank, None)
        return frame

    def _after_notices(self, link: Link) -> Frame | None:
        """The next frame, if it is here and no notice; what a peer waits for is kept."""
        while (frame := link.header()) is not None and frame.kind in NOTICES:
            fields = from_json(frame.blob)
            if frame.kind != WAITING:
                self._end_by(link, frame.kind, fields)
            self._waiting_for[link.rank] = int(fields.get("for", link.rank))
        return frame

    def fill(self, rank: int, into: memoryview) -> None:
        """The peer's next bytes, until `into` is full."""
        link, got, size = self._links[rank], 0, len(into)
        while got < size:
            rest = into[got:]
            got += self._until(link, lambda rest=rest: link.pull(rest) or None)  # type: ignore[misc]
            self.push()

    def flush(self) -> None:
        """Return once all that was enqueued has left."""
        for rank, link in self._links.items():
            self.flush_to(rank, link.enqueued)

    def flush_to(self, rank: int, position: int) -> None:
        """Return once so many bytes of all that was ever enqueued for a peer have left."""
        link = self._links[rank]
        if link.sent < position:
            self._until(link, lambda: True if link.sent >= position else None, sending=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    @override
    def _failed(self, error: ManyhandsError) -> None:
        if isinstance(error, PeerLost):
            self._farewell(GAVE_UP, {"rank": error.rank, "host": error.host, "why": error.why})
        else:
            self._farewell(GAVE_UP, {"text": str(error)})

    def close(self) -> None:
        """Leave: workers that still wait for this one get PeerLost. Idempotent."""
        if self._error is None:
            self._error = closed()
            self._farewell(LEFT, {})
        for link in self._links.values():
            link.close()

    def interrupt(self) -> None:
        """From another thread than the one that waits here: that one gets an error; peers are not notified."""
        self._error = self._error or closed()
        for link in self._links.values():
            link.shut()

    def lose(self, name: int, host: str) -> None:
        """From another thread than the one that waits here: that one gets PeerLost of this member, whatever its link
        says; peers are not notified."""
        self._told = self._told or PeerLost(name, host, self._operation, self._step, 0.0, "is lost, the driver says")
        for link in self._links.values():
            link.shut()

    def _farewell(self, kind: int, fields: dict[str, Any]) -> None:
        deadline = time.perf_counter() + _FAREWELL_S
        for link in self._links.values():
            link.enqueue(notice(kind, fields))
        while left := [link for link in self._links.values() if _pushed(link).full]:
            poll = select.poll()
            for link in left:
                poll.register(link, select.POLLOUT)
            if time.perf_counter() > deadline or not poll.poll(1000 * _FAREWELL_S):
                break
        for link in self._links.values():
            link.end_sending()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _until(self, link: Link, attempt: Callable[[], T | None], sending: bool = False) -> T:
        """`attempt()`, as soon as it is not None, while enqueued frames leave."""
        attempts, most, since, sent, fields = 0, 0, 0.0, link.sent, False
        while True:
            try:
                value = attempt()
            except LinkEnded:
                self._lost(link.rank, "is gone", time.perf_counter() - since if since else 0.0)
            except FrameError as error:
                raise self.fail(
                    ManyhandsError(
                        f"worker {self.names[link.rank]} sent data that cannot be read ({error}): use the same version "
                        "of manyhands on all hosts"
                    )
                ) from error
            if value is not None:
                if since:
                    self._spinning.slept(time.perf_counter() - since)
                elif attempts:
                    self._spinning.found()
                return value
            if self.push():
                if sending and link.sent != sent:
                    since, sent = 0.0, link.sent
                continue
            if sending and self._masks[link.rank] == _DEAF:  # it reads no more, and wakes nobody who sleeps
                self._lost(link.rank, "left the group", time.perf_counter() - since if since else 0.0)
            if not most:  # beside the caller, spinning would be at its cost
                most = self._spinning.attempts() if self.at_home else 1
            attempts += 1
            if attempts < most:
                continue
            now = time.perf_counter()
            since = since or now
            if now - since > self._timeout_s:
                self._late(link, now - since)
            if now - since > self._timeout_s / 2 and not fields:
                fields = True
                self._say_waiting(link)
            self._sleep(link, sending, since + self._timeout_s * (1 if fields else 0.5) - now)

    def _sleep(self, awaited: Link, sending: bool, seconds: float) -> None:
        """Until the awaited peer sent, something enqueued can leave, a peer ended, or the time is over."""
        for rank, link in self._links.items():
            mask = RDHUP | (select.POLLIN if link is awaited and not sending else 0)
            mask |= select.POLLOUT if link.full else 0
            if self._masks[rank] not in (mask, _DEAF):
                self._poll.register(link, mask)
                self._masks[rank] = mask
        for fd, events in self._poll.poll(max(1.0, 1000 * seconds)):
            link = self._by_fd[fd]
            if events & (RDHUP | select.POLLHUP | select.POLLERR) and (sending or link is not awaited):
                self._ended(link)

    def _say_waiting(self, awaited: Link) -> None:
        for rank, link in self._links.items():
            if self._masks[rank] != _DEAF:
                link.enqueue(notice(WAITING, {"for": awaited.rank}))

    def _late(self, awaited: Link, seconds: float) -> NoReturn:
        """timeout_s are over: raise PeerLost for the cause."""
        cause, seen = awaited.rank, {self._rank}
        while cause not in seen:
            seen.add(cause)
            link = self._links[cause]
            kind, fields = link.last_notice()
            if kind in (GAVE_UP, LEFT):
                self._end_by(link, kind, fields)
            if kind == WAITING:
                cause = int(fields.get("for", cause))
            elif not link.unread:
                cause = self._waiting_for.get(cause, cause)
        if cause not in self._links:
            cause = awaited.rank  # all wait for each other
        self._lost(cause, f"showed no progress for {self._timeout_s:g} s", seconds)

    # -- who ended, and why ------------------------------------------------------------------------------------------

    def _ended(self, link: Link) -> None:
        """A peer's connection is over, while this worker waits for something else; return if it left in order.

        What it sent for this operation is then among what came; if not, whoever waits for it gets PeerLost.
        """
        if self._masks[link.rank] > 0:
            self._poll.unregister(link)
        self._masks[link.rank] = _DEAF
        kind, fields = link.last_notice()
        if kind == GAVE_UP:
            self._end_by(link, kind, fields)
        if kind != LEFT:
            self._lost(link.rank, "is gone", 0.0)

    def _end_by(self, link: Link, kind: int, fields: dict[str, Any]) -> NoReturn:
        """A peer left, or gave up: this worker cannot go on either."""
        self._raise_told()
        if kind == LEFT:
            self._lost(link.rank, "left the group", 0.0)
        if "text" in fields:
            raise self.fail(ManyhandsError(str(fields["text"])))
        rank, why = int(fields.get("rank", -1)), str(fields.get("why", "is gone"))
        if "noticed" not in why:
            why = f"{why} (worker {self.names[link.rank]} noticed)"
        raise self.fail(PeerLost(rank, str(fields.get("host")), self._operation, self._step, 0.0, why))

    def _raise_told(self) -> None:
        """The links look as if all peers were gone once somebody else has told who is."""
        if self._told is not None:
            raise self.fail(copy.copy(self._told))

    def _lost(self, rank: int, why: str, seconds: float) -> NoReturn:
        self._raise_told()
        name, host = self.names[rank], self._hosts[rank]
        raise self.fail(PeerLost(name, host, self._operation, self._step, seconds, why))


def _pushed(link: Link) -> Link:
    try:
        link.push()
    except LinkEnded:
        link.drop()
    return link


_SHORT_S = 1e-3  # who slept longer waited for a late peer, which has nothing to do with spinning
_FAILURES = 3  # in a row, after which spinning pauses
_PAUSE = 64  # waits


class Spinning:
    """most: attempts at most before sleeping. Used by one thread."""

    def __init__(self, most: int) -> None:
        self._most, self._failures, self._paused = most, 0, 0

    def attempts(self) -> int:
        """For the wait that begins: so many attempts before sleeping, at least one."""
        if self._paused:
            self._paused -= 1
            return 1
        return self._most

    def found(self) -> None:
        """A look after the first found what it waited for."""
        self._failures = 0

    def slept(self, seconds: float) -> None:
        """No look found it, and it came so long after."""
        if seconds < _SHORT_S and not self._paused:
            self._failures += 1
            if self._failures == _FAILURES:
                self._failures, self._paused = 0, _PAUSE


def connect_all(
    rank: int,
    listener: Listener,
    addresses: Sequence[tuple[str, int]],
    *,
    credentials: Credentials | None,
    token: bytes | None = None,
    hosts: Sequence[str] = (),
    names: Sequence[int] = (),
    purpose: str = "ring",
    generation: int = 0,
    timeout_s: float = 300.0,
    check: Callable[[], None] = lambda: None,
) -> dict[int, Channel]:
    """A channel to every other rank, by rank: for `RingGroup`. All ranks call it with the same addresses.

    listener: this rank's, whose address all others know as addresses[rank]; it stays open. credentials, token: its own.
    purpose, generation: a connection that was meant for something else, or for another membership, is refused.
    hosts, names: for messages, as of `RingGroup`. PeerLost names the first rank that was not there within timeout_s.
    check: called about four times a second, raises what ends the wait before.
    """
    check_rank(rank, size := len(addresses), "rank")
    hosts, names = list(hosts) or [host for host, _ in addresses], list(names) or list(range(size))
    called = [f"worker {name} on {host}" for name, host in zip(names, hosts, strict=True)]
    hello = {"purpose": purpose, "rank": rank, "generation": generation}
    channels: dict[int, Channel] = {}
    start, wanted = time.monotonic(), 0

    def left_s() -> float:
        return max(0.01, start + timeout_s - time.monotonic())

    try:
        for wanted in range(rank):
            channels[wanted] = connect(
                addresses[wanted],
                hello,
                credentials=credentials,
                token=token,
                peer=called[wanted],
                generation=generation,
                timeout_s=left_s(),
                check=check,
            )
        while len(channels) < size - 1:
            wanted = next(peer for peer in range(rank + 1, size) if peer not in channels)
            came = _next(listener, lambda theirs: _peer_of(theirs, hello, channels, called), left_s, check)
            channels[came[1]["rank"]] = came[0]
    except (ChannelTimeout, ChannelClosed) as error:
        seconds, why = time.monotonic() - start, f"could not be connected ({error})"
        raise PeerLost(names[wanted], hosts[wanted], f"connecting the {purpose}", 0, seconds, why) from error
    finally:
        if len(channels) < size - 1:
            for channel in channels.values():
                channel.close()
    return channels


def _next(
    listener: Listener, of: Check, left_s: Callable[[], float], check: Callable[[], None]
) -> tuple[Channel, dict[str, Any]]:
    """What `Listener.accept` gives within the time that is left, with a check in between."""
    whole_s = left_s()
    while True:
        check()
        try:
            return listener.accept(of, min(CHECK_S, left_s()))
        except ChannelTimeout:
            if left_s() <= CHECK_S / 10:
                address = format_address(listener.address)
                raise ChannelTimeout(f"nobody came to {address} within {whole_s:g} s") from None


def _peer_of(theirs: dict[str, Any], own: dict[str, Any], channels: Container[int], called: Sequence[str]) -> str:
    """The name of the sender of this hello. FrameError unless it is one of a higher rank for the same, and not here yet."""
    peer, rank, purpose, generation = theirs.get("rank"), own["rank"], own["purpose"], own["generation"]
    if (theirs.get("purpose"), theirs.get("generation")) != (purpose, generation):
        raise FrameError(f"expected a worker for {purpose} of generation {generation}; its hello was {theirs}")
    if not isinstance(peer, int) or not rank < peer < len(called) or peer in channels:
        raise FrameError(
            f"expected a worker of rank {rank + 1} to {len(called) - 1} that is not here yet; its hello was {theirs}"
        )
    return called[peer]
