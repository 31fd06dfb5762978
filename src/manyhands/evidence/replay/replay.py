"""`replay`: repeat an asynchronous run in one process, bit for bit."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands import strategies, tasks, units
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.model_file import FINAL
from manyhands.checkpoint.paths import AnyPath, open_regular, path_of
from manyhands.engines.own_rules import is_own, list_rule
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.timeline import Deadlock, SimProgram, Timeline
from manyhands.engines.single_process import running_threads
from manyhands.errors import BadInput, Unsupported
from manyhands.evidence.replay.server import ReplayClient, ReplayGroup, ReplayJournal, ReplayServer, Stores
from manyhands.recording import event_log
from manyhands.recording.run import environment
from manyhands.server.shard_ranges import make_stores
from manyhands.spec import parse
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.config import every, keep_of, task_from
from manyhands.training.plan import Outcome, WorkerPlan
from manyhands.training.run_directory import CONFIG_FILE, RESULT, read_result
from manyhands.training.worker_main import work
from manyhands.units import printable
from manyhands.worker import Worker

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay, compared with the run's."""

    parameters: dict[str, Tensor]
    """By name."""
    difference: float
    """The largest difference of any parameter from the run's."""
    identical: bool
    """Whether all parameters have the same bits."""
    ticks: int
    """Of all workers."""
    workers: int
    otherwise: str
    """Changes of versions, number of cores and host since the run; "" without any."""

    def __repr__(self) -> str:
        bits = "the same bits" if self.identical else f"parameters differ by up to {self.difference:.3g}"
        return f"<Replayed {units.count(self.ticks, 'step')} of {units.count(self.workers, 'worker')}: {bits}>"


