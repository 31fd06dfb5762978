"""The one worker loop: what every worker of a training run does, whatever the strategy and the engine.

A loop is built alone: data, model, the strategy's `start`. Then it joins the worker's group and trains. Where members
may change, a peer's loss or a change that the driver asks for ends `run` in between; after the next `join` it goes on
from where the members are. The step under way, which nobody committed, is repeated.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from manyhands import rng, units
from manyhands.comm.group import Ledger
from manyhands.data.feed import Feed, Slice
from manyhands.data.leases import Segment
from manyhands.data.slice_ledger import Place, SliceLedger
from manyhands.data.source import Indexed, Pick, Reading
from manyhands.data.strata import Strata
from manyhands.engines import cores
from manyhands.errors import BadInput, NotFinite, PeerLost, Unsupported, is_whole
from manyhands.own_loop.batches import WHOLE
from manyhands.own_loop.rank_zero import RankZeroLines
from manyhands.parallel.mesh import mesh_alone, mesh_of
from manyhands.recording.run import environment
from manyhands.replica import fingerprint
from manyhands.replica.control_bits import MORE, REGROUP, STOP
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.replica.sync_batch_norm import unsynchronized
from manyhands.server.staleness import StalenessMonitor, watch
from manyhands.signals import PREEMPTED
from manyhands.strategies.base import StepResult
from manyhands.training import nonfinite
from manyhands.training.plan import (
    Outcome,
    TrainingPosition,
    WorkerPlan,
    check_executor,
    cut_keys,
    first_rows,
    make_executor,
    make_feed,
)
from manyhands.training.plan_check import PlanCheck
from manyhands.training.saving import Saver
from manyhands.training.validation import Validator
from manyhands.worker import Worker
from manyhands.worker_callback import WorkerCallback

SPARSITY_ROWS, SPARSITY_S = 1_000_000, 0.5  # of so many rows at most it is found, in about so many seconds
COLLECT_EVERY = 1000  # ticks between collections of all ranks' events where every rank is its own driver


class Phase(IntEnum):
    """What a loop is at. At one step and epoch the phases come in this order."""

    BETWEEN = 0  # what is due after a step: validation, checkpoint
    CLOSE = 1  # the epoch's last step is made: the strategy's open round
    VALIDATE = 2
    EPOCH = 3  # callbacks
    SAVE = 4
    STEP = 5  # the next step
    STOP = 6  # something stopped the run in the middle of an epoch


class Regroup(Exception):
    """All members have agreed to form the next generation now: between two steps, with no round open."""


class Epochs(Protocol):
    """How the workers go through an epoch, see epochs.py."""

    def epoch(self) -> bool:
        """Train until the epoch's rows are out (True), or until something stops it."""

    def take_back(self) -> bool:
        """Once all of an epoch is pushed: train what came back of lost workers. Whether anybody did; a collective."""


@dataclass
class _Turn:
    """A tick under way, whose gradient is computed. Times are on the worker's clock, in seconds."""

    part: Slice
    tick: int
    values: dict[str, Any]  # of its event, besides
    weight: float
    rate: float
    steps: int  # of the optimizer, before it
    rounds: int  # before it
    pushes: int  # of this worker, before it
    start: float
    begun: float  # its backward
    middle: float  # before its exchange
    apply_s: float  # of all ticks before it
    wait_s: float
    communicated_s: float  # in its backward


