"""Groups in real processes: forked here, watched with a deadline, and gone afterwards whatever happens."""

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshes import channels_of, close, mesh, ring

from manyhands.comm.group import Group
from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.shared_memory.group import Arena, SharedMemory, SharedMemoryGroup, create_arena, create_table
from manyhands.comm.torch_group import TorchGroup

Program = Callable[[Group], Any]
Programs = Program | dict[str, Program]


@dataclass
class Outcome:
    """How one rank ended: with a value, with an error, or (neither) killed."""

    value: Any = None
    error: Exception | None = None
    status: int = 0
    text: str = ""


Outcomes = Any
"""A list of all ranks' outcomes; of several programs {name: list}."""


def on_shared_memory(size: int, programs: Programs, *, deadline_s: float = 60, **options: Any) -> Outcomes:
    """Run `programs` on `size` processes that share memory, each with a group of its own."""
    named = _named(programs)
    memory = [SharedMemory.create(size) for _ in named]
    pipes = [[os.pipe2(os.O_CLOEXEC) for _ in range(size)] for _ in named]
    options.setdefault("hosts", _hosts(size))

    def run(rank: int) -> Any:
        return _in_turn(
            named, lambda number: SharedMemoryGroup(rank, size, memory[number], lifelines=pipes[number], **options)
        )

    def let_go() -> None:
        _close([fd for fds in memory for fd in fds], [pipe for ends in pipes for pipe in ends])
        memory.clear()
        pipes.clear()

    return _each(programs, forked(size, run, deadline_s, then=let_go))


def on_ring(size: int, programs: Programs, *, deadline_s: float = 60, mailboxes: int = 0, **options: Any) -> Outcomes:
    """Run `programs` on `size` processes that are linked by socket pairs, each with a group of its own.

    mailboxes: how many a group may open, each with sockets of its own.
    """
    named = _named(programs)
    links, more = [mesh(size) for _ in named], [mesh(size) for _ in range(mailboxes)]
    options.setdefault("hosts", _hosts(size))

    def run(rank: int) -> Any:
        for sockets in (*links, *more):
            close(sockets, but=rank)
        left = iter(more)
        if mailboxes:
            options["connect"] = lambda: channels_of(next(left), rank)
        return _in_turn(named, lambda number: ring(links[number], rank, **options))

    def let_go() -> None:
        for sockets in (*links, *more):
            close(sockets)

    return _each(programs, forked(size, run, deadline_s, then=let_go))


def on_hosts(
    layout: Sequence[Sequence[int]],
    programs: Programs,
    *,
    deadline_s: float = 60,
    with_direct: bool = True,
    **options: Any,
) -> Outcomes:
    """Run `programs` on a process for each rank: shared memory on each "host", socket pairs between them."""
    named, size, count = _named(programs), sum(map(len, layout)), len(layout)
    hosts = _hosts(count)
    memory = [[SharedMemory.create(len(ranks)) for ranks in layout] for _ in named]
    pipes = [[[os.pipe2(os.O_CLOEXEC) for _ in ranks] for ranks in layout] for _ in named]
    leaders, everybody = [mesh(count) for _ in named], [mesh(size) for _ in named]

    def let_go(host: int = -1, local_rank: int = -1, rank: int = -1) -> None:
        for number in range(len(named)):
            close(leaders[number], but=host if local_rank == 0 else -1)
            close(everybody[number], but=rank if with_direct else -1)
            for other in range(count):
                if other != host:
                    _close(memory[number][other], pipes[number][other])

    def run(rank: int) -> Any:
        host = next(number for number, ranks in enumerate(layout) if rank in ranks)
        local_rank = layout[host].index(rank)
        let_go(host, local_rank, rank)
        names, where = (
            [ranks[0] for ranks in layout],
            [hosts[other] for other, ranks in enumerate(layout) for _ in ranks],
        )

        def group(number: int) -> HierarchicalGroup:
            shared, ends = memory[number][host], pipes[number][host]
            local = SharedMemoryGroup(local_rank, len(layout[host]), shared, lifelines=ends, **options)
            across = ring(leaders[number], host, hosts=hosts, names=names, **options) if local_rank == 0 else None
            direct = ring(everybody[number], rank, hosts=where, **options) if with_direct else None
            return HierarchicalGroup(rank, layout, local, across, direct=direct, hosts=hosts)

        return _in_turn(named, group)

    return _each(programs, forked(size, run, deadline_s, then=let_go))


def _hosts(count: int) -> list[str]:
    return [f"host-{number}" for number in range(count)]


def _named(programs: Programs) -> dict[str, Program]:
    return programs if isinstance(programs, dict) else {"": programs}


