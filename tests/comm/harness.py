"""Groups in real processes: forked here, watched with a deadline, and gone afterwards whatever happens."""

from __future__ import annotations

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

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import (
    Arena,
    SharedMemory,
    SharedMemoryGroup,
    create_arena,
    create_table,
)
from manyhands.comm.torch_group import TorchGroup

Program = Callable[[Group], Any]


@dataclass
class Outcome:
    """How one rank ended: with a value, with an error, or (neither) killed."""

    value: Any = None
    error: Exception | None = None
    status: int = 0
    text: str = ""


def on_shared_memory(size: int, program: Program, *, deadline_s: float = 60, **options: Any) -> list[Outcome]:
    """Run `program(group)` on `size` processes that share memory."""
    memory = SharedMemory.create(size)
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(size)]

    def run(rank: int) -> Any:
        hosts = [f"host-{peer}" for peer in range(size)]
        group = SharedMemoryGroup(rank, size, memory, lifelines=pipes, hosts=hosts, **options)
        try:
            return program(group)
        finally:
            group.close()

    try:
        return forked(size, run, deadline_s, then=lambda: _close(memory, pipes))
    finally:
        _close(memory, pipes)


@dataclass
class Member:
    """One of `on_arenas`'s processes. A generation is a group: its members are processes, in the order of their ranks."""

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


def on_gloo(
    size: int, program: Program, folder: Path, *, deadline_s: float = 90, timeout_s: float = 30
) -> list[Outcome]:
    """Run `program(group)` on `size` processes over torch.distributed's gloo."""
    store = str(folder / f"store-{time.monotonic_ns()}")

    def run(rank: int) -> Any:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        group = TorchGroup(timeout_s=timeout_s)
        try:
            return program(group)
        finally:
            group.close()
            dist.destroy_process_group()

    return forked(size, run, deadline_s)


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


def _close(memory: list[int], pipes: list[tuple[int, int]]) -> None:
    for fd in [*memory, *(end for pipe in pipes for end in pipe)]:
        os.close(fd)
    memory.clear()
    pipes.clear()