class Loop:
    """The state of one worker's training. epochs: makes the way through an epoch, of this loop."""

    def __init__(self, plan: WorkerPlan, worker: Worker, epochs: Callable[[Loop], Epochs]) -> None:
        self.plan, self.worker, self.task = plan, worker, plan.task
        many = not plan.strategy.needs.one_model
        rng.seed_all(plan.task.seed, worker.mesh.rows[0] if many else 0)
        self.blocks = cut_keys(plan, worker)
        self.replica = Replica(
            make_executor(plan.task, worker, plan.model_parallel, self._first_rows, self.blocks),
            group=worker.mesh.data,
            clip_norm=plan.task.clip_norm,
            nonfinite=plan.nonfinite,
            clock=worker.clock,
            elastic=worker.elastic,
            progress=worker.driver.progress,
        )
        check_executor(plan.task, self.replica.shards)
        synchronized = plan.task.sync_batch_norm or plan.task.batches == WHOLE
        if worker.size > 1 and plan.strategy.needs.mean_gradient and not synchronized:
            RankZeroLines(worker.rank)(unsynchronized(self.replica.model))
        if worker.server is not None and worker.mesh.model.size > 1:
            worker.server.received = self._share
        self.train_feed = self._feed(plan.task.train_data, train=True)
        self.ticks_per_epoch = self.train_feed.ticks
        in_step = plan.strategy.leasing() is None
        self.has_rounds = worker.elastic and in_step and not plan.strategy.needs.mean_gradient  # replicas differ there
        self.rounds_at_server = (
            self.has_rounds and plan.strategy.server() is not None
        )  # it completes them for who is left
        if worker.elastic and not (self.train_feed.rereads if in_step else self.train_feed.leasable):
            raise Unsupported(own_pace_on_a_stream(plan.strategy.name))
        if worker.elastic:  # with fewer workers a slice is larger, and memory is not
            self.replica.executor.limit_rows(-(-self.train_feed.batch_size // worker.mesh.rows[1]))
        self._use_schedule()
        whole = plan.task.batches == WHOLE  # all draw alike, but for what is drawn within calls that are cut
        if worker.rank and not whole and (not many or worker.mesh.model.size > 1):
            rng.seed_all(plan.task.seed, worker.rank)  # dropout draws per rank
        if plan.strategy.needs.gradients and not self.replica.executor.has_gradients:
            raise self.replica.executor.without_gradients()
        if (copied := self.replica.executor.copied()) and plan.strategy.compresses():
            raise Unsupported(
                f"model_parallel: {copied[0]} is tied, and several stages hold it. With compress each stage compresses its own part of the model, so that the copies "
                "would drift apart: leave compress out, or cut the model where one stage uses it"
            )
        self.state = plan.strategy.start(self.replica, worker)
        self.worker_callback: WorkerCallback | None = None
        self._called_off = False  # by this worker's callback
        self._plan_check = None if plan.predicted is None else PlanCheck(plan.predicted, self.total_ticks())
        self._replicas = worker.mesh.rows[1]  # with which the run begins, whoever of them is there when it does
        self._ledger_before, self._waited_s_before = Ledger(), 0.0  # of parts of groups that it has left
        self.position = TrainingPosition()
        self.reads_whole = False  # whether every worker reads all of a stream
        self.phase = Phase.STEP
        self.lockstep = plan.strategy.leasing() is None  # all make the same ticks
        self.closing: Segment | None = None  # at their own pace: that of the epoch whose end is under way
        self.blank = True  # nothing is trained, nor taken from whoever has: the group of all is yet to be joined
        self._check_due = False  # replicas are compared as soon as they are promised to be equal
        self.ending = 0  # the epoch whose end is under way
        self.reason = ""
        self.began = worker.clock()
        self.validator = Validator(
            plan,
            worker,
            self.replica,
            validation=self._feed_of(plan.task.validation_data),
            test=self._feed_of(plan.task.test_data),
        )
        self.saver = Saver(plan, worker, self.replica, self.train_feed, self.total_ticks(), self.validator.best)
        self.epochs = epochs(self)
        self.spec = plan.strategy.server() if worker.server is not None else None
        self.staleness = self._watch()
        self.anybody = True  # somebody may have rows: the last exchange's answer
        self.input_s = 0.0  # that this tick waited for its rows
        self._pending: dict[str, Any] | None = None
        self._sent = 0
        self._own_reason = ""
        self._buffers_before: dict[str, torch.Tensor] | None = None  # of the step under way, where it may be repeated
        self.under_way = 0  # rows of its global batch, until it is committed or the members have agreed to repeat it
        self._turn: _Turn | None = None  # until its step is made
        self.ledger: SliceLedger | None = None  # of the open round, where replicas differ between rounds
        self.generation = worker.generation  # the newest that it has joined
        self.extra: set[Place] = set()  # slices of a lost worker that this one has trained in the open round
        self.epoch_ticks = 0  # of the newest epoch that is over
        self.members_before = 0  # of the group in which this worker last agreed with others where to go on
        self.activated_at = 0  # the global batch of the epoch at which all last became active at the server
        self.unpushed = 0  # steps before that of which the server has nothing yet
        self.partial: list[list[int]] = []  # see `note_partial`

    def _feed_of(self, data: Any) -> Feed | None:
        return None if data is None else self._feed(data)

    def _feed(self, data: Any, train: bool = False) -> Feed:
        return make_feed(self.plan, self.worker, data, self.worker.mesh.rows, train=train, blocks=self.blocks)

    def _first_rows(self) -> Any:
        return first_rows(self.plan, self.worker, self.worker.mesh.rows)

    def _share(self, vector: torch.Tensor) -> None:
        """Of what has come of the server: workers of a replica that hold the same parameter take the first one's."""
        self.replica.executor.share(self.replica.named(vector))

    def _use_schedule(self) -> None:
        make, total = self._schedule(), self.total_ticks()
        if make is None:
            return
        if total is None:
            raise BadInput("a schedule needs the number of steps, and a stream has no length: give max_steps")
        self.replica.use_schedule(lambda optimizer: make(optimizer, total))
        if self.replica.watched is not None and self.task.validation_data is None:
            raise BadInput(
                f"the schedule is stepped on {self.replica.watched!r}, and there is no validation: give the task validation_data"
            )

    def _schedule(self) -> Callable[[torch.optim.Optimizer, int], Any] | None:
        """The task's, or what its kernel's rate does."""
        task, per_epoch = self.task, self.ticks_per_epoch
        if task.last_rate is not None and task.rate is not None:
            return partial(falling, task.last_rate / task.rate)
        if (decay := task.rate_decay) is not None:
            if per_epoch is None:
                raise BadInput(
                    "rate_decay is of epochs, and nobody knows how many steps one of a stream has: give last_rate and max_steps"
                )
            return lambda optimizer, total: LambdaLR(optimizer, lambda step: decay ** (step // per_epoch))
        return task.schedule

    def _watch(self) -> StalenessMonitor | None:
        (rank, replicas), replica, spec = self.worker.mesh.rows, self.replica, self.spec
        if spec is None or not replica.executor.has_gradients:
            return None
        return watch(spec, self.plan.strategy.rate_factor(replicas), rank, replicas, replica.dot)

    def total_ticks(self) -> int | None:
        """Ticks of the whole training, None for a stream without max_steps."""
        sized = None if self.ticks_per_epoch is None else self.ticks_per_epoch * self.task.epochs
        return min((n for n in (sized, self.task.max_steps) if n is not None), default=None)

    # -- groups of members that may change ---------------------------------------------------------------------------

    def join_parts(self) -> None:
        """The worker is in the next generation's group of all: make those of its parts, where a replica has several
        workers. A collective."""
        worker, parallel = self.worker, self.plan.model_parallel
        if worker.elastic and parallel is not None:
            worker.mesh = mesh_of(worker, parallel.workers)
            self.replica.executor.join(worker)
        commits = worker.mesh.world if worker.elastic and worker.mesh.model.size > 1 else None
        self.replica.join(worker.mesh.data, commits)

    def leave(self) -> None:
        """Close what `join_parts` has made, and what is made of it: peers that wait there notice at once."""
        worker, executor, parallel = self.worker, self.replica.executor, self.plan.model_parallel
        if parallel is None:
            return
        for ledger in (*(group.ledger for group in worker.mesh.parts), *executor.ledgers()):
            self._ledger_before.include(ledger)
        self._waited_s_before += executor.waited_s() + sum(group.waited_s for group in worker.mesh.parts)
        executor.leave()
        for group in worker.mesh.parts:
            group.close()
        worker.mesh = mesh_alone(worker, parallel.workers)

    # -- what members agree on ---------------------------------------------------------------------------------------

    def progress(self) -> list[int]:
        """How far this worker is: of two lists the greater one is further."""
        position = self.position
        return [position.tick, position.epoch, self.phase, self.validator.validated_at, self.saver.saved]

    def forget_step(self) -> int:
        """Of the step under way, which this worker has not committed: buffers are as before it, and so are counts. How
        many rows its global batch has, 0 where there is none."""
        if self._turn is not None:
            self.plan.strategy.forget_step(self.replica, self.worker, self.state)
            self._turn = None
        if self._buffers_before is not None:
            for name, buffer in self.replica.model.named_buffers():
                before = self._buffers_before.get(name)  # None: the step has made it
                if before is not None and before.shape == buffer.shape:
                    buffer.copy_(before)
                elif before is not None:
                    buffer.data = before
        self._buffers_before, self.replica.rounds = None, self.position.rounds
        self.replica.control.restart()
        return self.under_way

    # -- rounds of members that may change ---------------------------------------------------------------------------

    def catch_up(self, completed: int) -> None:
        """Others have completed so many rounds: complete what this worker has not, and the tick to which it belongs."""
        self.replica.catch_up(completed)
        if (turn := self._turn) is not None and self.replica.stepped:
            self._end_turn(turn, StepResult(applied=self.replica.step > turn.steps))

    def done(self) -> int:
        """Global batches of the ledger's epoch that this worker has stepped on."""
        assert self.ledger is not None
        if self.position.epoch == self.ledger.epoch:
            return self.position.epoch_tick
        return self.ticks_per_epoch or self.epoch_ticks

    def begin_round(self, first: int | None = None) -> None:
        """All rows until here are in a round; from here on is the next. first: of the epoch, default: where this is."""
        position = self.position
        self.ledger = SliceLedger(
            round=self.replica.completed,
            epoch=position.epoch,
            first=position.epoch_tick if first is None else first,
            members=tuple(self.worker.members),
        )
        self.extra = set()

    def take_ledger(self, ledger: SliceLedger) -> None:
        """Of the members together. What this worker has trained of a round that is complete is no longer of interest."""
        if self.ledger is None or (self.ledger.epoch, self.ledger.round) != (ledger.epoch, ledger.round):
            self.extra = set()
        self.ledger = ledger

    def activate(self) -> None:
        """Take part at the server, from this global batch on. Before the first push all must have."""
        assert self.worker.server is not None
        self.activated_at = self.position.epoch_tick
        self.unpushed = self.plan.strategy.steps_since_round(self.state)
        self.worker.server.activate()

    def step_extra(self, place: Place | None, part: Slice) -> None:
        """Step on a slice of a lost worker, in the open round. None: on no rows, while others have some."""
        self.replica.begin_tick()
        self.worker.driver.progress("compute", self.replica.step)
        self.plan.strategy.before_backward(self.replica, self.worker, self.state)
        self.replica.backward(part.batch)
        ago = 0 if place is None else self.done() - 1 - place.tick
        self.plan.strategy.step_extra(self.replica, self.worker, self.state, ago=ago)
        if place is not None:
            self.extra.add(place)

    def own_values(self) -> dict[str, Any]:
        """JSON: what a worker that takes this one's place needs to know of its loop besides the position."""
        return {
            "phase": int(self.phase),
            "validated_at": self.validator.validated_at,
            "saved": self.saver.saved,
            "reason": self.reason,
            "ending": self.ending,
            "facts": self.facts,
            "elapsed_s": self.worker.clock() - self.began,
            "check_due": self._check_due,
            "completed": self.replica.completed,
            "partial": self.partial,
            "closing": None if self.closing is None else vars(self.closing),
            "epoch_ticks": self.epoch_ticks,
        }

    def take_values(self, values: dict[str, Any]) -> None:
        """What another's `own_values` gave."""
        self.phase, self.reason, self.ending = Phase(values["phase"]), values["reason"], values["ending"]
        self.validator.validated_at, self.saver.saved = values["validated_at"], values["saved"]
        self.facts, self.began = values["facts"], self.worker.clock() - values["elapsed_s"]
        self._check_due, self.replica.completed = values["check_due"], values["completed"]
        self.partial = values["partial"]
        self.closing = None if values["closing"] is None else Segment(**values["closing"])
        self.epoch_ticks = values["epoch_ticks"]
        self.replica.rounds, self.replica.tick = self.position.rounds, max(0, self.position.tick - 1)

    def create_callback(self) -> None:
        make = self.plan.task.worker_callback
        self.worker_callback = None if make is None else make.create(self.worker, self.replica)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All epochs, or until something stops them, from wherever the loop is."""
        while self.phase is not Phase.STEP or (self.position.epoch < self.task.epochs and not self.finished()):
            self._epoch()
        if self.reason and self.saver.saved != self.position.tick:
            self.save()
        if self.reason != PREEMPTED and self.validator.validated_at != self.position.tick:
            self.validate(last=True)  # the newest metrics are those of the final parameters
        while not self.saver.settle():
            self.save()
        self._check_reached()

    def _check_reached(self) -> None:
        """Raise BadInput where a stream had no rows for the steps that were asked for. Where rows are counted, all know
        before the first step that the epochs end sooner."""
        most, done, epochs = self.task.max_steps, self.position.tick, self.task.epochs
        if self.ticks_per_epoch is not None or self.reason or most is None or done >= most:
            return
        steps, passes = units.count(done, "step"), units.count(epochs, "epoch")
        kept = "The run directory's newest checkpoint holds them, and resume=True (--resume) goes on from there"
        lost = "Nothing of them is kept: with a run directory (run_dir=, --run-dir) a run could go on from them"
        raise BadInput(
            f"max_steps={most} was asked for, and the stream has rows for {steps} in {passes}: give epochs={-(-most * epochs // max(1, done))} (--epochs), or "
            f"max_steps={done}. {lost if self.plan.checkpoints is None else kept}"
        )

    def finished(self) -> bool:
        """Whether no further tick is wanted."""
        most, position = self.task.max_steps, self.position
        return bool(self.reason) or (most is not None and position.left is None and position.tick >= most)

    def _epoch(self) -> None:
        """One epoch, or what is left of it: each phase is gone through once, and repeated if its group ended within."""
        position = self.position
        if self.phase in (Phase.BETWEEN, Phase.STEP):
            self.replica.model.train()
            if self.worker_callback is not None and self.phase is Phase.STEP:
                self.worker_callback.on_epoch_start(position.epoch)
            complete = self.epochs.epoch()
            self.phase = Phase.STOP if self.reason else Phase.CLOSE
            self.ending = position.epoch
            if complete and not self.reason:
                self.epoch_ticks = position.epoch_tick
                position.epoch, position.epoch_tick, position.shards = position.epoch + 1, 0, None
        if self.phase is Phase.STOP:
            self.flush()  # what closing the open window pushes is lost again when the run is resumed
            self.save()  # before that, so that a resumed run goes on as if never interrupted
            self._finish(last=True)
        if self.phase is Phase.CLOSE:
            self._finish(last=position.epoch == self.task.epochs or self.finished())
            self.stopped()  # where rounds are longer than an epoch, the stop arrives only now
            self.phase = Phase.VALIDATE
        self._end_epoch()
        self.phase = Phase.STEP

    def turn(self, part: Slice, tick: int, **values: Any) -> None:
        """One tick: gradient, exchange, gate, and the step's event with `values`, numbered by global batch."""
        replica, worker, clock = self.replica, self.worker, self.worker.clock
        replica.begin_tick()
        replica.tick = self.position.local_steps
        replica.idle = part.rows == 0 and bool(part.global_rows)
        replica.control.stop = self.wants_stop()
        replica.control.regroup = worker.interrupted or (self.rounds_at_server and worker.broken)
        pushes = self._pushes()
        if worker.elastic and self.lockstep:
            self.under_way = part.global_rows or 0
            self._buffers_before = {name: buffer.clone() for name, buffer in replica.model.named_buffers()}
        worker.group.step = replica.step
        worker.driver.progress("compute", replica.step)
        apply_s, wait_s, rounds = replica.apply_seconds, self._waited_s(), replica.rounds
        start = clock()
        self.plan.strategy.before_backward(replica, worker, self.state)
        begun, communicated_s = clock(), replica.executor.communicated_s()
        replica.backward(part.batch)
        worker.driver.computed(0 if replica.skip or replica.executor.times_passes else part.rows)
        weight, rate = replica.weight, self._rate()
        if self.staleness is not None:
            self.staleness.before(replica.parameters, replica.gradients)
        middle = clock()
        turn = self._turn = _Turn(
            part,
            tick,
            values,
            weight,
            rate,
            replica.step,
            rounds,
            pushes,
            start,
            begun,
            middle,
            apply_s,
            wait_s,
            replica.executor.communicated_s() - communicated_s,
        )
        worker.driver.progress("exchange", replica.step)
        try:
            result = self.plan.strategy.exchange(replica, worker, self.state)
        except NotFinite as error:
            raise nonfinite.named(error, replica, worker, part) from error
        except PeerLost:
            if self.has_rounds and not self.rounds_at_server and replica.stepped:
                self._end_turn(turn)  # alone, as ever between rounds: it is the round that is not complete
            raise
        self._end_turn(turn, result)

    def _end_turn(self, turn: _Turn, result: StepResult | None = None) -> None:
        """The tick's step is made. result: of the exchange; None: a lost worker ended it after the step."""
        replica, worker, part = self.replica, self.worker, turn.part
        self._turn = None
        if result is None:
            result, replica.rounds = StepResult(applied=replica.step > turn.steps), turn.rounds
        self.anybody = result.rows_left
        if self.staleness is not None:
            self.staleness.after(replica.parameters, turn.rate, result.applied)
        self._pass_gate()
        self._buffers_before, self.under_way = None, 0
        end = worker.clock()
        apply_s, wait_s = replica.apply_seconds - turn.apply_s, self._waited_s() - turn.wait_s
        counts = worker.mesh.counts_rows
        rows = part.rows if counts else 0
        unused = 0 if result.used else rows
        self._count(part, rows, unused)
        left_out = self.state.left_out() if worker.elastic else None
        compute_s = turn.middle - turn.begun + apply_s - turn.communicated_s
        exchange_s = end - turn.middle + turn.begun - turn.start - apply_s - wait_s + turn.communicated_s
        self._record(
            tick=turn.tick,
            loss=replica.loss if rows else None,
            weight=turn.weight if counts else 0.0,
            rows=rows,
            unused=unused,
            input_s=self.input_s,
            compute_s=compute_s,
            exchange_s=exchange_s,
            wait_s=wait_s,
            round=replica.rounds > turn.rounds,
            rate=self._rate(),
            **({"global_rows": part.global_rows} if worker.elastic and part.global_rows is not None else {}),
            **({} if left_out is None else {"left_out": left_out}),
            **turn.values,
        )
        if self._plan_check is not None and self._plan_check.add(
            compute=compute_s, wait=wait_s, exchange=exchange_s, input=self.input_s
        ):
            found = self._plan_check.compare(worker, peak_bytes(worker.device))
            if worker.rank == 0:
                worker.emit("plan", tick=turn.tick, step=replica.step, **found)
        if self.worker_callback is not None and self.worker_callback.on_step(replica.loss if part.rows else None):
            self._called_off = True
        if (self.worker.elastic and not self.lockstep) or left_out is not None:
            self.flush()  # what is at the server, or what is not yet, is reported before this worker may be lost
        if self.lockstep:
            if self.rounds_at_server and self._pushes() > turn.pushes:
                replica.completed += 1
                replica.round_has_step = self.plan.strategy.push_has_step
            if self.ledger is not None and self.ledger.round != replica.completed:
                open_steps = self.plan.strategy.open_steps(self.state)
                self.begin_round(self.position.epoch_tick + replica.round_has_step - open_steps)
            self.position.tick += 1
            self.position.epoch_tick += 1
            first = self.position.epoch_tick if self.ledger is None else self.ledger.first
            self.train_feed.keep_from(self.position.epoch, first)
            self.phase = Phase.BETWEEN

    def _pushes(self) -> int:
        return 0 if self.worker.server is None else self.worker.server.pushes

    def _rate(self) -> float:
        return float(self.replica.optimizer.param_groups[0]["lr"])

    def _waited_s(self) -> float:
        server = self.worker.server
        waited_s = sum(group.waited_s for group in (self.worker.group, *self.worker.mesh.parts))
        waited_s += self.replica.executor.waited_s() + self._waited_s_before
        return waited_s + (0.0 if server is None else server.waited_s)

    def _pass_gate(self) -> None:
        """Wait at the gate; where all make the same ticks, receive their control bits."""
        server, replica, spec = self.worker.server, self.replica, self.spec
        if server is None or spec is None:
            return
        bits = self.worker.tick(replica.control.own)
        if spec.bound == 0:
            replica.control.received |= bits
            self.anybody = bool(bits & MORE)

    def _count(self, part: Slice, rows: int, unused: int) -> None:
        position = self.position
        if self.worker.elastic and part.global_rows is not None:  # a worker that is lost takes no count with it
            rows = part.global_rows if self.lockstep else 0  # else they are counted as all meet
            unused = part.global_rows if unused and self.lockstep and not self.has_rounds else unused
        position.local_steps += 1
        position.rows += rows
        position.unused += unused
        position.rounds = self.replica.rounds
        self.reads_whole |= (
            self.ticks_per_epoch is None and part.global_rows is not None and self.worker.mesh.rows[1] > 1
        )
        self.saver.loader = part.loader
        if part.dealt is not None:
            dealt = {**vars(part.dealt), "read": dict(part.dealt.read)}
            known = position.shards or dealt
            if (known["size"], known["begun"]) != (dealt["size"], dealt["begun"]):  # to others than before
                known = dealt
            known["read"].update(part.read)
            position.shards = known

    # -- records -----------------------------------------------------------------------------------------------------

    def _record(self, **values: Any) -> None:
        """Hold a tick's record back until it is known whether an epoch's end adds to its exchange."""
        self.flush()
        self._pending = {"step": self.replica.step, "epoch": self.position.epoch, **values}

    def flush(self) -> None:
        """Send the record of the last tick, with the server's values for it."""
        if self._pending is not None:
            sent = self._sent_bytes()
            ordered = {**self._server_values(), **self.state.drain_journal()}
            values = {**self._pending, "bytes": sent - self._sent, **ordered}
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

    def _ledgers(self) -> list[Ledger]:
        """Of all that this worker sends."""
        server = self.worker.server
        groups = [group.ledger for group in (self.worker.group, *self.worker.mesh.parts)]
        parts = [*groups, *self.replica.executor.ledgers(), self._ledger_before]
        return [*parts, *([] if server is None else [server.ledger])]

    def _sent_bytes(self) -> int:
        return sum(ledger.total_bytes for ledger in self._ledgers())

    def note_partial(self, slices: Sequence[Sequence[int]]) -> None:
        """These are all slices so far, as `End.partial` has them, that only some shards of the server have."""
        self.partial = [list(one) for one in slices]
        rows = sum(self.train_feed.rows_of(epoch, [Place(*place)]) for epoch, *place in slices)
        self.worker.emit("partial", tick=self.position.tick, step=self.replica.step, rows=rows)

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
        while worker.elastic and self.phase is Phase.CLOSE and self.epochs.take_back():
            self.plan.strategy.finish(replica, worker, self.state)
        if worker.server is not None:
            worker.server.deactivate()
            if self.rounds_at_server:
                worker.group.barrier()  # the epoch's rounds are over when nobody was lost in them
            self._after_the_last_push(worker.server.ledger.total_bytes > pushed)
        elif answer is not None and not answer.equal(self._answer()):
            self.validator.validated_at = -1
        wait_s = self._waited_s() - wait_s
        if self._pending is not None:
            self._pending["exchange_s"] += worker.clock() - start - wait_s
            self._pending["wait_s"] += wait_s
            self._pending["round"] = self._pending["round"] or replica.rounds > rounds
        self.position.rounds = replica.rounds
        if self.has_rounds:
            self.begin_round()
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

    def regroup_if_agreed(self) -> None:
        """Raise Regroup where this tick's exchange brought the wish to all: a member joins or leaves."""
        if self.replica.control.received & REGROUP:
            if self.has_rounds:
                self.close_round()  # whoever leaves takes nothing with it
            raise Regroup

    def close_round(self) -> None:
        """A collective: whatever was stepped on is in a round."""
        self.plan.strategy.finish(self.replica, self.worker, self.state)
        if self.worker.server is not None:
            self.worker.server.deactivate()
        self.position.rounds = self.replica.rounds
        self.begin_round()

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
        for every, action, done in (
            (self.plan.validate_every, self.validate, self.validator.validated_at),
            (self.plan.checkpoint_every, self.save, self.saver.saved),
        ):
            if isinstance(every, int) and self.position.tick % every == 0 and done != self.position.tick:
                self.flush()
                action()
        if self.position.tick % COLLECT_EVERY == 0:
            self.worker.driver.collect(self.worker.group)

    def save(self) -> None:
        """A checkpoint, where they are wanted, of replicas that are equal where that is promised."""
        self.plan.strategy.settle(self.replica, self.worker, self.state)  # also without one: a replay does the same
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
                self._obey(answer)
                self.replica.step_on(metrics)  # once, though a validation that a lost worker ended is made again
        if self.validator.validation is not None:
            self.validator.validated_at = self.position.tick

    def _end_epoch(self) -> None:
        if self.phase is Phase.VALIDATE:
            if self.plan.validate_every == "epoch":
                self.validate()
            self.phase = Phase.EPOCH
        if self.phase is Phase.EPOCH:
            if self.worker_callback is not None:
                metrics = self.validator.best.newest if self.validator.validated_at == self.position.tick else {}
                with self.validator.showing(self.state):
                    ends = self.worker_callback.on_epoch_end(self.ending, metrics)
                self.reason = self.reason or ("callback" if ends else "")
            if (counters := self.train_feed.source.counters) is not None:
                tick = self.position.tick
                self.worker.emit("input", tick=tick, step=tick, epoch=self.ending, **counters.to_json())
            self.worker.driver.collect(self.worker.group)
            self._obey(self._ask("epoch", rows=self.position.rows))
            self.phase = Phase.SAVE
        if self.phase is Phase.SAVE and (
            self.plan.checkpoint_every == "epoch" or self.position.epoch == self.task.epochs or self.finished()
        ):
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

    @cached_property
    def program_facts(self) -> fingerprint.Facts:
        """What this worker is about to train, before anything is shared."""
        task, feed, model = self.task, self.train_feed, self.replica.model
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
                **{name: getattr(task, name) for name in ("kernel", "rate", "last_rate", "rate_decay")},
            ),
            **({} if self.worker.mesh.own_rows else fingerprint.of_model(model)),  # else each holds other parts
            **fingerprint.of_rows(feed.source, "train_data", task.seed),
        }

    def compare_settings(self) -> None:
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
            self._check_due = False  # as with those who may join
            return
        agreed = self.plan.strategy.agreed(self.replica, self.state)
        if agreed is not None:
            self._check_due = False
            self.worker.driver.progress("checkpoint", self.replica.step)
            fingerprint.compare_replicas(self.worker, agreed, self.replica.norm, self._rate_facts(), self.position.tick)

    # -- beginning and end -------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        groups, size, replicas = self.replica.optimizer.param_groups, self.worker.size, self.worker.mesh.rows[1]
        if self.worker.elastic:
            size, replicas = self._replicas * self.worker.mesh.model.size, self._replicas
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
            "parameters": self.replica.parameter_count(),
            "threads": torch.get_num_threads(),
            "device": str(self.worker.device),
            "loader_processes": loading.processes,
            "loader_option": loading.option,
            "clip_norm": self.task.clip_norm,
            **self._cells(),
            **self._sparsity(),
            **self.replica.executor.facts(),
        }

    def _cells(self) -> dict[str, Any]:
        """How the rows are cut, where the strategy cuts them."""
        source = self.train_feed.source
        if not isinstance(source, Strata):
            return {}
        return {"cells": {"blocks": source.blocks, "imbalance": source.imbalance}}

    def _sparsity(self) -> dict[str, Any]:
        """How rarely rows touch the same rows of tables, where a strategy steps on them without locks."""
        kernel, source = self.task.kernel, self.train_feed.source
        if (
            kernel is None
            or not self.plan.strategy.traits.lock_free
            or self.worker.rank
            or not isinstance(source, Indexed)
        ):
            return {}
        if find_spec("numba") is None:  # a kernel of the user's own need not be compiled
            return {}
        from manyhands.sparse.sparsity import sparsity

        rows = min(source.rows, SPARSITY_ROWS)
        touched = kernel.touched(source.load_here(Pick(0, range(rows), rows), Reading()).batch)
        return {} if touched is None else {"sparsity": vars(sparsity(touched, seconds=SPARSITY_S)) | {"rows": rows}}

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

    def announce(self) -> None:
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
        if self.worker.elastic and self.worker.mesh.rows[1] != self._replicas:
            self.announce_membership(0)
        if self.worker_callback is not None:
            self.worker_callback.on_start(self.facts)

    def announce_membership(self, repeated: int) -> None:
        """Who trains from here on; as `announce`, before the first step of these members, and after all that they have
        reported until here. repeated: rows that were trained on in vain."""
        if self.worker.rank:
            self.worker.ask("sync", first=False)
        self.worker.group.barrier()
        if self.worker.rank == 0:
            tick = self.position.tick
            self.worker.ask("membership", tick=tick, step=tick, workers=self.worker.size, repeated=repeated)
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
        answer = self.validator.answer(self.state, over=over, worker_callback=self.worker_callback if over else None)
        worker.driver.collect(worker.group)
        ledger = Ledger()
        for one in self._ledgers():
            ledger.include(one)
        own = {"rows": self.position.rows, "unused": self.position.unused, "ledger": ledger.as_dict()}
        if worker.elastic and worker.rank:  # each has counted everybody's
            own |= {"rows": 0, "unused": 0 if self.lockstep and not self.has_rounds else own["unused"]}
        if (counters := self.train_feed.source.counters) is not None:
            own |= {"input": counters.to_json() | {"stored_bytes": self.train_feed.source.stored_bytes}}
        if not worker.shares_process:
            own |= {"memory": peak_bytes(worker.device), "cores": cores.report(torch.get_num_threads())}
        return Outcome(
            states=answer.states,
            file=answer.file,
            saved=replica.executor.saved(),
            metrics=answer.metrics,
            workers=worker.group.all_gather_json(own),
            steps=replica.step,
            ticks=self.position.tick,
            rounds=replica.rounds,
            reason=self.reason,
            seconds=worker.clock() - self.began,
            facts=self.facts | self._kept() | ({"reads_whole_stream": True} if self.reads_whole else {}),
            callback_result=answer.callback_result,
        )


def own_pace_on_a_stream(strategy: str) -> str:
    """Why such a run cannot go on without a worker that is lost."""
    return (
        f"survive: the workers of strategy {strategy} go at their own pace, and of a stream each reads rows of its own, which "
        "nobody could train in its place: give a Dataset or arrays, use a strategy in step (allreduce, local-sgd), or give "
        'max_restarts alone (survive="max_restarts=3")'
    )


def falling(last: float, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """From the rate to this share of it, in a line over all steps."""
    return LambdaLR(optimizer, lambda step: 1 - (1 - last) * min(1.0, step / total_steps))


def peak_bytes(device: torch.device) -> int:
    """The largest resident memory of this process so far, in bytes; on a GPU, the largest that it allocated there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
