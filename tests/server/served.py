"""Served servers for tests: socketpairs to each worker, and shards in threads."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.shard_host import serve
from manyhands.server.shard_ranges import shards_of
from manyhands.transport.channel import Channel

Pair = tuple[socket.socket, socket.socket]  # the shard's end, the worker's


class Hosting:
    """Shards that serve in threads. `clients` are made when first asked for."""

    def __init__(
        self, spec: ServerSpec, workers: int, shards: int = 1, *, timeout_s: float = 10.0, memory_from: int = 0, **more
    ) -> None:
        self.spec, self.shards = spec, shards_of(spec, shards)
        self.timeout_s, self.memory_from = timeout_s, memory_from
        self.pairs: list[list[Pair]] = [[socket.socketpair() for _ in range(self.shards)] for _ in range(workers)]
        self.output: list[dict | BaseException | None] = [None] * self.shards
        self.threads = [
            threading.Thread(target=self._serve, args=(shard, workers, more)) for shard in range(self.shards)
        ]
        self._clients: dict[int, ServedServer] = {}
        for thread in self.threads:
            thread.start()

    def client(self, rank: int) -> ServedServer:
        """The worker's server."""
        if rank not in self._clients:
            self._clients[rank] = client_of(self.spec, self.pairs[rank], self.timeout_s, self.memory_from)
        return self._clients[rank]

    @property
    def clients(self) -> list[ServedServer]:
        return [self.client(rank) for rank in range(len(self.pairs))]

    def _serve(self, shard: int, workers: int, more: dict) -> None:
        channels = {rank: channel_to(rank, row[shard][0], self.timeout_s) for rank, row in enumerate(self.pairs)}
        where = {"shard": shard, "shards": self.shards, "workers": workers, "timeout_s": self.timeout_s}
        try:
            self.output[shard] = serve(self.spec, channels=channels, **where, **more)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.output[shard] = error

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        for row in self.pairs:
            for _, mine in row:
                mine.close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def hosting(spec: ServerSpec, workers: int, shards: int = 1, **options) -> Iterator[Hosting]:
    host = Hosting(spec, workers, shards, **options)
    try:
        yield host
    finally:
        host.close()


def client_of(spec: ServerSpec, row: list[Pair], timeout_s: float, memory_from: int = 0) -> ServedServer:
    channels = [Channel(pair[1], peer=f"server shard {s}", timeout_s=timeout_s) for s, pair in enumerate(row)]
    return ServedServer(spec, channels, hosts=["host-a", "host-b", "host-c"], memory_from=memory_from)


def channel_to(rank: int, sock: socket.socket, timeout_s: float) -> Channel:
    return Channel(sock, peer=f"worker {rank}", timeout_s=timeout_s)
