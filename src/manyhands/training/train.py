"""train(): a task × a strategy × an engine → a Run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from manyhands import engines, rng
from manyhands.callbacks.base import Callback
from manyhands.callbacks.progress import Progress
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.paths import AnyPath, path_of
from manyhands.comm.group import Group
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.open_source import Once, is_function
from manyhands.engines.base import Engine, LaunchSpec
from manyhands.engines.cores import shared
from manyhands.engines.driver import supervisor
from manyhands.engines.driver.restarts import Restarts
from manyhands.engines.driver.run_monitor import line_of
from manyhands.engines.survive import Survive
from manyhands.engines.torch_settings import WithSettings
from manyhands.errors import BadInput, CallbackFailed, ManyhandsError, Preempted, WorkerFailed
from manyhands.events import Event
from manyhands.own_loop.rank_zero import mute_nonzero_ranks
from manyhands.parallel.spec import ModelParallel
from manyhands.recording.recorder import Recorder
from manyhands.recording.run import Run
from manyhands.signals import PREEMPTED, sigterm_to
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task, named
from manyhands.training import run_directory
from manyhands.training.config import (
    TrainConfig,
    check_resources,
    checks_of,
    default_strategy,
    every,
    keep_of,
    task_from,
)
from manyhands.training.plan import Outcome, WorkerPlan
from manyhands.training.plans import is_planned, with_plan
from manyhands.training.run_directory import CHECKPOINTS, Opened, answer_of, finished_run, open_directory
from manyhands.training.worker_main import work, work_as_dict
from manyhands.worker import Worker

LOG = logging.getLogger("manyhands")


def train(
    task: Task | str | None = None,
    *,
    strategy: Strategy | str | None = None,
    engine: Engine | str = "auto",
    workers: int | None = None,
    servers: int = 1,
    device: str = "auto",
    threads_per_worker: int | None = None,
    run_dir: str | AnyPath | None = None,
    resume: bool = False,
    callbacks: Callback | Iterable[Callback] = (),
    validate_every: str | int = "epoch",
    checkpoint_every: str | int = "epoch",
    check_replicas_every: int | None = None,
    keep: str = "last",
    nonfinite: str = "raise",
    partition: str = "none",
    model_parallel: str | ModelParallel | None = None,
    memory_per_worker: str | None = None,
    max_seconds: float | None = None,
    timeout_s: float = 300.0,
    survive: str | Survive | None = None,
    **task_fields: Any,
) -> Run:
    """Train a task on workers and return what came of it.

    task: a Task, a spec string ("digits:epochs=5", "my.py:task"), or None when `task_fields` are a whole task.
    strategy: an object or its spec string. None is "allreduce"; for a kernel, which has no gradients to average, "solo" on
        one worker, "hogwild" on several of one machine, and "local-sgd" on several machines.
    engine: an object or its spec string. "auto" is the launcher that started this process (torchrun,
        `manyhands run`), else `local`.
    workers: None is one per visible GPU, else 1. One worker runs in the calling process.
    threads_per_worker: None is usable cores / workers; one worker, in the calling process, keeps that process's own
        number.
    servers: shards of the parameter server, for strategies that have one.
    run_dir: events, checkpoints and result go there; None writes nothing. An existing one needs `resume=True`. A path,
        or the URL of a file system that fsspec knows ("hdfs://…", "s3://…"), with the credentials of each host's
        environment.
    callbacks: one Callback, or several; they run on the driver (see `Callback`).
    resume: go on from the newest checkpoint. Starts on an empty directory; returns a finished run as it is, unless
        more epochs or steps are asked for than it had.
    validate_every, checkpoint_every: "epoch", or a number of steps.
    check_replicas_every: compare the replicas every so many steps too, and not only before each checkpoint, where the
        strategy keeps them equal; a run whose replicas have drifted apart ends with an error that names the worker.
    keep: "last", or "best:METRIC" (see `training.best_model.BestModelPolicy`).
    nonfinite: "raise", or "skip" steps whose gradient is not finite (their rows count as unused).
    partition: "none": each global batch is dealt anew to all workers. "fixed": each worker keeps its part of the rows,
        a block of neighbours, and draws its order there; at their own pace too, where nobody then takes another's rows.
    model_parallel: how one replica spans several workers: "stages=2", a ModelParallel, "auto" (the fastest plan that
        fits, see `plan`), or the file of a plan. Without it each worker holds the whole model.
    memory_per_worker: "2GB": what a plan that auto makes may take.
    max_seconds: stop all workers at the same step after so long.
    timeout_s: a worker without any progress for so long ends the run, or counts as lost where it survives that.
    survive: which losses of workers the run survives: "max_losses=3", or a Survive. Without it a lost worker ends it.
    task_fields: any field of Task, overriding the task's.

    Raises BadInput (and its kinds) for what cannot be, before any process starts where that can be known, and leaves no
    new run directory then; WorkerFailed when a worker raises, dies or hangs (with one worker, `__cause__` is the
    exception that the task raised); Preempted after SIGTERM; CallbackFailed, which holds the Run, where a callback
    raises in `on_end`.
    """
    chosen = _chosen(callbacks)
    own, place = task_from(task, task_fields), engines.engine_of(engine)
    config = TrainConfig(
        task=own,
        strategy=strategy_of(default_strategy(own, place, workers) if strategy is None else strategy),
        engine=place,
        workers=workers,
        directory=None if run_dir is None else path_of(run_dir),
        survive=Survive.of(survive),
        partition=partition,
        model_parallel=None if is_planned(model_parallel) else ModelParallel.of(model_parallel),
    )
    if config.strategy.server() is None and servers != 1:
        LOG.warning("servers=%s has no effect: strategy %s has no parameter server", servers, config.strategy.name)
    config.check(servers=servers, nonfinite=nonfinite, max_seconds=max_seconds, timeout_s=timeout_s, resume=resume)
    check_resources(device, threads_per_worker, config.engine)
    config, predicted = with_plan(config, model_parallel, memory_per_worker, threads_per_worker)
    for callback in chosen:
        callback.check(config.task)
    plan = WorkerPlan(
        task=config.task,
        strategy=config.strategy,
        validate_every=every("validate_every", validate_every),
        checkpoint_every=every("checkpoint_every", checkpoint_every),
        check_replicas_every=checks_of(check_replicas_every, config.strategy),
        keep=keep_of(keep, config.task),
        nonfinite=nonfinite,
        partition=partition,
        model_parallel=config.model_parallel,
        predicted=predicted,
        max_seconds=max_seconds,
        checkpoints=config.directory / CHECKPOINTS if config.directory else None,
    )
    launch = LaunchSpec(
        workers=config.count,
        server=config.server,
        servers=servers,
        threads_per_worker=threads_per_worker,
        device=device,
        timeout_s=timeout_s,
        frames=_frames(config.task),
        survive=None if config.survive is None or config.survive.restarts_only else config.survive,
        replica=config.count // config.replicas,
        restarts=config.survive is not None and config.survive.max_restarts > 0 and not config.spmd,
        rejoins=False,
        stages=1 if config.model_parallel is None else config.model_parallel.stages,
    )
    config.engine.check(launch)
    resume = resume or config.started_again
    with open_directory(config, resume) as opened:
        if opened.finished is not None and not config.spmd:
            LOG.warning("the run in %s is finished: its result is returned, and nothing is trained", config.directory)
            return finished_run(config, opened.finished)
        if config.directory is not None and opened.claim is not None:
            settings = {
                "task": task if isinstance(task, str) else None,
                "strategy": strategy if isinstance(strategy, str) else spec_of(config.strategy),
                "engine": config.engine.name,
                "workers": config.count,
                "servers": servers,
                "validate_every": validate_every,
                "checkpoint_every": checkpoint_every,
                "keep": keep,
                "nonfinite": nonfinite,
                "partition": partition,
            }
            chosen = (_Noting(partial(run_directory.note, config.directory, settings, task_fields)), *chosen)
        plan = replace(plan, claim=opened.claim, every_rank_returns=config.spmd, finished=opened.finished is not None)
        return _Training(config, plan, chosen, launch, resume, opened).run()


def _frames(task: Task) -> tuple[DistributedFrame, ...]:
    """The DataFrames among the task's data, each once."""
    given = (task.train_data, task.validation_data, task.test_data)
    return tuple(dict.fromkeys(data for data in given if isinstance(data, DistributedFrame)))


