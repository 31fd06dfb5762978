"""The one worker loop: what every worker of a training run does, whatever the strategy and the engine."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from manyhands import rng, units
from manyhands.data.feed import Feed, Slice
from manyhands.data.open_source import open_source
from manyhands.engines import cores
from manyhands.errors import BadInput, is_whole
from manyhands.recording.run import environment
from manyhands.replica import fingerprint
from manyhands.replica.control_bits import MORE, STOP
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.server.staleness import StalenessMonitor, watch
from manyhands.signals import PREEMPTED
from manyhands.strategies.base import Change
from manyhands.training.plan import Outcome, TrainingPosition, WorkerPlan, check_executor, global_batch, make_executor
from manyhands.training.saving import Saver
from manyhands.training.validation import Validator
from manyhands.worker import Worker

COLLECT_EVERY = 1000  # ticks between collections of all ranks' events where every rank is its own driver


class Epochs(Protocol):
    """How the workers go through an epoch, see epochs.py."""

    def epoch(self) -> bool:
        """Train until the epoch's rows are out (True), or until something stops it."""


class Loop:
    """The state of one worker's training. epochs: makes the way through an epoch, of this loop."""

    def __init__(self, plan: WorkerPlan, worker: Worker, epochs: Callable[[Loop], Epochs]) -> None:
        self.plan, self.worker, self.task = plan, worker, plan.task
        many = not plan.strategy.needs.one_model
        rng.seed_all(plan.task.seed, worker.rank if many else 0)
        self.replica = Replica(
            make_executor(plan.task, worker),
            group=worker.mesh.data,
            clip_norm=plan.task.clip_norm,
            nonfinite=plan.nonfinite,
            clock=worker.clock,
        )
        check_executor(plan.task, self.replica.shards)
        self.train_feed = self._feed(plan.task.train_data, train=True)
        self.ticks_per_epoch = self.train_feed.ticks
        fingerprint.compare(worker, partial(self._program_facts, self.replica.model))
        self._use_schedule()
        if worker.rank and not many:
            rng.seed_all(plan.task.seed, worker.rank)  # dropout draws per rank
        if plan.strategy.needs.gradients and not self.replica.executor.has_gradients:
            raise self.replica.executor.without_gradients()
        self.state = plan.strategy.start(self.replica, worker)
        plan.strategy.synchronize(self.replica, worker, self.state, Change(generation=worker.generation))
        self.worker_callback = (
            None if plan.task.worker_callback is None else plan.task.worker_callback.create(worker, self.replica)
        )
        self._called_off = False  # by this worker's callback
        self.position = TrainingPosition()
        self._check_due = False  # replicas are compared as soon as they are promised to be equal
        self.reason = ""
        self.began = worker.clock()
        self.validator = Validator(
            plan,
            worker,
            self.replica,
            validation=self._feed_of(plan.task.validation_data),
            test=self._feed_of(plan.task.test_data),
        )
        held = frozenset(self.state.tensors())
        self.saver = Saver(
            plan, worker, self.replica, self.train_feed, self.total_ticks(), self.validator.best, held=held
        )
        self.epochs = epochs(self)
        self.spec = plan.strategy.server() if worker.server is not None else None
        self.staleness = self._watch()
        if plan.resume_from is not None:
            self.state, self.position = self.saver.resume(plan.resume_from, self.state)
        self.anybody = True  # somebody may have rows: the last exchange's answer
        self.input_s = 0.0  # that this tick waited for its rows
        self._pending: dict[str, Any] | None = None
        self._sent = 0
        self._own_reason = ""

    def _feed_of(self, data: Any) -> Feed | None:
        return None if data is None else self._feed(data)

    def _feed(self, data: Any, train: bool = False) -> Feed:
        task, worker = self.task, self.worker
        rank, size = worker.mesh.rows
        source = open_source(data, collate=task.collate, loader_processes=task.loader_processes)
        own = source.batch_size if not train else None  # a validation loader's batches have nothing to do with a step's
        return Feed(
            source,
            rank=rank,
            size=size,
            batch_size=own or global_batch(task, size, source.batch_size),
            seed=task.seed,
            shuffle=train and task.shuffle,
            order=task.order if train else None,
            device=worker.device,
            threads=not worker.shares_process,
        )

    def _use_schedule(self) -> None:
        make, total = self.task.schedule, self.total_ticks()
        if make is None:
            return
        if total is None:
            raise BadInput("a schedule needs the number of steps, and a stream has no length: give max_steps")
        self.replica.use_schedule(lambda optimizer: make(optimizer, total))
        if self.replica.watched is not None and self.task.validation_data is None:
            raise BadInput(
                f"the schedule is stepped on {self.replica.watched!r}, and there is no validation: give the task validation_data"
            )

    def _watch(self) -> StalenessMonitor | None:
        (rank, replicas), replica, spec = self.worker.mesh.rows, self.replica, self.spec
        if spec is None or not replica.executor.has_gradients:
            return None
        return watch(spec, self.plan.strategy.rate_factor(replicas), rank, replicas, replica.dot)

    def total_ticks(self) -> int | None:
        """Ticks of the whole training, None for a stream without max_steps."""
        sized = None if self.ticks_per_epoch is None else self.ticks_per_epoch * self.task.epochs
        return min((n for n in (sized, self.task.max_steps) if n is not None), default=None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All epochs, or until something stops them."""
        self._compare_settings()
        self._announce()
        if self.worker_callback is not None:
            self.worker_callback.on_start(self.facts)
        while self.position.epoch < self.task.epochs and not self.finished():
            self._epoch()
        if self.reason and self.saver.saved != self.position.tick:
            self.save()
        if self.reason != PREEMPTED and self.validator.validated_at != self.position.tick:
            self.validate(last=True)  # the newest metrics are those of the final parameters

    def finished(self) -> bool:
        """Whether no further tick is wanted."""
        most, position = self.task.max_steps, self.position
        return bool(self.reason) or (most is not None and position.left is None and position.tick >= most)

    def _epoch(self) -> None:
        position, epoch = self.position, self.position.epoch
        self.replica.model.train()
        if self.worker_callback is not None:
            self.worker_callback.on_epoch_start(epoch)
        complete = self.epochs.epoch()
        if self.reason:
            self.flush()  # what closing the open window pushes is lost again when the run is resumed
            self.save()  # before that, so that a resumed run goes on as if never interrupted
            self._finish(last=True)
            return
        if complete:
            position.epoch, position.epoch_tick = position.epoch + 1, 0
        self._finish(last=position.epoch == self.task.epochs or self.finished())
        self.stopped()  # where rounds are longer than an epoch, the stop arrives only now
        self._end_epoch(epoch)

    def turn(self, part: Slice, tick: int, **values: Any) -> None:
        """One tick: gradient, exchange, gate, and the step's event with `values`, numbered by global batch."""
        replica, worker, clock = self.replica, self.worker, self.worker.clock
        replica.begin_tick()
        replica.tick = self.position.local_steps
        replica.idle = part.rows == 0 and bool(part.global_rows)
        replica.control.stop = self.wants_stop()
        worker.group.step = replica.step
        worker.driver.progress("compute", replica.step)
        apply_s, wait_s, rounds = replica.apply_seconds, self._waited_s(), replica.rounds
        start = clock()
        self.plan.strategy.before_backward(replica, worker, self.state)
        begun = clock()
        loss = replica.backward(part.batch)
        worker.driver.computed(0 if replica.skip else part.rows)
        weight, rate = replica.weight, self._rate()
        if self.staleness is not None:
            self.staleness.before(replica.parameters, replica.gradients)
        middle = clock()
        worker.driver.progress("exchange", replica.step)
        result = self.plan.strategy.exchange(replica, worker, self.state)
        self.anybody = result.rows_left
        if self.staleness is not None:
            self.staleness.after(replica.parameters, rate, result.applied)
        self._pass_gate()
        end = clock()
        apply_s, wait_s = replica.apply_seconds - apply_s, self._waited_s() - wait_s
        unused = 0 if result.used else part.rows
        self._count(part, unused)
        self._record(
            tick=tick,
            loss=loss if part.rows else None,
            weight=weight,
            rows=part.rows,
            unused=unused,
            input_s=self.input_s,
            compute_s=middle - begun + apply_s,
            exchange_s=end - middle + begun - start - apply_s - wait_s,
            wait_s=wait_s,
            round=replica.rounds > rounds,
            rate=self._rate(),
            **values,
        )
        if self.worker_callback is not None and self.worker_callback.on_step(loss if part.rows else None):
            self._called_off = True

    def _rate(self) -> float:
        return float(self.replica.optimizer.param_groups[0]["lr"])

    def _waited_s(self) -> float:
        server = self.worker.server
        return self.worker.group.waited_s + (0.0 if server is None else server.waited_s)

    def _pass_gate(self) -> None:
        """Wait at the gate; where all make the same ticks, receive their control bits."""
        server, replica, spec = self.worker.server, self.replica, self.spec
        if server is None or spec is None:
            return
        bits = self.worker.tick(replica.control.own)
        if spec.bound == 0:
            replica.control.received |= bits
            self.anybody = bool(bits & MORE)

    def _count(self, part: Slice, unused: int) -> None:
        position = self.position
        position.local_steps += 1
        position.rows += part.rows
        position.unused += unused
        position.rounds = self.replica.rounds

    # -- records -----------------------------------------------------------------------------------------------------

    def _record(self, **values: Any) -> None:
        """Hold a tick's record back until it is known whether an epoch's end adds to its exchange."""
        self.flush()
        self._pending = {"step": self.replica.step, "epoch": self.position.epoch, **values}

    def flush(self) -> None:
        """Send the record of the last tick, with the server's values for it."""
        if self._pending is not None:
            sent = self._sent_bytes()
            values = {**self._pending, "bytes": sent - self._sent, **self._server_values()}
            self._sent, self._pending = sent, None
            self.worker.emit("step", **values)

    def _server_values(self) -> dict[str, Any]:
        """Pulls, pushes and staleness since the last step event; warns if updates are too stale for the rate."""
        if self.worker.server is None:
            return {}
        drained = self.worker.server.drain_journal()
        if self.staleness is None:
            return drained
        warning = self.staleness.record(drained)
        if warning:
            self.worker.emit("warning", step=self.replica.step, kind="staleness", message=warning)
        return {**drained, **self.staleness.news()}

    def _sent_bytes(self) -> int:
        server = self.worker.server
        return self.worker.group.ledger.total_bytes + (0 if server is None else server.ledger.total_bytes)

    def add_wait(self, seconds: float) -> None:
        """That this worker waited for the others, after its last tick."""
        if self._pending is not None:
            self._pending["wait_s"] += seconds

    def _finish(self, last: bool) -> None:
        """Let the strategy close its open round; its seconds belong to the last tick's exchange."""
        worker, replica = self.worker, self.replica
        replica.check()
        replica.last, replica.control.stop = last, self.wants_stop()
        start, wait_s, rounds = worker.clock(), self._waited_s(), replica.rounds
        pushed = 0 if worker.server is None else worker.server.ledger.total_bytes
        answer = self._judged_answer()
        if worker.server is not None:
            worker.server.activate()  # an asynchronous worker is inactive between segments
        self.plan.strategy.finish(replica, worker, self.state)
        if worker.server is not None:
            worker.server.deactivate()
            self._after_the_last_push(worker.server.ledger.total_bytes > pushed)
        elif answer is not None and not answer.equal(self._answer()):
            self.validator.validated_at = -1
        wait_s = self._waited_s() - wait_s
        if self._pending is not None:
            self._pending["exchange_s"] += worker.clock() - start - wait_s
            self._pending["wait_s"] += wait_s
            self._pending["round"] = self._pending["round"] or replica.rounds > rounds
        self.position.rounds = replica.rounds
        self.flush()

    def _judged_answer(self) -> FlatVector | None:
        """The answer, if it was validated at this tick and closing the round may move it."""
        validated = self.worker.server is None and self.validator.validated_at == self.position.tick
        return self._answer().clone() if validated else None

    def _answer(self) -> FlatVector:
        return self.plan.strategy.consensus(self.replica, self.worker, self.state)

    def _after_the_last_push(self, own: bool) -> None:
        """The center may differ from the validated one, and pushes after the last step event must be recorded."""
        if self.validator.validated_at == self.position.tick and any(self.worker.group.all_gather_json(own)):
            self.validator.validated_at = -1
        if own and self._pending is None:
            tick = (
                self.position.tick if self.reason else max(0, self.position.tick - 1)
            )  # a stop's are lost when it is resumed
            self.worker.emit(
                "closing", tick=tick, step=self.replica.step, epoch=self.position.epoch, **self._server_values()
            )

    # -- stopping ----------------------------------------------------------------------------------------------------

    def wants_stop(self) -> bool:
        """Whether this worker has a reason to stop."""
        limit = self.plan.max_seconds
        self._own_reason = self.worker.driver.should_stop()
        if not self._own_reason and limit is not None and self.worker.clock() - self.began >= limit:
            self._own_reason = "max_seconds"
        if not self._own_reason and self._called_off:
            self._own_reason = "callback"
        return bool(self._own_reason)

    @property
    def own_reason(self) -> str:
        """The reason that `wants_stop` found, or "" """
        return self._own_reason

    def stopped(self) -> bool:
        """Whether this tick's exchange stopped the run; all workers receive the stop at the same tick."""
        if self.replica.control.received & STOP:
            self.agree_to_stop(self._own_reason)
        return bool(self.reason)

    def agree_to_stop(self, reason: str) -> None:
        """The reason of the lowest rank that has one; a collective, called once the stop has reached all workers."""
        self.reason = next((r for r in self.worker.group.all_gather_json(reason) if r), "stopped")

    # -- between ticks and epochs ------------------------------------------------------------------------------------

    def between(self) -> None:
        """What is due after so many global batches."""
        every_tick = self.plan.check_replicas_every
        self._check_due = self._check_due or (every_tick is not None and self.position.tick % every_tick == 0)
        if self._check_due:
            self._compare_replicas()
        for every, action in ((self.plan.validate_every, self.validate), (self.plan.checkpoint_every, self.save)):
            if isinstance(every, int) and self.position.tick % every == 0:
                self.flush()
                action()
        if self.position.tick % COLLECT_EVERY == 0:
            self.worker.driver.collect(self.worker.group)

    def save(self) -> None:
        """A checkpoint, where they are wanted, of replicas that are equal where that is promised."""
        if self.plan.checkpoints is not None:
            self._compare_replicas()
        self.saver.save(self.position, self.state)

    def validate(self, last: bool = False) -> None:
        """Validate and report; a stop requested after the last step is ignored."""
        metrics, best = self.validator.validate(self.position, self.state)
        if metrics:
            self.worker.driver.collect(self.worker.group)
            answer = self._ask("validation", metrics=metrics, best=best)
            if not last:
                self.replica.step_on(metrics)
                self._obey(answer)

    def _end_epoch(self, epoch: int) -> None:
        if self.plan.validate_every == "epoch":
            self.validate()
        if self.worker_callback is not None:
            metrics = self.validator.best.newest if self.validator.validated_at == self.position.tick else {}
            with self.validator.showing(self.state):
                ends = self.worker_callback.on_epoch_end(epoch, metrics)
            self.reason = self.reason or ("callback" if ends else "")
        self.worker.driver.collect(self.worker.group)
        self._obey(self._ask("epoch", rows=self.position.rows))
        if self.plan.checkpoint_every == "epoch" or self.position.epoch == self.task.epochs or self.finished():
            self.save()  # after callbacks saw the epoch's end: what they remember is saved, too

    def _ask(self, type: str, **values: Any) -> str:
        """The driver's answer on rank 0, "" on the others; `_obey` gives all ranks the same."""
        if self.worker.rank:
            return ""
        answer = self.worker.ask(
            type, tick=max(0, self.position.tick - 1), step=self.position.tick, epoch=self.position.epoch, **values
        )
        return str(answer.get("stop", ""))

    def _obey(self, answer: str) -> None:
        reasons = [reason for reason in self.worker.group.all_gather_json(answer) if reason]
        if reasons:
            self.reason = reasons[0]

    # -- what must be alike ------------------------------------------------------------------------------------------

    def _program_facts(self, model: torch.nn.Module) -> fingerprint.Facts:
        """What this worker is about to train, before anything is shared."""
        task, feed = self.task, self.train_feed
        used = (
            task.loss,
            task.optimizer,
            task.evaluate,
            task.schedule,
            task.collate,
            task.train_data,
            model,
            task.executor,
        )
        return {
            **fingerprint.of_code(*used),
            **fingerprint.of_settings(
                strategy=self.plan.strategy,
                batch_size=feed.batch_size,
                steps_of_an_epoch=feed.ticks,
                **{name: getattr(task, name) for name in ("epochs", "max_steps", "micro_batch_size", "seed")},
                **{name: getattr(task, name) for name in ("shuffle", "clip_norm", "precision")},
            ),
            **fingerprint.of_model(model),
            **fingerprint.of_rows(feed.source, "train_data", task.seed),
        }

    def _compare_settings(self) -> None:
        """A collective: optimizer and schedule, as resumed where that is so, and the rows that are not trained on.

        Where workers step alone for a while, each may have a rate of its own: that is a warning.
        """
        strategy, worker = self.plan.strategy, self.worker
        fingerprint.compare(worker, self.validator.facts)
        if not strategy.needs.one_model:
            return
        if strategy.needs.mean_gradient:
            fingerprint.compare(worker, self._rate_facts)
        elif (found := fingerprint.differences(worker, self._rate_facts)) and worker.rank == 0:
            worker.emit("warning", kind="settings", message=found)

    def _rate_facts(self) -> fingerprint.Facts:
        return fingerprint.of_optimizer(self.replica.optimizer, self.replica.schedule)

    def _compare_replicas(self) -> None:
        """A collective: raise where replicas have drifted apart that the strategy keeps equal."""
        if self.worker.size == 1:
            return
        agreed = self.plan.strategy.agreed(self.replica, self.state)
        if agreed is not None:
            self._check_due = False
            self.worker.driver.progress("checkpoint", self.replica.step)
            fingerprint.compare_replicas(self.worker, agreed, self.replica.norm, self._rate_facts(), self.position.tick)

    # -- beginning and end -------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        groups, size, replicas = self.replica.optimizer.param_groups, self.worker.size, self.worker.mesh.rows[1]
        rate, loading = float(groups[0]["lr"]), self.train_feed.source.loading
        return {
            "rows": self.train_feed.rows,
            "ticks_per_epoch": self.ticks_per_epoch,
            "epochs": self.task.epochs,
            "total_steps": self.total_ticks(),
            "batch_size": self.train_feed.batch_size,
            "batch_size_per_worker": self.train_feed.batch_size / replicas,
            "rate": rate,
            "effective_rate": rate * self.plan.strategy.rate_factor(replicas),
            "own_pace": self.plan.strategy.leasing() is not None,
            "workers": size,
            "parameters": self.replica.layout.size,
            "threads": torch.get_num_threads(),
            "device": str(self.worker.device),
            "loader_processes": loading.processes,
            "loader_option": loading.option,
            "clip_norm": self.task.clip_norm,
        }

    def _never_due(self) -> list[str]:
        """That the strategy's period is longer than the whole training, where it is."""
        strategy, total = self.plan.strategy, self.total_ticks()
        option = strategy.traits.period
        period = getattr(strategy, option, None) if option else None
        if self.worker.size == 1 or total is None or not is_whole(period):
            return []
        if strategy.traits.exchanges_next and period == total:
            return [
                f"{option}={period:,} of strategy {strategy.name}: the exchange comes with the step after so many, and this training has no more: "
                f"its answer is where it began. Give {option} at most {max(1, period // 4):,}"
            ]
        if period <= total:
            return []
        return [
            f"{option}={period:,} of strategy {strategy.name} is more than the {units.count(total, 'step')} of this training: workers exchange at its end only"
        ]

    def _announce(self) -> None:
        self.facts = self._facts()
        if self.worker.rank == 0:  # asked, not emitted: in the log it must stand before everybody's first step
            left: dict[str, Any] = {"left": [self.position.epoch, self.position.left]} if self.position.left else {}
            if self.worker.shares_process:
                left["virtual_time"] = True
            self.worker.ask(
                "start", tick=self.position.tick, step=self.position.tick, **self.facts, **environment(), **left
            )
            for message in [*self.saver.warnings, *self._never_due()]:
                self.worker.emit("warning", tick=self.position.tick, step=self.position.tick, message=message)
        self.worker.group.barrier()

    def _kept(self) -> dict[str, Any]:
        """Where the answer is from, if it is the best by a metric."""
        best = self.validator.best
        return {"kept": {"metric": best.policy.metric, **best.at}} if best.at else {}

    def outcome(self) -> Outcome:
        """The consensus, or the best that was kept, its metrics, and all workers' counts."""
        worker, replica = self.worker, self.replica
        worker.driver.progress("end", replica.step)
        over = self.reason != PREEMPTED
        states, metrics, callback_result = self.validator.answer(
            self.state, test=over, worker_callback=self.worker_callback if over else None
        )
        worker.driver.collect(worker.group)
        ledger = worker.group.ledger.as_dict() | ({} if worker.server is None else worker.server.ledger.as_dict())
        own = {"rows": self.position.rows, "unused": self.position.unused, "ledger": ledger}
        if not worker.shares_process:
            own |= {"memory": peak_bytes(worker.device), "cores": cores.report(torch.get_num_threads())}
        return Outcome(
            states=states,
            saved=[name for name, value in replica.model.state_dict().items() if isinstance(value, torch.Tensor)],
            metrics=metrics,
            workers=worker.group.all_gather_json(own),
            steps=replica.step,
            ticks=self.position.tick,
            rounds=replica.rounds,
            reason=self.reason,
            seconds=worker.clock() - self.began,
            facts=self.facts | self._kept(),
            callback_result=callback_result,
        )


def peak_bytes(device: torch.device) -> int:
    """The largest resident memory of this process so far, in bytes; on a GPU, the largest that it allocated there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
