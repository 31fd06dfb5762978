"""A script under observation: what kind of program it is, what runs it, and the line of a refusal."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadInput, Unsupported, users_line
from manyhands.own_loop.batches import SLICES, WHOLE, batches_of, has_own_exchange

if TYPE_CHECKING:  # they import torch
    from torch import Tensor

    from manyhands.own_loop.observed.sliced_script import SlicedScript
    from manyhands.own_loop.session import Session
    from manyhands.own_loop.whole.script import WholeScript
    from manyhands.strategies.base import Strategy

LOOP, KERAS, DISTRIBUTED = "loop", "keras", "distributed"
KINDS = (LOOP, KERAS, DISTRIBUTED)
_GROUPS = {"init_process_group", "Accelerator"}  # who calls these makes a group of processes
LEAST_VERSIONS = {
    "accelerate": "1.0",
    "transformers": "4.46",
    "lightning": "2.4",
    "pytorch_lightning": "2.4",
    "keras": "3.0",
}
_TRAINERS = {"lightning", "pytorch_lightning", "lightning_fabric"}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How a script is run that knows of no workers."""

    kind: str = LOOP
    batches: str | None = None
    own_batches: bool = False
    read: str | None = None
    verify: int = 0  # so many steps are compared with one process's first; 0: none
    chosen: bool = False  # by its text


def kind_of(text: str, *, gpus: int) -> str:
    """What the text of a script is: a program that makes a group of processes, one that calls Keras' `fit`, or a loop.

    A program that names nccl alone makes its group on GPUs; without any it is a loop.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return LOOP  # Python says where
    names, modules = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
    backends = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if (
        modules & _TRAINERS
        or names & _GROUPS - {"init_process_group"}
        or ("transformers" in modules and "Trainer" in names)
    ):
        return DISTRIBUTED
    if "init_process_group" in names and (gpus or "nccl" not in backends or "gloo" in backends):
        return DISTRIBUTED
    if ("keras" in modules or "keras" in names) and "fit" in names:
        return KERAS
    return LOOP


def check_libraries(text: str, installed: Callable[[str], str] = metadata.version) -> None:
    """BadInput for a script that imports a library of an older version than those that are known to run."""
    for name, least in LEAST_VERSIONS.items():
        if not re.search(rf"^\s*(from|import)\s+{name}\b", text, re.MULTILINE):
            continue
        try:
            found = installed(name)
        except metadata.PackageNotFoundError:
            continue  # the script's own import says so
        if _numbers(found) < _numbers(least):
            raise BadInput(
                f"the script imports {name} {found}, and manyhands runs it from {least} on: pip install '{name}>={least}'"
            )


def _numbers(version: str) -> list[int]:
    """The first two numbers of a version."""
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def visible_gpus() -> int:
    """How many this process may use; torch is not loaded where there is no driver."""
    if not (glob("/dev/nvidia[0-9]*") or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class StepGroup:
    """Parameters that an optimizer has stepped, with its rate."""

    rate: float
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class Observed:
    """`Observed(...)(path)`: within, the script that this process runs is one of all workers."""

    strategy: str = "allreduce"
    batches: str | None = None
    """What each worker's loop sees: see `own_loop.batches.batches_of`."""
    own_batches: bool = False
    """Each worker draws batches of its own, which together are one."""
    read: str | None = None
    """What each worker reads of a batch: see `Session.run_whole`."""
    may_make_group: bool = False
    """Until it makes a group of processes: then it is no loop of one process."""
    timeout_s: float = 300.0

    @property
    def sees_whole(self) -> bool:
        """Whether the script computes with whole batches."""
        from manyhands.own_loop.launch import launched_batches
        from manyhands.strategies import strategy_of

        given = SLICES if self.own_batches else self.batches or launched_batches()
        return batches_of(given, strategy_of(self.strategy)) == WHOLE

    @contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        from manyhands.own_loop.prepare import session
        from manyhands.strategies import strategy_of

        own = session()
        if own.worker.size == 1:
            yield
            return
        own.unchanged = True
        way = self._whole if self.sees_whole else self._slices
        try:
            with way(own, strategy_of(self.strategy)):
                yield
        finally:
            own.unchanged = False

    @contextmanager
    def in_float64(self, stepped: Callable[[str, Sequence[StepGroup]], None]) -> Iterator[None]:
        """See `evidence.check.rehearsal.Watching`, which computes in float64 itself."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def after(optimizer: Any, *_: Any) -> None:
            groups = [StepGroup(float(group["lr"]), group["params"]) for group in optimizer.param_groups]
            stepped(type(optimizer).__name__, groups)

        hook = register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _whole(self, own: Session, strategy: Strategy) -> Iterator[None]:
        from manyhands.own_loop.observed.modules import pairs_for

        script = own.run_whole(self.read)
        if has_own_exchange(strategy):
            script.prepares = pairs_for(own, strategy)
        try:
            with self._watched(script):
                yield
        finally:
            own.end_whole()

    @contextmanager
    def _slices(self, own: Session, strategy: Strategy) -> Iterator[None]:
        from manyhands.own_loop.observed.sliced_script import SlicedScript

        script = SlicedScript(own, strategy, own_batches=self.own_batches)
        script.install()
        try:
            with self._watched(script):
                yield
                script.finish(all_=True)
        except Exception as error:
            if (refusal := script.explain(error)) is None:
                raise
            place = users_line(error)
            raise Unsupported(f"{place.in_words if place else ''}: {refusal}") from error
        finally:
            script.leave()

    @contextmanager
    def _watched(self, script: WholeScript | SlicedScript) -> Iterator[None]:
        from manyhands.own_loop.observed.processes import processes_refused

        until = _until_a_group(script, self.timeout_s) if self.may_make_group else nullcontext()
        with processes_refused(), until:
            yield


@contextmanager
def _until_a_group(script: WholeScript | SlicedScript, timeout_s: float) -> Iterator[None]:
    """Within, other ranks than the first print once the script makes a group of processes; from then on nothing is
    watched. A script that shares rows first is a loop, whose other ranks are quiet for good."""
    import torch.distributed as dist

    from manyhands.own_loop.observed.processes import allow_processes
    from manyhands.own_loop.rank_zero import mute_nonzero_ranks

    plain, output = dist.init_process_group, sys.stdout

    def made(*given: Any, **named: Any) -> None:
        script.leave()
        allow_processes()
        sys.stdout = output
        plain(*given, **named)

    def begins() -> None:
        sys.stdout = output
        mute_nonzero_ranks(script.worker, timeout_s)

    with open(os.devnull, "w") as nowhere:
        if script.worker.rank:
            sys.stdout = nowhere
        dist.init_process_group = dist.distributed_c10d.init_process_group = made
        script.begins = begins
        try:
            yield
        finally:
            dist.init_process_group = dist.distributed_c10d.init_process_group = plain
            if sys.stdout is nowhere:
                sys.stdout = output
