"""Two hosts on one machine, as far as networks and names go: namespaces joined by a virtual cable. Nothing of them has a name."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("alpha", "beta")
CABLE = "cable"

_HOLD = "hostname {name} && ip link set lo up && echo ready && read end"


class TwoHosts:
    """`start(0, …)` runs a command on alpha (10.77.0.1), `start(1, …)` on beta (10.77.0.2)."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def inside(self, host: int) -> list[str]:
        """What stands before a command that runs there."""
        return ["nsenter", "-t", str(self.pids[host]), "-n", "-u", "--"]

    def start(self, host: int, *command: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.inside(host), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
        )


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Skips the test where this process may not make them."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "hostname") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        pytest.skip(f"two network namespaces need Linux and {', '.join(missing) or 'its tools'}")
    with ExitStack() as stack:
        holders = [stack.enter_context(_namespace(name)) for name in NAMES]
        pids = [holder.pid for holder in holders]
        ends = ["ip", "link", "add", CABLE, "netns", str(pids[0]), "type", "veth", "peer", CABLE, "netns", str(pids[1])]
        _run(ends)
        for pid, address in zip(pids, ADDRESSES, strict=True):
            inside = ["nsenter", "-t", str(pid), "-n", "ip"]
            _run([*inside, "address", "add", f"{address}/24", "dev", CABLE])
            _run([*inside, "link", "set", CABLE, "up"])
        yield TwoHosts(pids)


@contextmanager
def _namespace(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds one open, as long as it waits for a line on its standard input."""
    holder = subprocess.Popen(
        ["unshare", "-n", "-u", "sh", "-c", _HOLD.format(name=name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"network namespaces are not allowed here: {holder.stderr.read().strip()}")
        yield holder
    finally:
        holder.communicate("\n", timeout=10)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        pytest.skip(f"a virtual cable between network namespaces is not allowed here: {done.stderr.strip()}")


def source() -> str:
    """For PYTHONPATH."""
    return str(Path(__file__).resolve().parents[3] / "src")


def programs(folder: Path, **scripts: str) -> str:
    """PATH with these shell scripts and this environment's programs before others."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
