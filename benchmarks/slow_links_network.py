"""Hosts in network namespaces, joined by a switch, each card limited in both directions. Linux, root, iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

CARD = "uplink"  # every host's, by this name
BURST_BYTES, QUEUE_BYTES = (
    32_000,
    8_000_000,
)  # what passes at once: no more, or short messages would beat the rate; what waits
TIMEOUT_S = 10.0

_HOLD = "hostname {name} && ip link set lo up && echo ready && read end"
_PR_SET_PDEATHSIG = 1


class Network:
    """`start(0, …)` runs a command on the first host, whose address is `address(0)`."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, *command: str, **more: Any) -> subprocess.Popen[str]:
        """It is killed where this process dies without having ended it."""
        return subprocess.Popen([*_inside(self._pids[host]), *command], text=True, preexec_fn=_die_with_parent, **more)


@contextmanager
def network(hosts: int, rate: str) -> Iterator[Network]:
    """`rate`: of each card, as tc has it ("100mbit"), or "" for none. All is gone afterwards, also where this process is killed.

    Raises SystemExit, saying why, where that is not allowed.
    """
    _check()
    with ExitStack() as stack:
        pids = [stack.enter_context(_namespace(f"host{host}")) for host in range(hosts)]
        switch = stack.enter_context(_namespace("switch"))
        _run(*_inside(switch), "ip", "link", "add", "name", "bridge", "type", "bridge")
        _run(*_inside(switch), "ip", "link", "set", "dev", "bridge", "up")
        joined = Network(pids)
        for host, pid in enumerate(pids):
            port = f"port{host}"
            ends = [CARD, "netns", str(pid), "type", "veth", "peer", "name", port, "netns", str(switch)]
            _run("ip", "link", "add", "name", *ends)
            _run(*_inside(pid), "ip", "address", "add", f"{joined.address(host)}/24", "dev", CARD)
            _run(*_inside(switch), "ip", "link", "set", "dev", port, "master", "bridge")
            for end, device in ((pid, CARD), (switch, port)):
                _run(*_inside(end), "ip", "link", "set", "dev", device, "up")
                if rate:
                    shape = ["rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
                    _run(*_inside(end), "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield joined


def _check() -> None:
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare", "hostname") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        sys.exit(f"hosts with slow links need Linux and {', '.join(missing) or 'its tools'} (iproute2, util-linux)")
    if os.geteuid():
        sys.exit(
            "hosts with slow links need root, for network namespaces: run this with sudo, or as root of a container"
        )


@contextmanager
def _namespace(name: str) -> Iterator[int]:
    """Of network and host name: the process that holds one open as long as its standard input is."""
    command = ["unshare", "-n", "-u", "sh", "-c", _HOLD.format(name=name)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            sys.exit(
                f"no network namespace here: {holder.stderr.read().strip()}. That takes root and a kernel with them"
            )
        yield holder.pid
    finally:
        holder.communicate("\n", timeout=TIMEOUT_S)


def _inside(pid: int) -> list[str]:
    return ["nsenter", "-t", str(pid), "-n", "-u", "--"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}. It takes a kernel with veth, bridge and tbf")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
