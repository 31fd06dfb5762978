"""All-reduce through sockets: `RingGroup` on TCP loopback beside torch.distributed's gloo, and over slow links beside their limit.

    python benchmarks/ring.py [--workers 2,4] [--sizes 4KB,1MB] [--link 1gbit,100mbit | --link ''] [--json FILE]

Ours is `RingGroup.mean_` (weighted, with control bits); gloo is `all_reduce` (a plain sum, default settings) of a tensor
of the same size, in the same processes, in turns. Before each call the workers meet; a call's time is that of the
slowest worker. The tables show medians, beside the goal of a row, where it has one, and whether it is met.

--link joins two network namespaces by a veth pair, each end limited to that rate by `tc tbf`, and shows how far the time
is from the link's limit, 2(N-1)/N·bytes/bandwidth (Ethernet, IP and TCP headers not counted: 4.5 % of each packet, and
acknowledgements: some 2 %). Beside it, "plain" is a bare swap of the same bytes between two sockets. It needs the right
to make namespaces (root), and `ip` and `tc` (iproute2); the namespaces vanish with the processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import bytes_of, facts

from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.links import connect_all
from manyhands.transport.listener import Listener

RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}  # bits a second
SIZES = "4KB,100KB,1MB,4MB,25MB,100MB"
LINK_SIZES = "1MB,4MB,25MB"
BLOCKS = 8  # turns of each side
BUDGET_S = 2.0  # about so long for each side at each size
TIMEOUT_S = 120.0
LINKS = "1gbit,100mbit"
GOALS = ((100_000, 4.0), (4_000_000, 1.5), (math.inf, 1.0))  # up to so many bytes, gloo/ours at least; of 2 workers
LINK_GOAL, LINK_GOAL_FROM = 1.1, 1_000_000  # ours/limit at most, from so many bytes on
BURST_BYTES = 32_000  # what a link lets pass at once: no more, or small messages would beat its rate
QUEUE_BYTES = 8_000_000

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    options = _options()
    machine = facts()
    rows = [row for workers in options.workers for row in measure(workers, options.sizes)]
    links = [row for rate in options.link for row in measure_link(rate, options.link_sizes)]
    if options.json:
        numbers = {"machine": machine, "rows": rows, "links": links}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


# -- on loopback, beside gloo --------------------------------------------------------------------------------------------


def measure(workers: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of the table for so many workers, printed as they come in."""
    print(
        f"\n{workers} workers   {'size':>6} {'ours ms':>9} {'gloo ms':>9} {'gloo/ours':>10} {'goal':>5} {'':6} {'calls':>7}",
        flush=True,
    )
    token = secrets.token_bytes(32)
    listeners = [Listener(credentials=None, token=token) for _ in range(workers)]
    addresses = [listener.address for listener in listeners]

    def live(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        channels = connect_all(rank, listeners[rank], addresses, credentials=None, token=token, timeout_s=TIMEOUT_S)
        group = RingGroup(rank, workers, channels, timeout_s=TIMEOUT_S)
        store = dist.FileStore(str(Path(folder) / "store"), workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
        for name, nbytes in sizes.items():
            row = {"workers": workers, "size": name, "bytes": nbytes} | _beside_gloo(group, nbytes)
            if rank == 0:
                say(row)
        dist.destroy_process_group()
        group.close()

    with tempfile.TemporaryDirectory() as folder:
        try:
            return _forked(workers, live, _show_beside_gloo)
        finally:
            for listener in listeners:
                listener.close()


def _beside_gloo(group: RingGroup, nbytes: int) -> dict[str, Any]:
    ours, theirs = torch.empty(nbytes // 4), torch.empty(nbytes // 4)
    slowest = _timed_in_turns(
        group, {"ours": lambda: group.mean_(ours, 1.0, 3), "gloo": lambda: dist.all_reduce(theirs)}, [ours, theirs]
    )
    medians = {name: statistics.median(times) for name, times in slowest.items()}
    ms = {f"{name}_ms": round(1000 * median, 4) for name, median in medians.items()}
    return ms | {
        "ratio": round(medians["gloo"] / medians["ours"], 2),
        "goal": next(goal for most, goal in GOALS if nbytes <= most) if group.size == 2 else None,
        "calls": [len(times) for times in slowest.values()],
    }


def _show_beside_gloo(row: dict[str, Any]) -> None:
    calls = "/".join(map(str, row["calls"]))
    print(
        f"{'':>12}{row['size']:>6} {row['ours_ms']:>9.3f} {row['gloo_ms']:>9.3f} {row['ratio']:>9.2f}x {_verdict(row, at_least=True)} {calls:>7}"
    )


# -- over a slow link, beside its limit ----------------------------------------------------------------------------------


def measure_link(rate: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Rows for two workers on two "hosts" that a link of this rate joins; none, and a word why, where that is not allowed."""
    print(
        f"\n{rate:>9} link {'size':>6} {'ours ms':>9} {'plain ms':>9} {'limit ms':>9} {'ours/limit':>10} {'goal':>5} {'':6} {'calls':>7}",
        flush=True,
    )
    if why := _no_namespaces():
        print(f"{'':>14} skipped: {why}")
        return []
    token = secrets.token_bytes(32)
    ends = [socket.socketpair() for _ in range(2)]  # of the parent with each child, which is in a namespace of its own

    def live(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        mine = ends[rank][1]
        _unshare()
        _put(mine, os.getpid())
        _get(mine)  # the veth is here
        host = f"10.77.0.{rank + 1}"
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "addr", "add", f"{host}/24", "dev", f"mh{rank}")
        _run("ip", "link", "set", f"mh{rank}", "up")
        shape = ["rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
        _run("tc", "qdisc", "add", "dev", f"mh{rank}", "root", "tbf", *shape)
        listener = Listener(host, credentials=None, token=token, plain_network=True)
        _put(mine, listener.address)
        addresses = [(str(address[0]), int(address[1])) for address in _get(mine)]
        ring, plain = (
            connect_all(rank, listener, addresses, credentials=None, token=token, purpose=purpose, timeout_s=TIMEOUT_S)
            for purpose in ("ring", "plain")
        )
        group = RingGroup(rank, 2, ring, hosts=["first", "second"], timeout_s=TIMEOUT_S)
        sock = plain[1 - rank].detach()
        for name, nbytes in sizes.items():
            row = {"link": rate, "size": name, "bytes": nbytes} | _beside_limit(group, sock, nbytes, _bits_per_s(rate))
            if rank == 0:
                say(row)
        group.close()
        sock.close()
        listener.close()

    def join() -> None:
        pids = [_get(end) for end, _ in ends]
        _run("ip", "link", "add", "mh0", "netns", str(pids[0]), "type", "veth", "peer", "mh1", "netns", str(pids[1]))
        for end, _ in ends:
            _put(end, True)
        addresses = [_get(end) for end, _ in ends]
        for end, _ in ends:
            _put(end, addresses)

    try:
        return _forked(2, live, _show_beside_limit, join)
    finally:
        for pair in ends:
            for end in pair:
                end.close()


def _beside_limit(group: RingGroup, sock: socket.socket, nbytes: int, bits_per_s: float) -> dict[str, Any]:
    ours = torch.empty(nbytes // 4)
    limit = 2 * (group.size - 1) / group.size * nbytes * 8 / bits_per_s
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: group.mean_(ours, 1.0, 3),
        "plain": lambda: _swap(sock, nbytes),
    }
    slowest = _timed_in_turns(group, sides, [ours])
    medians = {name: statistics.median(times) for name, times in slowest.items()}
    ms = {f"{name}_ms": round(1000 * median, 3) for name, median in medians.items()}
    return ms | {
        "limit_ms": round(1000 * limit, 3),
        "ratio": round(medians["ours"] / limit, 3),
        "goal": LINK_GOAL if nbytes >= LINK_GOAL_FROM else None,
        "calls": [len(times) for times in slowest.values()],
    }


def _swap(sock: socket.socket, nbytes: int) -> None:
    """The same bytes both ways at once, and nothing else: what the machine makes of this link."""
    out, into, got = bytes(nbytes), memoryview(bytearray(nbytes)), 0
    sending = threading.Thread(target=sock.sendall, args=(out,))
    sending.start()
    while got < nbytes:
        got += sock.recv_into(into[got:])
    sending.join()


def _show_beside_limit(row: dict[str, Any]) -> None:
    calls = "/".join(map(str, row["calls"]))
    print(
        f"{'':>14} {row['size']:>6} {row['ours_ms']:>9.2f} {row['plain_ms']:>9.2f} {row['limit_ms']:>9.2f} "
        f"{row['ratio']:>10.3f} {_verdict(row, at_least=False)} {calls:>7}"
    )


def _no_namespaces() -> str:
    """Why there can be none here; nothing if there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _unshare()
            code = subprocess.run(["ip", "link", "add", "mhtest", "type", "veth"], capture_output=True).returncode
        except OSError:
            code = 1
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        return "network namespaces with veth pairs are not allowed here (that takes root, and a kernel with veth)"
    return ""


def _unshare() -> None:
    """Into a network namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _put(end: socket.socket, value: Any) -> None:
    end.sendall(json.dumps(value).encode() + b"\n")


def _get(end: socket.socket) -> Any:
    end.settimeout(TIMEOUT_S)
    text = b""
    while not text.endswith(b"\n"):
        piece = end.recv(1)
        if not piece:
            raise SystemExit("a worker ended early")
        text += piece
    return json.loads(text)


# -- both ----------------------------------------------------------------------------------------------------------------


def _verdict(row: dict[str, Any], *, at_least: bool) -> str:
    """The row's goal, and whether its ratio is at least, or at most, that."""
    ratio, goal = row["ratio"], row["goal"]
    if goal is None:
        return f"{'':5} {'':6}"
    return f"{goal:>5.1f} {'met' if (ratio >= goal if at_least else ratio <= goal) else 'missed':6}"


def _forked(
    workers: int,
    live: Callable[[int, Callable[[dict[str, Any]], None]], None],
    show: Callable[[dict[str, Any]], None],
    then: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Fork `live(rank, say)` for every rank; what rank 0 says is shown and returned. No process stays behind."""
    reader, writer = os.pipe()
    pids: list[int] = []
    for rank in range(workers):
        pid = os.fork()
        if pid == 0:
            _child(rank, live, writer)
        pids.append(pid)
    os.close(writer)
    rows = []
    try:
        then()
        for line in os.fdopen(reader):
            rows.append(json.loads(line))
            show(rows[-1])
            sys.stdout.flush()
    except BaseException:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"workers ended with {codes}")
    return rows


def _child(rank: int, live: Callable[[int, Callable[[dict[str, Any]], None]], None], writer: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1

    def say(row: dict[str, Any]) -> None:
        os.write(writer, (json.dumps(row) + "\n").encode())

    try:
        torch.set_num_threads(1)
        live(rank, say)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _timed_in_turns(
    group: RingGroup, sides: dict[str, Callable[[], object]], tensors: list[torch.Tensor]
) -> dict[str, list[float]]:
    """By side: seconds of each call, of the slowest worker."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    calls = {name: _calls(group, call, tensors) for name, call in sides.items()}
    for _ in range(BLOCKS):
        for name, call in sides.items():
            for tensor in tensors:
                tensor.uniform_()
            seconds[name] += [_timed(group, call) for _ in range(calls[name])]
    return {
        name: [max(times) for times in zip(*group.all_gather_json(own), strict=True)] for name, own in seconds.items()
    }


def _calls(group: RingGroup, call: Callable[[], object], tensors: list[torch.Tensor]) -> int:
    """Warm up; so many calls a block, the same on all workers."""
    for tensor in tensors:
        tensor.uniform_()
    for _ in range(2):
        call()
    once = max(group.all_gather_json(min(_timed(group, call) for _ in range(2))))
    return max(1, min(100, int(BUDGET_S / BLOCKS / once)))


def _timed(group: RingGroup, call: Callable[[], object]) -> float:
    group.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", default="2,4", type=lambda text: [int(count) for count in text.split(",") if count]
    )
    parser.add_argument("--sizes", default=SIZES, type=_sizes)
    parser.add_argument("--link", default=LINKS, type=lambda text: [rate for rate in text.split(",") if rate])
    parser.add_argument("--link-sizes", default=LINK_SIZES, type=_sizes)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


def _sizes(text: str) -> dict[str, int]:
    return {name: bytes_of(name) for name in text.split(",")}


def _bits_per_s(rate: str) -> float:
    for unit, factor in RATES.items():
        if rate.lower().endswith(unit):
            return float(rate[: -len(unit)]) * factor
    raise SystemExit(f"a rate is a number and one of {', '.join(RATES)}; got {rate}")


if __name__ == "__main__":
    main()
