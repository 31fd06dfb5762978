"""The parameter server beside what else could hold the parameters: multiprocessing.Manager and a Ray actor, in turns.

    python benchmarks/server.py [--size 100MB] [--seconds 10] [--json FILE]

One worker pushes an update and pulls the center, of --size each: medians of bytes both ways per second. And pushes per
second of 10 KB. Every server is a process of its own with one compute thread, as is the worker; all keep their
connections over the whole run and take turns.

    unix      a shard as `engine local` starts it: an inherited socket pair, vectors through memory that both map
    socket    the same, all bytes through the socket pair
    tcp, tls  the same over loopback
    manager   a multiprocessing.Manager holding an array, through a proxy with `push` and `pull`
    ray       an actor holding an array, with `push` and `pull` (left out where ray is not installed)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import socket
import statistics
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from machine import bytes_of, facts

from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import SMALL_BYTES, hello
from manyhands.server.shard_host import serve
from manyhands.transport.channel import Channel
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import Listener, connect

SPEC = ServerSpec(rule="add")
SMALL = 10_000  # bytes of the small pushes
BURST = 200  # of them in a turn
GOALS = {"unix": 3.0, "socket": 3.0, "tcp": 1.5, "tls": 0.7}  # GB/s both ways
GOAL_PUSHES = 1_000  # a second
TIMEOUT_S = 60.0


class Side(ABC):
    """A server of one kind, in a process of its own, that holds a vector and adds to it."""

    def __init__(self, n: int) -> None:
        self.n, self.into = n, torch.empty(n)
        self.update = torch.full((n,), 1e-3)

    @abstractmethod
    def push(self) -> None: ...

    @abstractmethod
    def pull(self) -> None:
        """The parameters are in `into` afterwards, as a tensor that a model could hold."""

    @abstractmethod
    def close(self) -> None: ...


class Served(Side):
    """Ours."""

    def __init__(self, n: int, kind: str) -> None:
        super().__init__(n)
        self.listener: Listener | None = None
        channel = self._inherited() if kind in ("unix", "socket") else self._connected(kind)
        self.server = ServedServer(SPEC, [channel], memory_from=-1 if kind == "socket" else SMALL_BYTES)
        self.server.initialize(torch.zeros(n))
        self.server.activate()

    def _inherited(self) -> Channel:
        mine, its = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            _serve_and_exit(channels={0: Channel(its, peer="worker 0", timeout_s=TIMEOUT_S)})
        its.close()
        return Channel(mine, peer="server shard 0", timeout_s=TIMEOUT_S)

    def _connected(self, kind: str) -> Channel:
        credentials = Credentials.create() if kind == "tls" else None
        token = None if credentials else secrets.token_bytes(32)
        self.listener = Listener(credentials=credentials, token=token, timeout_s=TIMEOUT_S)
        self.pid = os.fork()
        if self.pid == 0:
            _serve_and_exit(channels={}, listener=self.listener)
        return connect(
            self.listener.address,
            hello(0, 0, 1, "localhost"),
            credentials=credentials,
            token=token,
            peer="server shard 0",
            timeout_s=TIMEOUT_S,
        )

    def push(self) -> None:
        self.server.push(self.update)

    def pull(self) -> None:
        self.server.pull(self.into)

    def close(self) -> None:
        self.server.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code:
            sys.exit(f"a shard ended with {code}")
        if self.listener is not None:
            self.listener.close()


def _serve_and_exit(**where: Any) -> NoReturn:
    """What the new process does."""
    code = 1
    try:
        serve(SPEC, shard=0, shards=1, workers=1, timeout_s=TIMEOUT_S, **where)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


class Parameters:
    """What the peers' processes hold."""

    def __init__(self, n: int) -> None:
        self.values = np.zeros(n, np.float32)

    def push(self, update: np.ndarray) -> None:
        self.values = self.values + update  # an array once read is not changed any more

    def pull(self) -> np.ndarray:
        return self.values


class _Manager(BaseManager):
    pass


_Manager.register("Parameters", Parameters)


