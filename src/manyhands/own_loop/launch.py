"""`launch` calls a function on every worker; `run_script` runs a script on every worker, as `manyhands run` does."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.engines import engine_of
from manyhands.engines.base import Engine, LaunchSpec, Observer, check_count
from manyhands.engines.cluster import Cluster, Member, Telling, run
from manyhands.engines.driver.restarts import Restarts
from manyhands.engines.driver.run_monitor import USER, line_of
from manyhands.engines.roles import Roles
from manyhands.engines.torch_settings import WithSettings
from manyhands.engines.torchrun import launchers
from manyhands.errors import BadInput, ManyhandsError, PeerLost, Preempted, Unsupported, WorkerFailed, users_line
from manyhands.signals import leave_sigterm_to_the_system, sigterm_came, sigterm_to

if TYPE_CHECKING:  # they import torch, and the workers' fork server can do that at the same time
    from manyhands.server.base import ServerSpec
    from manyhands.strategies.base import Strategy
    from manyhands.worker import Worker

T = TypeVar("T")
Around = Callable[[str], AbstractContextManager[None]]

VARIABLE, BATCHES = "MANYHANDS_STRATEGY", "MANYHANDS_BATCHES"
_SERVERLESS = "allreduce"

_chosen: Strategy | None = None


def launched_strategy() -> Strategy | str | None:
    """The strategy given to this process: `launch(strategy=…)`, else the variable MANYHANDS_STRATEGY, else None."""
    return _chosen or os.environ.get(VARIABLE) or None


def launched_batches() -> str | None:
    """What `launch(batches=…)` or `manyhands run --batches` says to this process, else the variable MANYHANDS_BATCHES, else
    None."""
    return os.environ.get(BATCHES) or None


def launch(
    function: Callable[..., T],
    *args: Any,
    workers: int | None = None,
    strategy: Strategy | str | None = None,
    batches: str | None = None,
    servers: int | None = None,
    server: ServerSpec | None = None,
    engine: Engine | str = "auto",
    threads_per_worker: int | None = None,
    timeout_s: float = 300.0,
) -> list[T]:
    """Call `function(*args)` on every worker, and return every rank's value in rank order.

    Where every worker makes this call itself (torchrun, a script under `manyhands run`), the list holds this rank's own
    value, and None for the others. Ranks other than the first are quiet: see `own_loop.rank_zero.mute_nonzero_ranks`.
    Inside, `mh.worker()` is the current Worker and `mh.prepare` uses `strategy` and `batches`. workers=None: one per visible GPU,
    else 1; one worker runs in this process. servers: shards of the parameter server. Given, there is one also where the
    strategy needs none, for code of your own: it is `mh.worker().server` (see `manyhands.server.base.Server`), and adds
    up what is pushed, or does what `server` says. The function, its arguments and what it returns travel by pickle, so
    lambdas and functions of a notebook will do. `timeout_s`: a worker that trains without progress for so long counts
    as hung; the function's own code outside the loop may take as long as it likes, unless another worker waits for it.
    On engine sim all workers take turns in this process: what is global in it is everybody's.

    Raises `BadInput` as a worker raised it, or `WorkerFailed` with the worker's traceback.
    """
    place = engine_of(engine)
    spec = _plan(place, workers, threads_per_worker, timeout_s)
    spec = _with_server(spec, place, strategy, servers, server)
    _check_batches(batches, strategy)
    if not place.capabilities.simulated:
        return place.launch(WithSettings.of_here(_Call(function, args, strategy, batches, timeout_s)), spec)
    from manyhands.own_loop.rank_zero import only_first_speaks

    # for all workers at once: they take turns in this process
    with _choose(strategy, batches), only_first_speaks(spec.workers):
        return place.launch(_Call(function, args, None, None, timeout_s), spec)


def run_script(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    workers: int | None = None,
    strategy: Strategy | str | None = None,
    batches: str | None = None,
    servers: int | None = None,
    engine: Engine | str = "auto",
    threads_per_worker: int | None = None,
    timeout_s: float = 300.0,
    roles: Roles | None = None,
    replaces_gloo: bool = False,
    tensorboard: str | None = None,
    max_restarts: int = 0,
    around: Around | None = None,
) -> int:
    """Run a script on every worker as `python path *args` would; its exit code (the first that is not 0, or 0).

    Ranks other than the first are quiet: see `own_loop.rank_zero.mute_nonzero_ranks`. servers: as of `launch`. With
    roles the processes are another framework's own cluster, as of `Engine.run`: those set how many there are, all of
    them print, and no strategy is set; replaces_gloo: where they ask torch.distributed for gloo, or for none by name,
    they get the backend manyhands. around: entered on each worker for the script's run, with its path. SIGTERM reaches
    the script on every worker, as it would reach `python path`; `train()` inside then checkpoints. max_restarts: so
    often the script is run again where a worker is lost or raises; the variable MANYHANDS_RESTART_COUNT says to it how
    often that was, and `train(survive="max_restarts=…")` inside then goes on from its newest checkpoint. Raises Preempted then, BadInput without a file, Unsupported on
    engine sim, WorkerFailed for exceptions.
    """
    if not Path(path).is_file():
        raise BadInput(_no_script(str(path)))
    place = engine_of(engine)
    _check_batches(batches, strategy)
    if place.capabilities.simulated:
        raise Unsupported(
            f"engine {place.name} runs all workers in this process, and a script needs one for itself: put the code "
            "into a function and call manyhands.launch(function, engine=...), or train a Task"
        )
    count = workers if roles is None else len(roles.members)
    observer = _Preemption()
    spec = replace(_plan(place, count, threads_per_worker, timeout_s), observer=observer)
    if around is not None and roles is None:  # it knows of no other worker, nor of their GPUs
        spec = replace(spec, device="own")
    if roles is None:
        spec = _with_server(spec, place, strategy, servers, None)
    program = (str(path), tuple(args), spec.workers > 1, around)  # arguments of `_as_main`
    if max_restarts and spec.workers == 1:
        raise Unsupported("max_restarts needs several workers: one worker runs the script in this very process")
    restarts = Restarts(max_restarts)
    try:
        with sigterm_to(observer.stop) if spec.workers > 1 else nullcontext():
            while True:
                try:
                    if roles is None:
                        place.launch(_Call(_as_main, program, strategy, batches, timeout_s), spec)
                    else:
                        run(
                            place,
                            Member(
                                _as_distributed_of if replaces_gloo else _as_main_of,
                                program,
                                roles,
                                tensorboard,
                            ),
                            spec,
                        )
                    break
                except WorkerFailed as error:
                    _run_again(error, restarts, observer)
    except SystemExit as end:  # one worker, in this process
        return end.code if isinstance(end.code, int) else 0
    except WorkerFailed as error:
        if error.error == "SystemExit":
            sys.stderr.write(f"manyhands: worker {error.rank} called sys.exit({error.exit_code}), which ends the run\n")
            return error.exit_code
        raise
    return 0


def _run_again(failed: WorkerFailed, restarts: Restarts, observer: Observer) -> None:
    """Prepare another launch of the script; raises the error where there is none."""
    place = (failed.error, line_of(failed.detail)) if failed.error else None
    if (
        not restarts.most
        or failed.error == "SystemExit"
        or observer.stopping()
        or restarts.refusal(len(restarts.made), place)
    ):
        raise failed
    number = len(restarts.made)
    os.environ[launchers.RESTARTS] = str(number)
    why = str(failed).partition("\n")[0]
    sys.stderr.write(f"manyhands: {why}: the script is run again (restart {number} of {restarts.most})\n")


def _no_script(path: str) -> str:
    """The error of a path that is no file, with what may have been meant."""
    file, colon, _ = path.partition(":")
    if colon and Path(file).is_file():
        hint = f"a task in a file is for `manyhands train {path}`"
    elif Path(f"{path}.py").is_file():
        hint = f"did you mean {path}.py?"
    else:
        hint = "give the path of a Python file"
    return f"there is no script {path!r} (the current folder is {Path.cwd()}): {hint}"


class _Preemption(Telling):
    """Passes SIGTERM on to the workers."""

    reason = ""

    def stop(self, reason: str) -> None:
        self.reason = reason

    def stopping(self) -> str:
        return self.reason


def _plan(engine: Engine, workers: int | None, threads_per_worker: int | None, timeout_s: float) -> LaunchSpec:
    count = engine.default_workers() if workers is None else workers
    check_count("workers", count)
    return LaunchSpec(workers=count, threads_per_worker=threads_per_worker, timeout_s=timeout_s)


def _with_server(
    spec: LaunchSpec, engine: Engine, strategy: Strategy | str | None, servers: int | None, server: ServerSpec | None
) -> LaunchSpec:
    """With the server that the strategy needs, or that was asked for. BadInput or Unsupported for a strategy that cannot
    run there, before anything starts."""
    if servers is not None:
        check_count("servers", servers)
    if strategy is None and not engine.capabilities.spmd:  # else the workers are there already
        strategy = launched_strategy()
    if strategy is not None and strategy != _SERVERLESS:  # which needs no look, and torch is not loaded yet
        from manyhands.own_loop.argument_checks import check_launch
        from manyhands.strategies import strategy_of

        named = strategy_of(strategy)
        check_launch(named, engine, spec.workers, servers or 1)
        if (needed := named.server()) is not None:
            if server is not None:
                raise BadInput(
                    f"strategy {named.name} has a server of its own (rule {needed.rule}), and server={server} is another one: leave one of them out"
                )
            return replace(spec, server=needed, servers=servers or 1)
    if server is None and servers is not None:
        from manyhands.server.base import ServerSpec

        server = ServerSpec(rule="add")
    if server is None:
        return spec
    if not engine.capabilities.serves:
        raise Unsupported(f"engine {engine.name} starts no parameter server: use engine local or hosts")
    return replace(spec, server=server, servers=servers or 1)


def _check_batches(batches: str | None, strategy: Strategy | str | None) -> None:
    """BadInput or Unsupported, before anything starts, for batches that workers of this strategy cannot see."""
    if batches is None:
        return
    from manyhands.own_loop.batches import batches_of
    from manyhands.strategies import strategy_of

    batches_of(batches, strategy_of(strategy or launched_strategy() or _SERVERLESS))


@dataclass(frozen=True)
class _Call:
    """The program of a worker."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    strategy: Strategy | str | None
    batches: str | None
    timeout_s: float

    def __call__(self, worker: Worker) -> Any:
        from manyhands.own_loop.first_step_checks import warning_if_unprepared
        from manyhands.own_loop.rank_zero import mute_nonzero_ranks

        worker.driver.progress(USER, 0)
        if worker.shares_process:
            return self.function(*self.args)
        mute_nonzero_ranks(worker, self.timeout_s)
        whole_before = worker.prepared is not None and worker.prepared.whole is not None
        with _choose(self.strategy, self.batches), warning_if_unprepared(worker):
            try:
                return self.function(*self.args)
            finally:
                if worker.prepared is not None and not whole_before:
                    worker.prepared.end_whole()