def _chosen(callbacks: Callback | Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks, with a progress line where a notebook's cell would otherwise stay empty; BadInput for others."""
    given: Any = (callbacks,) if isinstance(callbacks, Callback) else callbacks
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise BadInput(f"callbacks must be a list of manyhands.Callback objects, not {named(callbacks)}")
    given = tuple(given)
    for one in given:
        if not isinstance(one, Callback):
            form = f": make one, {one.__name__}(...)" if isinstance(one, type) and issubclass(one, Callback) else ""
            raise BadInput(
                f"callbacks must be objects of manyhands.Callback or a class derived from it, not {named(one)}{form}"
            )
    shell = sys.modules.get("IPython")
    in_notebook = shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None
    return (*given, Progress()) if in_notebook and not any(isinstance(c, Progress) for c in given) else given


class _Noting(Callback):
    """Writes a run's arguments into its directory once its workers have begun: a resumption that they refuse changes
    nothing there."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    @override
    def on_start(self, event: Event) -> None:
        self._note()


class _Training:
    """One launch: recorder, workers, and the Run made of what they bring back."""

    def __init__(
        self,
        config: TrainConfig,
        plan: WorkerPlan,
        callbacks: tuple[Callback, ...],
        launch: LaunchSpec,
        resume: bool,
        opened: Opened,
    ) -> None:
        self.config, self.launch, self.refusal = config, launch, opened.refusal
        self.lock = opened.lock
        self.restarts = Restarts(0 if config.survive is None else config.survive.max_restarts)
        self.signals = ExitStack()
        self.recorder = Recorder(
            workers=launch.workers,
            directory=config.directory,
            checkpoints=plan.checkpoints,
            callbacks=callbacks,
            simulated=config.engine.capabilities.simulated,
            rank=config.engine.own_rank() if config.spmd else None,
            restarts=launch.restarts,
        )
        self.recorder.claim = opened.claim
        for message in opened.warnings:
            self.recorder.warn(message)
        if config.engine.capabilities.simulated:
            plan = replace(plan, task=_read_once(plan.task))
        self.plan = replace(plan, resume_from=self._newest(plan.checkpoints) if resume else None)
        if config.owns_run_dir and (launch.restarts or config.started_again):
            self._after_another_process()

    def _newest(self, folder: AnyPath | None) -> checkpoints.Checkpoint | None:
        assert folder is not None
        found = checkpoints.newest(folder, self.recorder.warn if self.config.owns_run_dir else lambda message: None)
        if self.config.owns_run_dir:
            start = (
                "no checkpoint yet, so it starts with step 0" if found is None else f"goes on from step {found.tick:,}"
            )
            LOG.warning("resume: the run in %s %s", self.config.directory, "has " * (found is None) + start)
        if found is not None:
            self._go_on_from(found)
        return found

    def _after_another_process(self) -> None:
        """Where a supervisor, torchrun or `manyhands run` has started the run again: that counts, and may be once too
        often."""
        assert self.config.directory is not None
        link = supervisor.link()
        why, self.restarts.made[:] = link.take_restarts()
        if not why and not self.config.started_again:
            return
        self.recorder.take_over(self.config.directory)
        if self.config.started_again:
            why = "the workers were started again"
            self.restarts.made[:] = [one["step"] for one in self.recorder.restarts]
        step = 0 if self.plan.resume_from is None else self.plan.resume_from.tick
        if refusal := self.restarts.refusal(step):
            raise ManyhandsError(f"{refusal}. {why}")
        link.report(made=self.restarts.made)
        self.recorder.restarted(
            {"message": f"{why}: {self.restarts.text()}", "worker_id": None, "cause": "driver"}, step
        )
        if self.launch.survive is not None:
            self.launch = replace(self.launch, survive=replace(self.launch.survive, max_restarts=self.restarts.left))

    def _go_on_from(self, found: checkpoints.Checkpoint) -> None:
        """What the recorder and the launch take over of a checkpoint."""
        positions = [found.values(rank)["position"] for rank in range(found.ranks)]
        position, rows = positions[0], sum(one["rows"] for one in positions)
        left = (position["epoch"], position["left"]) if position.get("left") else None
        states = [(name, state) for name, state in found.values(0).get("callbacks", [])]
        self.recorder.preload(found.tick, left, rows, states)
        same = found.ranks == self.launch.workers and not self.config.engine.capabilities.spmd
        if same and self.launch.threads_per_worker is None:
            self.launch = replace(self.launch, threads_per_worker=position["threads"])

    def run(self) -> Run:
        start = time.monotonic()
        with self._where_it_goes_on(), self.recorder, self.signals:
            outcome = self._launched()
            if outcome is None:
                return finished_run(self.config)
            run = self._run_of(outcome, time.monotonic() - start)
            if self.config.task.worker_callback is not None:
                self.config.task.worker_callback.on_result(outcome.callback_result)
            self.recorder.complete(run)
            preempted = outcome.reason == PREEMPTED
            if self.config.directory is not None and self.config.owns_run_dir and not preempted:
                if self.plan.claim is not None:
                    self.plan.claim.check()
                self.recorder.flush()
                run_directory.write(self.config.directory, run, outcome)
            problem = self._ended(run)
        if preempted:
            kept = "give a run_dir to be able to resume"
            if self.config.directory:
                kept = f"resume it with resume=True (--resume) from {self.config.directory}"
            raise Preempted(
                f"stopped at step {run.steps} because the run was asked to end (SIGTERM): {kept}"
            ) from problem
        if problem is not None:
            where = f"in {self.config.directory} and " if self.config.directory else ""
            raise CallbackFailed(
                f"a callback raised {type(problem).__name__} in on_end: {problem}. The run itself is complete: its model and result are {where}in "
                "`run` of this error",
                run,
            ) from problem
        return run

    @contextmanager
    def _where_it_goes_on(self) -> Iterator[None]:
        """Ctrl-C says what is left of the run."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if self.config.directory is not None and self.config.owns_run_dir:
                found = checkpoints.newest(self.config.directory / CHECKPOINTS, lambda message: None)
                interrupt.add_note(
                    f"there is no checkpoint in {self.config.directory}"
                    if found is None
                    else f"the newest checkpoint is of step {found.tick:,}: go on with resume=True (--resume --run-dir {self.config.directory})"
                )
            raise

    def _ended(self, run: Run) -> Exception | None:
        """Tell the callbacks; what one of them raised."""
        try:
            self.recorder.end(run)
        except Exception as problem:  # noqa: BLE001 - a callback may raise anything; the caller raises it
            LOG.warning("a callback raised in on_end: %s: %s", type(problem).__name__, problem)
            return problem
        return None

    def _launched(self) -> Outcome | None:
        with rng.kept(), ExitStack() as stack:
            if self.launch.restarts:
                stack.callback(self.config.engine.finish_run)
            if self.config.spmd:
                launch = replace(self.launch, observer=self.recorder)
                together = self.config.engine.launch(self._together, launch)
                return next((one for one in together if one is not None), None)
            self._obey_sigterm()
            first, *_ = self._until_it_is_through()
        return None if first is None else Outcome(**first)

    def _until_it_is_through(self) -> list[dict[str, Any] | None]:
        """One launch after the other, each from the newest checkpoint, while the run may start again."""
        began, asked_s = time.monotonic(), self.plan.max_seconds
        while True:
            launch = replace(self.launch, observer=self.recorder, fired=self.recorder.faults)
            try:
                return self.config.engine.launch(WithSettings.of_here(partial(work_as_dict, self.plan)), launch)
            except WorkerFailed as error:
                if not launch.restarts or error.final or self.recorder.asked_to_stop:
                    raise
                self._start_again(error)
            if asked_s is not None and not self.config.engine.capabilities.simulated:
                left_s = asked_s - (time.monotonic() - began)
                self.plan = replace(self.plan, max_seconds=max(0.001, left_s))

    def _start_again(self, failed: WorkerFailed) -> None:
        """Prepare the next launch; raises the error where there is none."""
        assert self.plan.checkpoints is not None
        assert self.plan.claim is not None
        assert self.lock is not None
        found = checkpoints.newest(self.plan.checkpoints, self.recorder.warn)
        step = 0 if found is None else found.tick
        if refusal := self.restarts.refusal(step, (failed.error, line_of(failed.detail)) if failed.error else None):
            message, *rest = failed.args
            failed.args = (f"{refusal}. {message}", *rest)
            raise failed
        values = {
            "message": f"{str(failed).partition(chr(10))[0]}: {self.restarts.text()}",
            "worker_id": failed.rank if failed.rank >= 0 else None,
            "host": failed.host,
            "cause": failed.cause,
        }
        supervisor.link().report(made=self.restarts.made)
        survive, generation = self.launch.survive, 0
        if survive is not None:
            survive, generation = replace(survive, max_restarts=self.restarts.left), self.recorder.generation + 1
        self.launch = replace(self.launch, survive=survive, generation=generation)
        self.recorder.start_again(values, step, generation)
        claim = self.lock.claim(self.plan.claim.number + 1)  # what the launch before still writes is refused
        self.recorder.claim = claim
        if found is not None:
            self._go_on_from(found)
        self.plan = replace(self.plan, claim=claim, resume_from=found)

    def _obey_sigterm(self) -> None:
        """Until the run is over."""
        self.signals.enter_context(sigterm_to(self.recorder.stop))

    def _together(self, worker: Worker) -> Outcome | None:
        """The program where every worker makes this very call, once they have met.

        Until then SIGTERM ends this process: torchrun sends it where a peer has failed, and nothing else would end the
        wait.
        """
        self._obey_sigterm()
        start = self.plan.resume_from
        claim = _agree(
            worker.group, self.refusal, self.config.directory, None if start is None else start.tick, self.plan.claim
        )
        self.recorder.claim = claim
        mute_nonzero_ranks(worker, self.launch.timeout_s)
        outcome = work(replace(self.plan, claim=claim), worker)
        self.recorder.flush()
        worker.group.barrier()  # the first to raise Preempted ends its peers: what they reported is on the disk by then
        return outcome

    def _run_of(self, outcome: Outcome, seconds: float) -> Run:
        workers = outcome.workers
        rows = [one["rows"] for one in workers]
        return Run(
            answer=answer_of(self.config.task, outcome, self.config.directory),
            metrics=outcome.metrics,
            history=self.recorder.history,
            rows={"total": sum(rows), "workers": rows, "unused": sum(one["unused"] for one in workers)},
            timing=self.recorder.timing(),
            memory_of_workers=[one["memory"] for one in workers if "memory" in one],
            input=self._input(outcome),
            last_loss=next(
                (row["loss"] for row in reversed(self.recorder.history) if row.get("loss") is not None), None
            ),
            ledger=_summed([one["ledger"] for one in workers]),
            seconds=outcome.seconds if self.config.engine.capabilities.simulated else seconds,
            steps=outcome.steps,
            rounds=outcome.rounds,
            directory=self.config.directory,
            info=self._info(outcome) | ({"computed_s": seconds} if self.config.engine.capabilities.simulated else {}),
        )

    def _input(self, outcome: Outcome) -> dict[str, float]:
        """What reading cost all workers of this launch."""
        workers = [one["input"] for one in outcome.workers if "input" in one]
        if not workers:
            return {}
        found: dict[str, float] = {name: sum(one[name] for one in workers) for name in workers[0]}
        stored = found["stored_bytes"] = workers[0]["stored_bytes"]
        if (rows := outcome.facts["rows"]) is not None:
            epochs = sum(one["rows"] for one in outcome.workers) / rows
            found["amplification"] = found["bytes"] / (stored * epochs) if stored * epochs else 0.0
        return found | {"wait_s": self.recorder.timing()["input"]}

    def _info(self, first: Outcome) -> dict[str, Any]:
        config = self.config
        return {
            "task": config.task.name,
            "strategy": spec_of(config.strategy),
            "engine": config.engine.name,
            "workers": self.launch.workers,
            "max_steps": config.task.max_steps,
            "ticks": first.ticks,
            "stopped": first.reason,
            "machines": shared([one["cores"] for one in first.workers if "cores" in one]),
            **config.engine.facts(),
            **first.facts,
            **_of_stages(first),
            **self._rates(first.facts),
        }

    def _rates(self, facts: dict[str, Any]) -> dict[str, float]:
        """The highest rate of the schedule, and by how much it moves the one answer."""
        factor = facts["effective_rate"] / facts["rate"] if facts["rate"] else 1.0
        highest = facts["rate"] if self.recorder.highest_rate is None else self.recorder.highest_rate
        return {"rate": highest, "effective_rate": highest * factor}


def _agree(
    group: Group, refusal: str, directory: AnyPath | None, tick: int | None, claim: Claim | None
) -> Claim | None:
    """A collective: rank 0's claim on the run directory; BadInput on all ranks if refused, or if they differ."""
    own_claim = None if claim is None else [claim.number, claim.host, claim.pid]
    own = {
        "refusal": refusal,
        "directory": None if directory is None else str(directory),
        "tick": tick,
        "claim": own_claim,
    }
    first, *others = group.all_gather_json(own)
    if first["refusal"]:
        raise BadInput(first["refusal"])
    for rank, other in enumerate(others, start=1):
        if other["directory"] != first["directory"]:
            raise BadInput(
                f"run_dir is {first['directory']} on worker 0 and {other['directory']} on worker {rank}: give all "
                "workers the same name, and if it contains the time, make it before they start"
            )
        if other["tick"] != first["tick"]:
            raise BadInput(
                f"the newest checkpoint in {first['directory']}/{CHECKPOINTS} is of step {first['tick']} on worker 0 and of step {other['tick']} on worker {rank}: "
                "put the run directory where all hosts see the same files"
            )
    if directory is None or first["claim"] is None:
        return None
    number, host, pid = first["claim"]
    return Claim(directory=directory, number=number, host=host, pid=pid)


def _read_once(task: Task) -> Task:
    """The task, its data read once for all workers of this process."""
    given = {name: getattr(task, name) for name in ("train_data", "validation_data", "test_data")}
    return task.with_fields(**{name: Once(data) for name, data in given.items() if is_function(data)})


def _of_stages(first: Outcome) -> dict[str, Any]:
    """The facts of each stage, with what its workers sent in all, and the most memory that one of them had."""
    stages = first.facts.get("stages", [])
    found = []
    for stage, facts in enumerate(stages):
        workers = first.workers[stage :: len(stages)]
        sent = sum(count["bytes"] for one in workers for count in one["ledger"].values())
        peaks = [one["memory"] for one in workers if "memory" in one]
        found.append(facts | {"bytes": sent} | ({"memory": max(peaks)} if peaks else {}))
    return {"stages": found} if found else {}


def _summed(ledgers: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    summed: dict[str, dict[str, int]] = {}
    for ledger in ledgers:
        for name, counts in ledger.items():
            total = summed.setdefault(name, {"bytes": 0, "messages": 0})
            for key, value in counts.items():
                total[key] += value
    return summed