class Managed(Side):
    """multiprocessing.Manager."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.manager = _Manager()
        self.manager.start()
        self.proxy = self.manager.Parameters(n)  # type: ignore[attr-defined]

    def push(self) -> None:
        self.proxy.push(self.update.numpy())

    def pull(self) -> None:
        self.into.copy_(torch.from_numpy(self.proxy.pull()))

    def close(self) -> None:
        self.manager.shutdown()


class Acting(Side):
    """A Ray actor."""

    def __init__(self, n: int) -> None:
        import ray

        super().__init__(n)
        if not ray.is_initialized():
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self.ray = ray
        self.actor = ray.remote(num_cpus=1)(Parameters).remote(n)
        ray.get(self.actor.pull.remote())

    def push(self) -> None:
        self.ray.get(self.actor.push.remote(self.update.numpy()))

    def pull(self) -> None:
        with warnings.catch_warnings():  # Ray's arrays cannot be written; nobody writes
            warnings.simplefilter("ignore", UserWarning)
            self.into.copy_(torch.from_numpy(self.ray.get(self.actor.pull.remote())))

    def close(self) -> None:
        self.ray.kill(self.actor)


def sides(n: int, names: list[str]) -> dict[str, Side]:
    """One of each kind, holding n float32."""
    made: dict[str, Side] = {}
    for name in names:
        made[name] = Managed(n) if name == "manager" else Acting(n) if name == "ray" else Served(n, name)
    return made


def measure(nbytes: int, seconds: float, names: list[str]) -> dict[str, list[float]]:
    """Seconds of each push and pull, by side, in turns for about so long."""
    opened = sides(nbytes // 4, names)
    taken: dict[str, list[float]] = {name: [] for name in opened}
    for side in opened.values():
        _both(side)
        _both(side)
    end = time.perf_counter() + seconds * len(opened)
    while time.perf_counter() < end or len(taken[names[0]]) < 5:
        for name, side in opened.items():
            taken[name].append(_both(side))
    for side in opened.values():
        side.close()
    return taken


def _both(side: Side) -> float:
    begun = time.perf_counter()
    side.push()
    side.pull()
    return time.perf_counter() - begun


def measure_pushes(seconds: float, names: list[str]) -> dict[str, list[float]]:
    """Seconds a push of SMALL bytes, by side; medians of bursts, in turns."""
    opened = sides(SMALL // 4, names)
    taken: dict[str, list[float]] = {name: [] for name in opened}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[names[0]]) < 3:
        for name, side in opened.items():
            begun = time.perf_counter()
            for _ in range(BURST):
                side.push()
            taken[name].append((time.perf_counter() - begun) / BURST)
    for side in opened.values():
        side.close()
    return taken


def report(large: dict[str, list[float]], small: dict[str, list[float]], nbytes: int) -> list[dict[str, Any]]:
    """Print the table; its rows."""
    peers = [name for name in ("manager", "ray") if name in large]
    print(f"\n{'':9}{'push+pull ms':>13}{'GB/s':>8}{'goal':>6}{'turns':>7}{'pushes/s of 10 KB':>19}", end="")
    print("".join(f"{'/' + name:>10}" for name in peers))
    rows = []
    for name, times in large.items():
        median = statistics.median(times)
        row = {
            "side": name,
            "push_pull_ms": 1e3 * median,
            "gb_per_s": 2 * nbytes / median / 1e9,
            "turns": len(times),
            "pushes_per_s": 1 / statistics.median(small[name]),
            **{f"over_{peer}": statistics.median(large[peer]) / median for peer in peers},
        }
        ratios = "".join(f"{row[f'over_{peer}']:>9.1f}x" for peer in peers)
        goal = f"{GOALS[name]:.1f}" if name in GOALS else ""
        print(
            f"{name:9}{row['push_pull_ms']:13.1f}{row['gb_per_s']:8.2f}{goal:>6}{len(times):7}{row['pushes_per_s']:19,.0f}{ratios}"
        )
        rows.append(row)
    return rows


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    names = [*GOALS, "manager"]
    if importlib.util.find_spec("ray"):
        names.append("ray")
    else:
        print("ray is not installed: its actor is left out")
    machine = facts()
    large = measure(options.size, options.seconds, names)
    small = measure_pushes(options.seconds, names)
    rows = report(large, small, options.size)
    if options.json:
        goals = {"gb_per_s": GOALS, "pushes_per_s": GOAL_PUSHES}
        options.json.write_text(
            json.dumps({"machine": machine, "bytes": options.size, "goals": goals, "rows": rows}, indent=1) + "\n"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100MB", type=bytes_of, help="of the vector")
    parser.add_argument("--seconds", default=5.0, type=float, help="about so long for each side")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