def _as_main_of(cluster: Cluster, *program: Any) -> None:
    _as_main(*program)


def _as_distributed_of(cluster: Cluster, *program: Any) -> None:
    import manyhands_backend

    os.environ[manyhands_backend.VARIABLE] = "replace"  # for processes that the program starts
    manyhands_backend.register()
    manyhands_backend.replace_gloo()
    _as_main(*program)


def _as_main(path: str, args: Sequence[str], own_process: bool, around: Around | None) -> None:
    """The script, as `python path *args` runs it; own_process: which ends with it."""
    if own_process:
        signal.signal(signal.SIGTERM, _terminated)
        if sigterm_came():
            raise Preempted("asked to end (SIGTERM) before the script began: nothing of it ran")
    else:
        leave_sigterm_to_the_system()
    try:
        with nullcontext() if around is None else around(path):
            run_as_main(path, args)
    except SystemExit as end:
        _end_as_python_does(own_process)
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):  # a text goes to standard error, as the interpreter has it
            sys.stderr.write(f"{code}\n")
            code = 1
        raise SystemExit(code) from None
    _end_as_python_does(own_process)


def run_as_main(path: str, args: Sequence[str]) -> None:
    """The script's code as `__main__`; manyhands' own errors begin with the script's line."""
    with _command_line(path, args):
        try:
            runpy.run_path(path, run_name="__main__")
        except ManyhandsError as error:
            if (place := users_line(error)) and not isinstance(error, PeerLost | WorkerFailed):
                error.args = (f"{place.in_words}: {error}",)
            raise


def _end_as_python_does(own_process: bool) -> None:
    """In a process that ends with the script: wait for the threads that it left, then run what it left for the exit.

    Not after an error: the user should read that at once, also where a thread never ends.
    """
    if own_process:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _terminated(number: int, frame: object) -> None:
    """SIGTERM in a script that does not handle it itself."""
    raise SystemExit(128 + number)


@contextmanager
def _choose(strategy: Strategy | str | None, batches: str | None) -> Iterator[None]:
    """Within, `launched_strategy` and `launched_batches` say these; None leaves what was there."""
    global _chosen
    before, variables = _chosen, {name: os.environ.get(name) for name in (VARIABLE, BATCHES)}
    if isinstance(strategy, str):
        _chosen, os.environ[VARIABLE] = None, strategy
    elif strategy is not None:
        _chosen = strategy
    if batches is not None:
        os.environ[BATCHES] = batches
    try:
        yield
    finally:
        _chosen = before
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _command_line(path: str, args: Sequence[str]) -> Iterator[None]:
    """Within, sys.argv and sys.path are what `python path *args` has."""
    argv, before = list(sys.argv), list(sys.path)
    sys.argv[:] = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, before