def _in_turn(programs: dict[str, Program], group_of: Callable[[int], Group]) -> dict[str, Outcome]:
    """What came of each program in this process."""
    found = {}
    for number, (name, program) in enumerate(programs.items()):
        group = group_of(number)
        try:
            found[name] = Outcome(program(group))
        except BaseException as error:  # noqa: BLE001 - the test gets it
            found[name] = Outcome(error=error, text=traceback.format_exc())
        finally:
            group.close()
    return found


def _each(programs: Programs, outcomes: list[Outcome]) -> Outcomes:
    found = {name: [one.value[name] if one.value else one for one in outcomes] for name in _named(programs)}
    return found if isinstance(programs, dict) else found[""]


@dataclass
class Member:
    """One of `on_arenas`'s processes. A generation is a group: its members are processes, in rank order."""

    process: int
    fds: list[int]  # arenas, by process
    generations: Sequence[Sequence[int]]
    tables: list[int]  # by generation, as the next one
    pipes: list[list[tuple[int, int]]]
    arena: Arena

    def join(self, generation: int) -> SharedMemoryGroup:
        """The group of this generation, on this process's arena. The program closes it."""
        members = self.generations[generation]
        memory = [self.tables[generation], *(os.dup(self.fds[process]) for process in members)]
        return SharedMemoryGroup(
            members.index(self.process),
            len(members),
            memory,
            arena=self.arena,
            lifelines=self.pipes[generation],
            names=members,
            timeout_s=30,
        )


def on_arenas(generations: Sequence[Sequence[int]], program: Callable[[Member], Any]) -> list[Outcome]:
    """Run `program(member)` on as many processes as the generations name, each with an arena of its own."""
    size = 1 + max(process for members in generations for process in members)
    arenas = [create_arena(size) for _ in range(size)]
    tables = [create_table(len(members)) for members in generations]
    pipes = [[os.pipe2(os.O_CLOEXEC) for _ in members] for members in generations]

    def run(process: int) -> Any:
        for members, ends in zip(generations, pipes, strict=True):
            if process not in members:
                _close([], ends)
        return program(Member(process, arenas, generations, tables, pipes, Arena(arenas[process])))

    def let_go() -> None:
        _close([*arenas, *tables], [pipe for ends in pipes for pipe in ends])

    return forked(size, run, 60, then=let_go)


def on_gloo(size: int, programs: Programs, folder: Path, *, deadline_s: float = 90, timeout_s: float = 30) -> Outcomes:
    """Run `programs` on `size` processes over torch.distributed's gloo, each with a group of its own."""
    store = str(folder / f"store-{time.monotonic_ns()}")

    def run(rank: int) -> Any:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        try:
            return _in_turn(_named(programs), lambda _: TorchGroup(timeout_s=timeout_s))
        finally:
            dist.destroy_process_group()

    return _each(programs, forked(size, run, deadline_s))


def forked(
    size: int, run: Callable[[int], Any], deadline_s: float, then: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Fork `run(rank)` for every rank, call `then` here, and collect what came of them."""
    pids: list[int] = []
    readers: list[int] = []
    for rank in range(size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _live(run, rank, writer)
        os.close(writer)
        pids.append(pid)
        readers.append(reader)
    try:
        then()
        texts = _read_all(readers, time.monotonic() + deadline_s)
        return [_outcome(text, os.waitpid(pid, 0)[1]) for pid, text in zip(pids, texts, strict=True)]
    except TimeoutError:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        for reader in readers:
            os.close(reader)


def values(outcomes: list[Outcome]) -> list[Any]:
    """All ranks' values; the first error otherwise."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.status:
            raise AssertionError(f"rank {rank} ended with status {outcome.status}:\n{outcome.text}")
    return [outcome.value for outcome in outcomes]


def _live(run: Callable[[int], Any], rank: int, writer: int) -> None:
    torch.set_num_threads(1)
    try:
        message = (run(rank), None, "")
    except BaseException as error:  # noqa: BLE001 - the end of the process; the test gets the error
        message = (None, error, traceback.format_exc())
    try:
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(message))
    finally:
        os._exit(0)


def _read_all(readers: list[int], deadline: float) -> list[bytes]:
    texts = dict.fromkeys(readers, b"")
    left = set(readers)
    while left:
        ready, _, _ = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(left)} of {len(readers)} ranks did not end in time")
        for reader in ready:
            piece = os.read(reader, 1 << 16)
            texts[reader] += piece
            if not piece:
                left.discard(reader)
    return [texts[reader] for reader in readers]


def _outcome(text: bytes, status: int) -> Outcome:
    if not text:
        return Outcome(status=status, text="it said nothing")
    value, error, trace = pickle.loads(text)
    return Outcome(value, error, status, trace)


def _close(memory: Sequence[int], pipes: Sequence[tuple[int, int]]) -> None:
    for fd in [*memory, *(end for pipe in pipes for end in pipe)]:
        os.close(fd)
