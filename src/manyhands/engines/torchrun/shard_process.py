"""The process of a server shard beside the worker that holds it: `python -m manyhands.engines.torchrun.shard_process`.

Reads what to serve from standard input (a line of JSON), says on standard output at which address it listens, and serves
until all workers have left or are gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

import torch

from manyhands.engines.driver.host_processes import name_of
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.own_rules import from_fields
from manyhands.engines.torchrun.server import LEAVE
from manyhands.server.shard_host import serve
from manyhands.transport.channel import Channel
from manyhands.transport.listener import Listener


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler sends it to every process, and the workers still save
        signal.signal(number, signal.SIG_IGN)
    place = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_holder, daemon=True).start()
    torch.set_num_threads(1)  # a push is one pass over memory: the cores are the workers'
    timeout_s, listener = float(place["timeout_s"]), None
    if place["secret"] is not None:
        listener = Listener(place["listen"], **Secret.from_json(place["secret"]).proof, timeout_s=timeout_s)
        sys.stdout.write(json.dumps(listener.address) + "\n")
        sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads what a rule prints
    serve(
        from_fields(place["server"]),
        shard=place["shard"],
        shards=place["shards"],
        workers=place["workers"],
        channels={int(rank): _channel(int(rank), fd, timeout_s) for rank, fd in place["here"].items()},
        listener=listener,
        timeout_s=timeout_s,
    )


def _channel(rank: int, fd: int, timeout_s: float) -> Channel:
    return Channel(socket.socket(fileno=fd), peer=f"{name_of(rank)} on {socket.gethostname()}", timeout_s=timeout_s)


def _end_with_the_holder() -> None:
    """A holder that is lost is the end of the run; after one that left in order other workers may still be there."""
    if sys.stdin.read() != LEAVE:
        os._exit(1)


if __name__ == "__main__":
    main()
