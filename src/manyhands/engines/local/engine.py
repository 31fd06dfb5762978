"""Engine `local`: processes of this machine, forked from a fork server. One worker runs in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from typing_extensions import override

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts
from manyhands.engines.faults import Faults
from manyhands.errors import Unsupported

if TYPE_CHECKING:
    from manyhands.engines.local.fork_client import Spawner
    from manyhands.worker import Worker

T = TypeVar("T")


@dataclass
class _Slot:
    """Where a started fork server waits for its run. All slots are equal: they are no option of the engine's."""

    spawner: Spawner | None = field(default=None, compare=False)
    keep: bool = field(default=False, compare=False)

    def __reduce__(self) -> tuple[type[_Slot], tuple[()]]:
        return _Slot, ()

    def take(self) -> Spawner:
        """The waiting server, or a new one (the first time, or while another thread's run has it)."""
        from manyhands.engines.local.fork_client import Spawner  # what it needs of the system, Windows does not have

        spawner, self.spawner = self.spawner, None
        if spawner is not None and not spawner.alive:
            spawner.kill()
            spawner = None
        return spawner or Spawner()


@dataclass(frozen=True, kw_only=True)
class Local(Engine):
    """Workers on this machine: processes that start at once, share memory, and never outlive the run.

    They do not import the caller's main again, so no `__main__` guard is needed; lambdas, notebooks and stdin work.
    As a context manager it keeps one warm fork server for several launches; without, each launch has its own.
    """

    apart: bool = False
    """Whether one worker has a process of its own, too; without, it runs in the caller's, where a breakpoint works.
    Turn it on to measure one worker as several are."""

    faults: str | Faults = ""
    """What goes wrong, to try out what a run then does: kill=2@step:100,pause=1@2.5s+3 … send real signals."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(one_host=True, serves=True, survives=True, copies=True)
    _slot: _Slot = field(default_factory=_Slot, init=False, repr=False, compare=False)

    @override
    def prestart(self) -> Self:
        """Begin to load torch for the workers now; the next launch uses it. Whoever may not launch calls `close`."""
        if self._slot.spawner is None and sys.platform == "linux":
            from manyhands.engines.local.fork_client import Spawner

            self._slot.spawner = Spawner()
        return self

    @override
    def close(self) -> None:
        """End a fork server that waits for a launch. Idempotent."""
        spawner, self._slot.spawner = self._slot.spawner, None
        if spawner is not None:
            spawner.close()

    def __enter__(self) -> Self:
        self._slot.keep = True
        return self.prestart()

    def __exit__(self, *_: object) -> None:
        self._slot.keep = False
        self.close()

    def __post_init__(self) -> None:
        _ = Faults.of(self.faults)  # what cannot be read is refused now

    @override
    def check(self, spec: LaunchSpec) -> None:
        check_counts(spec)
        instead = "give apart=true, or several workers" if self._in_this_process(spec) else ""
        Faults.of(self.faults).check_real(self.name, spec, instead)

    def _in_this_process(self, spec: LaunchSpec) -> bool:
        return spec.workers == 1 and not self.apart and spec.survive is None and not spec.restarts

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self.check(spec)
        if not self._in_this_process(spec) and sys.platform != "linux":
            raise Unsupported(
                f"several workers need Linux, this is {sys.platform}: on Windows use WSL2, or give workers=1"
            )
        if self._in_this_process(spec):
            from manyhands.engines.single_process import run_here

            if not self._slot.keep:
                self.close()  # a server that was started early is not needed
            return [run_here(program, spec)]
        from manyhands.engines.driver.elastic_driver import driver_of
        from manyhands.engines.driver.host_processes import process_indices_of
        from manyhands.engines.local.processes import LocalProcesses

        slot = self._slot
        spawner = slot.take()
        try:
            host_processes = LocalProcesses(
                spawner, process_indices_of(spec.workers, spec.shard_processes), spec.timeout_s
            )
            return driver_of([host_processes], spec, Faults.of(self.faults)).run(program)
        finally:
            if (slot.keep or spec.restarts) and slot.spawner is None and spawner.alive:
                slot.spawner = spawner
            else:
                spawner.close()

    @override
    def finish_run(self) -> None:
        if not self._slot.keep:
            self.close()
