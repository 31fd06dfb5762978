"""Runs scripts that know of no workers, on several workers and alone: many scripts in one set of processes."""

import contextlib
import gc
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manyhands.errors import PeerLost
from manyhands.own_loop.launch import launch, run_as_main
from manyhands.own_loop.observed.script import Observed
from manyhands.worker import current

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Program:
    """A script in `scripts/`, its arguments, and how it is observed."""

    name: str
    args: tuple[str, ...] = ()
    strategy: str = "allreduce"
    batches: str | None = None
    own_batches: bool = False
    read: str | None = None

    @property
    def path(self) -> str:
        return str(SCRIPTS / f"{self.name}.py")


@dataclass
class Ran:
    """What a run of a script left behind, on worker 0."""

    output: str = ""
    said: str = ""  # on standard error
    error: str = ""  # the type and the text of what it raised; "" if nothing
    dump: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.dump["parameters"]
        return found


def run_one(program: Program, folder: Path, observed: bool) -> Ran:
    """The script in a folder of its own; its modules and its changes to torch's defaults are gone afterwards."""
    ran, dump = Ran(), folder / "dump.pt"
    folder.mkdir(parents=True, exist_ok=True)
    before, default = set(sys.modules), torch.get_default_dtype()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            how = program.strategy, program.batches, program.own_batches, program.read
            around = Observed(*how) if observed else None
            with around(program.path) if around else contextlib.nullcontext():
                run_as_main(program.path, [*program.args, "--dump", str(dump)])
        except PeerLost:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the tests look at it
            ran.error = f"{type(error).__name__}: {error}"
    torch.set_default_dtype(default)
    for name in set(sys.modules) - before:
        if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    ran.output, ran.said = out.getvalue(), err.getvalue()
    if dump.is_file():
        ran.dump = torch.load(dump, weights_only=False)
    return ran


def _on_worker(programs: Sequence[Program], root: Path) -> list[Ran]:
    worker = current()
    assert worker is not None
    found = []
    for number, program in enumerate(programs):
        torch.manual_seed(1000 + number * worker.size + worker.rank)  # a script that sets no seed draws its own
        worker.prepared = None
        gc.collect()  # models of the script before are none of this one's
        folder = root / str(number) / (f"rank-{worker.rank}" if worker.rank else "first")
        found.append(run_one(program, folder, observed=True))
    return found if worker.rank == 0 else []


def on_workers(size: int, programs: Sequence[Program], root: Path, served: str | None = None) -> list[Ran]:
    """Worker 0's runs of these scripts, one after the other. served: a strategy whose server is started with the workers."""
    how: dict[str, Any] = {"strategy": served, "engine": "local", "threads_per_worker": 1}
    found: list[list[Ran]] = launch(_on_worker, programs, root, workers=size, **how)
    return found[0]


def alone(programs: Sequence[Program], root: Path) -> list[Ran]:
    """One process's runs of these scripts."""
    found = []
    for number, program in enumerate(programs):
        torch.manual_seed(1000 + number)
        found.append(run_one(program, root / str(number), observed=False))
    return found