def replay(
    directory: str | AnyPath,
    *,
    task: Task | str | None = None,
    strategy: Strategy | str | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Repeat the finished run in `directory` in this process, in the order of its journal (its `step` events).

    All workers take turns. Pulls and pushes happen at the recorded versions, and slices go to the
    same workers, so that the result has the same bits with the same number of threads and the same version of torch.
    Takes the memory of all workers together.

    task, strategy: the run's, as objects or specs. The directory names built-in tasks and strategies. A file that it
    names (my.py:task) is never imported, so the caller names it. progress: called with (ticks done, all ticks).

    Raises BadInput for a directory without a finished run, or whose code must be named; Unsupported for strategies
    without a recorded order: synchronous ones repeat by their seed alone, and hogwild has none.
    """
    folder = path_of(directory)
    settings, result = _read(folder, CONFIG_FILE), _read(folder, RESULT)
    read_result(folder, (CONFIG_FILE, FINAL))
    named = _built_in(settings, folder, "strategy", strategies.CATALOGUE) if strategy is None else strategy
    rule = strategy_of(named)
    spec = rule.server()
    posts = rule.needs.mailbox and rule.leasing() is not None
    if spec is None and rule.leasing() is not None and not posts:
        raise Unsupported(
            f"strategy {rule.name} has no order to record (workers write the same memory at once): it cannot be replayed"
        )
    if spec is None and not posts:
        raise Unsupported(
            f"strategy {rule.name} is synchronous: train again with the same seed, which gives the same bits; only "
            "asynchronous runs need a replay"
        )
    if spec is not None and strategy is None and is_own(spec.rule):
        raise BadInput(
            f"the run's server has the rule {spec.rule}, which is code: name it, if you trust it, by strategy={named!r} (--strategy)"
        )
    if spec is not None:
        list_rule(spec)
    workers, info = settings["workers"], result["info"]
    if sum(event.type == "start" for event in event_log.read(folder / event_log.FILE)) > 1:
        raise Unsupported(f"the run in {folder} was resumed, and only a run of one launch can be replayed")
    read_result(folder, (event_log.FILE,))
    steps = event_log.steps_that_count(event_log.files_in(folder))
    journal = ReplayJournal(workers, (event for event, _ in steps), info["stopped"])
    if "stages" in info:
        raise Unsupported(
            f"the run in {folder} was trained with stages, and a replay computes whole replicas: repeat it by training again"
        )
    if info["device"] != "cpu":
        raise Unsupported(
            f"the run in {folder} computed on {info['device']}, and a replay computes on the CPU, whose bits differ"
        )
    if info["stopped"] and info["ticks_per_epoch"] is None:
        raise Unsupported(
            f"the run in {folder} read a stream and was stopped ({info['stopped']}): the workers' positions are not recorded"
        )
    plan = WorkerPlan(
        task=task_from(
            _built_in(settings, folder, "task", tasks.CATALOGUE) if task is None else task, settings["fields"]
        ),
        strategy=rule,
        validate_every=every("validate_every", settings["validate_every"]),
        checkpoint_every=every("checkpoint_every", settings["checkpoint_every"]),
        nonfinite=settings["nonfinite"],
        partition=settings.get("partition", "none"),
    )
    plan = replace(plan, keep=keep_of(settings["keep"], plan.task))
    sharded = [] if spec is None else make_stores(spec, workers=workers, shards=settings["servers"])
    stores = Stores(spec, sharded, journal, Timeline(), ordered=rule.leasing() is not None)
    parameters = _run(plan, stores, workers, info["threads"], progress).states[0][0]
    saved = checkpoints.load_tensors(folder / FINAL)
    wanted = {name: saved[name] for name in parameters}
    was, now = ({**facts["versions"], "host": facts["host"]} for facts in (info, environment()))
    changed = [name for name in now if name in was and was[name] != now[name]]  # numba is there for kernels alone
    return Replayed(
        parameters=parameters,
        difference=max(float((parameters[name] - wanted[name]).abs().max()) for name in parameters),
        identical=all(torch.equal(parameters[name], wanted[name]) for name in parameters),
        ticks=journal.ticks,
        workers=workers,
        otherwise=", ".join(f"{name} was {was[name]} and is {now[name]}" for name in changed),
    )


def _run(plan: WorkerPlan, stores: Stores, workers: int, threads: int, progress: Progress | None) -> Outcome:
    """Run all workers' programs, one at a time; rank 0's outcome."""
    timeline, network = stores.timeline, NetworkState(SimNetworkSpec(), workers, shards=0)
    rendezvous = SimRendezvous(timeline, Costs(network, workers), network, workers, timeout_s=math.inf)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, stores.journal.ticks)

    def program(rank: int) -> Outcome | None:
        worker = Worker(
            rank=rank,
            size=workers,
            group=ReplayGroup(rendezvous, stores, rank),
            server=None if stores.spec is None else ReplayServer(stores, rank),
            driver=ReplayClient(stores.journal, rank, count),
            threads=threads,
            shares_process=True,
        )
        return work(plan, worker)

    def raise_error(program: SimProgram) -> None:
        if program.error is not None:
            raise program.error

    with running_threads(threads):
        programs = [timeline.start(rank, partial(program, rank)) for rank in range(workers)]
        timeline.on_end = raise_error
        try:
            timeline.run()
        except Deadlock as error:
            raise Deadlock(
                f"this program does not repeat the recorded run: {error}. Replay with the code, data and task of that "
                "run"
            ) from error
    outcome: Outcome = programs[0].value
    return outcome


def _read(folder: AnyPath, name: str) -> dict[str, Any]:
    try:
        with open_regular(folder / name) as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        raise BadInput(
            f"{folder} holds no finished run that can be replayed ({name}: {problem}): give the directory of a run that "
            "has ended"
        ) from None


def _built_in(settings: dict[str, Any], folder: AnyPath, what: str, catalogue: Mapping[str, str]) -> str:
    """The built-in task or strategy that the run's directory names. Raises BadInput for a file, which is not imported."""
    given = settings[what]
    if given is None:
        raise BadInput(
            f"the run in {folder} was given its {what} as an object, which no file can hold: call mh.replay(directory, "
            f"{what}=…) with the same"
        )
    if parse(str(given))[0] not in catalogue:
        raise BadInput(
            f"the run in {folder} names {what} {printable(given)}, and code that a run directory names is not imported. If "
            f"you trust that file, give it: manyhands replay {shlex.quote(str(folder))} --{what} "
            f"{shlex.quote(printable(given))}, or mh.replay(directory, {what}=…)"
        )
    return str(given)
