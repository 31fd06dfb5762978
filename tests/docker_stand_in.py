"""What stands for `docker` where no daemon runs: `docker run` by namespaces, of this machine's own programs.

It takes the options that docs/containers.md shows, and no others. The container has a root of its own, in which this
machine's folders are read-only, an empty /tmp, a /dev/shm of 64 MB, its own processes, network, user and CPU quota; the
image's environment is the Dockerfile's. Docker's NAT is a proxy for each published port, which is what Docker's own
userland proxy is. Ends with 99 where something was left in /dev/shm or /tmp.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from control_groups import limited
from dockerfile import instructions, last, pairs

SOURCE = Path(__file__).resolve().parents[1] / "src"
LEFT_BEHIND = 99
_INSIDE = "--inside"
_ENTER = 'cd "$0" && mount -t proc proc proc && pivot_root . . && umount --lazy . && cd / && exec "$@"'


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["build", *_, "."]:
            return 0 if instructions(Path("Dockerfile")) else 1
        case ["run", *words]:  # what is mounted from here on is seen by nobody outside
            own = [] if os.geteuid() == 0 else ["--map-root-user"]
            os.execvp("unshare", ["unshare", *own, "--mount", sys.executable, __file__, _INSIDE, *words])
        case ["--inside", *words]:
            return run(options(words))
    raise SystemExit(f"this docker knows build and run alone, not {arguments}")


def options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--rm", "--read-only"):
        parser.add_argument(name, action="store_true")
    for name in ("--tmpfs", "--volume", "--env", "--publish"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--memory")
    parser.add_argument("--shm-size", default="64m")
    parser.add_argument("--user", default="1000:1000")
    parser.add_argument("--network", choices=["bridge", "host"], default="bridge")
    parser.add_argument("--entrypoint", default="manyhands")
    parser.add_argument("image", choices=["manyhands"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def run(asked: argparse.Namespace) -> int:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="docker-")))
        stack.enter_context(filesystem(root, asked))
        start = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, str(root)]
        if asked.network == "bridge":
            start = [*stack.enter_context(bridge(asked.publish)), *start]
        if asked.cpus:
            group = stack.enter_context(limited(asked.cpus))
            start = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *start]
        uid, gid = asked.user.split(":")
        user = ["unshare", "--user", f"--map-user={uid}", f"--map-group={gid}"]
        mortal = ["setpriv", "--pdeathsig", "KILL"]  # the container ends with this process, however that ends
        process = subprocess.Popen([*mortal, *start, *user, *program(asked)])
        for number in (signal.SIGTERM, signal.SIGINT):  # as docker stop, and docker run in the foreground
            signal.signal(number, lambda number, frame: to_first(process.pid, number))
        code = process.wait()
        left = [str(path) for folder in ("dev/shm", "tmp") for path in (root / folder).rglob("*")]
        left = [path for path in left if "/torchinductor_" not in path]  # a cache of torch's
        if left:
            print("left behind:", *left, file=sys.stderr)
        return LEFT_BEHIND if left else code


def program(asked: argparse.Namespace) -> list[str]:
    """The command in the container, with the image's environment."""
    variables = pairs("ENV") | {"PATH": os.environ["PATH"], "PYTHONPATH": "/source"}
    variables |= dict(one.split("=", 1) for one in asked.env)
    clean = ["env", "-i", f"--chdir={last('WORKDIR')}", *(f"{name}={value}" for name, value in variables.items())]
    start = [sys.executable, "-m", "manyhands"] if asked.entrypoint == "manyhands" else [sys.executable]
    return [*clean, *start, *asked.arguments]


def to_first(pid: int, number: int) -> None:
    """Send a signal to the container's first process: the youngest of the chain that leads to it."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "NSpid" in (status := Path(f"/proc/{pid}/status").read_text()) and in_own_space(status):
            break
        pid = int(children[0])
    os.kill(pid, number)


def in_own_space(status: str) -> bool:
    """Whether it is process 1 of a space of its own."""
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return len(numbers := line.split()[1:]) > 1 and numbers[-1] == "1"


@contextmanager
def filesystem(root: Path, asked: argparse.Namespace) -> Iterator[None]:
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "mode=755", "root", root)
    for entry in Path("/").iterdir():
        place = root / entry.name
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry))
        elif entry.is_dir():
            place.mkdir()
            if entry.name not in ("proc", "tmp"):
                mount("--rbind", entry, place)
                mount("-o", "remount,bind,ro", place)
    mount("-t", "tmpfs", "-o", f"size={asked.shm_size},mode=1777", "shm", root / "dev/shm")
    bind(root, f"{SOURCE}:/source")
    (root / last("WORKDIR").lstrip("/")).mkdir()
    for volume in asked.volume:
        bind(root, volume)
    for place in asked.tmpfs:
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / place.lstrip("/"))
    if asked.read_only:
        mount("-o", "remount,ro", root)
    try:
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(root)], check=True)


def bind(root: Path, volume: str) -> None:
    source, _, target = volume.partition(":")
    place = root / target.lstrip("/")
    place.mkdir(exist_ok=True)
    mount("--bind", source, place)


def mount(*words: Any) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


# -- a network of its own, and its published ports -------------------------------------------------------------------


@contextmanager
def bridge(published: Sequence[str]) -> Iterator[list[str]]:
    """What stands before a command that runs in a network of its own; others reach its published ports on this host's."""
    hold = "ip link set lo up && echo ready && read end"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", hold], **pipes)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        inside = ["nsenter", "-t", str(holder.pid), "--net", "--"]
        if published:
            connect(holder.pid, inside, published)
        yield inside
    finally:
        holder.communicate("\n", timeout=10)


def connect(pid: int, inside: Sequence[str], published: Sequence[str]) -> None:
    net = f"172.30.{pid % 250}"
    host, container = f"{net}.1", f"{net}.2"
    for words in (
        ["ip", "link", "add", "box", "type", "veth", "peer", "eth0", "netns", str(pid)],
        ["ip", "address", "add", f"{host}/24", "dev", "box"],
        ["ip", "link", "set", "box", "up"],
        [*inside, "ip", "address", "add", f"{container}/24", "dev", "eth0"],
        [*inside, "ip", "link", "set", "eth0", "up"],
        [*inside, "ip", "route", "add", "default", "via", host],
    ):
        subprocess.run(words, check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    ports = [port for one in published for port in same_ports(one)]
    threading.Thread(target=lambda: asyncio.run(forward(ports, container)), daemon=True).start()


def same_ports(published: str) -> range:
    """Of 7000-7010:7000-7010."""
    outside, _, within = published.partition(":")
    assert outside == within, "manyhands tells others the port on which it listens"
    first, _, final = outside.partition("-")
    return range(int(first), int(final or first) + 1)


async def forward(ports: Sequence[int], container: str) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def to(port: int) -> Any:
        async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there = await asyncio.open_connection(container, port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

        return visit

    servers = [await asyncio.start_server(to(port), "0.0.0.0", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
