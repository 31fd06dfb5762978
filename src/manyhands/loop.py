"""The one worker loop: what every worker of a training run does, whatever the strategy and the engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import checkpoint, evaluation, random_state, snapshot
from manyhands.checkpoint import Checkpoint
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed, Slice
from manyhands.data.sources import open_source
from manyhands.errors import BadInput
from manyhands.plan import Outcome, Place, Plan, State, build_model, global_batch
from manyhands.replica import STOP, Replica
from manyhands.run import environment
from manyhands.signals import PREEMPTED
from manyhands.worker import Worker

EMPTY = Slice(batch=None, rows=0, global_rows=None, index=-1)


def work(plan: Plan, worker: Worker) -> Outcome | None:
    """Train on this worker; a collective of all workers of the run. None where rank 0 found the run finished."""
    worker.coordinator.progress("start", 0)
    if plan.everywhere and any(worker.group.all_gather_json(plan.finished)):
        return None
    loop = Loop(plan, worker)
    try:
        loop.run()
        return loop.outcome()
    finally:
        loop.replica.layout.detach()


class Loop:
    """The state of one worker's training."""

    def __init__(self, plan: Plan, worker: Worker) -> None:
        self.plan, self.worker, self.task = plan, worker, plan.task
        many = not plan.strategy.needs.one_model
        random_state.seed_all(plan.task.seed, worker.rank if many else 0)
        model = build_model(plan.task).to(worker.device)
        self.train_feed = self._feed(plan.task.train_data, train=True)
        self.ticks_per_epoch = self.train_feed.ticks
        self.replica = self._replica(model)
        if worker.rank and not many:
            random_state.seed_all(plan.task.seed, worker.rank)  # dropout draws per rank
        self.state = plan.strategy.start(self.replica, worker)
        self.place = Place()
        self.reason = ""
        self.began = worker.clock()
        self.validation_feed = self._feed(plan.task.validation_data) if plan.task.validation_data is not None else None
        self.test_feed = self._feed(plan.task.test_data) if plan.task.test_data is not None else None
        if plan.resume_from is not None:
            self._resume(plan.resume_from)
        self._pending: dict[str, Any] | None = None

    def _feed(self, data: Any, train: bool = False) -> Feed:
        task, worker = self.task, self.worker
        source = open_source(data, collate=task.collate, loader_processes=task.loader_processes)
        own = source.batch_size if not train else None  # a validation loader's batches have nothing to do with a step's
        return Feed(
            source,
            rank=worker.rank,
            size=worker.size,
            batch_size=own or global_batch(task, worker.size, source.batch_size),
            seed=task.seed,
            shuffle=train and task.shuffle,
            order=task.order if train else None,
            device=worker.device,
        )

    def _replica(self, model: nn.Module) -> Replica:
        task, total = self.task, self.total_ticks()
        if task.schedule is not None and total is None:
            raise BadInput("a schedule needs the number of steps, and a stream has no length: give max_steps")
        schedule = None if task.schedule is None else lambda optimizer: task.schedule(optimizer, total)  # type: ignore[misc,arg-type]
        return Replica(
            model,
            task.optimizer,
            group=self.worker.group,
            loss=task.loss,
            schedule=schedule,
            clip_norm=task.clip_norm,
            precision=task.precision,
            micro_batch_size=task.micro_batch_size,
            nonfinite=self.plan.nonfinite,
        )

    def total_ticks(self) -> int | None:
        """Ticks of the whole training, None for a stream without max_steps."""
        sized = None if self.ticks_per_epoch is None else self.ticks_per_epoch * self.task.epochs
        return min((n for n in (sized, self.task.max_steps) if n is not None), default=None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All epochs, or until something stops them."""
        self._announce()
        while self.place.epoch < self.task.epochs and not self._finished():
            self._epoch()
        if self.reason and self._saved != self.place.tick:
            self._save()
        if self.reason != PREEMPTED and self._judged != self.place.tick:
            self._validate(last=True)  # the newest metrics are those of the final parameters

    def _finished(self) -> bool:
        return bool(self.reason) or (self.task.max_steps is not None and self.place.tick >= self.task.max_steps)

    def _epoch(self) -> None:
        place = self.place
        complete = self._ticks()
        if self.reason:
            self._save()  # before the open window is closed, so that a resumed run goes on as if never interrupted
            self._finish(last=True)
            return
        if complete:
            place.epoch, place.epoch_tick = place.epoch + 1, 0
        self._finish(last=place.epoch == self.task.epochs or self._finished())
        self._stopped()  # a strategy whose rounds are longer than an epoch hears it only now
        self._end_epoch()

    def _ticks(self) -> bool:
        """Turn until the epoch's rows are out (True), or until something stops it."""
        self.replica.model.train()
        self.anybody = True
        with closing(self.train_feed.epoch(self.place.epoch, self.place.epoch_tick)) as slices:
            for part in self._turns(slices):
                self.turn(part)
                if self._stopped():
                    return False
                self._between()
                if self._finished():
                    return not self.reason and self.place.epoch_tick == self.ticks_per_epoch
        return True

    def _turns(self, slices: Iterator[Slice]) -> Generator[Slice, None, None]:
        """The slices of an epoch, timed; on a stream, empty ones after the last until a round hears that nobody has more."""
        sized = self.ticks_per_epoch is not None
        ahead = self._next(slices)
        while sized or self._going(ahead):
            if sized and ahead is None:
                return
            current, input_s = ahead if ahead is not None else (EMPTY, 0.0)
            self.input_s = input_s
            if not sized:
                ahead = self._next(slices)
            self.replica.more = not sized and ahead is not None
            yield current
            if sized:
                ahead = self._next(slices)

    def _going(self, ahead: tuple[Slice, float] | None) -> bool:
        return ahead is not None or self.anybody

    anybody = True  # somebody may have rows: the last exchange's answer

    def _next(self, slices: Iterator[Slice]) -> tuple[Slice, float] | None:
        self.worker.coordinator.progress("input", self.replica.step)
        start = self.worker.clock()
        part = next(slices, None)
        return None if part is None else (part, self.worker.clock() - start)

    def turn(self, part: Slice) -> None:
        """One tick: gradient, exchange, and the record of both."""
        replica, worker, clock = self.replica, self.worker, self.worker.clock
        replica.begin_tick()
        replica.tick = self.place.tick
        replica.idle = part.rows == 0 and bool(part.global_rows)
        replica.stop = self._wants_stop()
        worker.group.step = replica.step
        worker.coordinator.progress("compute", replica.step)
        apply_s, wait_s, rounds = replica.apply_seconds, worker.group.waited_s, replica.rounds
        start = clock()
        self.plan.strategy.before_backward(replica, worker, self.state)
        loss = replica.backward(part.batch)
        weight = replica.weight
        middle = clock()
        worker.coordinator.progress("exchange", replica.step)
        self.anybody = self.plan.strategy.exchange(replica, worker, self.state)
        end = clock()
        apply_s, wait_s = replica.apply_seconds - apply_s, worker.group.waited_s - wait_s
        self._count(part)
        self._record(
            loss=loss if part.rows else None,
            weight=weight,
            rows=part.rows,
            unused=0 if replica.applied else part.rows,
            input_s=self.input_s,
            compute_s=middle - start + apply_s,
            exchange_s=end - middle - apply_s - wait_s,
            wait_s=wait_s,
            round=replica.rounds > rounds,
            rate=float(replica.optimizer.param_groups[0]["lr"]),
        )

    def _count(self, part: Slice) -> None:
        place = self.place
        place.tick += 1
        place.epoch_tick += 1
        place.rows += part.rows
        place.unused += 0 if self.replica.applied else part.rows
        place.rounds = self.replica.rounds

    def _record(self, **values: Any) -> None:
        """Hold a tick's record back until it is known whether an epoch's end adds to its exchange."""
        self._flush()
        self._pending = {"tick": self.replica.tick, "step": self.replica.step, "epoch": self.place.epoch, **values}

    def _flush(self) -> None:
        if self._pending is not None:
            sent = self.worker.group.ledger.total_bytes
            values = {**self._pending, "bytes": sent - self._sent}
            self._sent, self._pending = sent, None
            self.worker.emit("step", **values)

    _sent = 0

    def _finish(self, last: bool) -> None:
        """Let the strategy close its open round; its seconds belong to the last tick's exchange."""
        worker, replica = self.worker, self.replica
        replica.check()
        replica.last, replica.stop = last, self._wants_stop()
        start, wait_s, rounds = worker.clock(), worker.group.waited_s, replica.rounds
        self.plan.strategy.finish(replica, worker, self.state)
        wait_s = worker.group.waited_s - wait_s
        if self._pending is not None:
            self._pending["exchange_s"] += worker.clock() - start - wait_s
            self._pending["wait_s"] += wait_s
            self._pending["round"] = self._pending["round"] or replica.rounds > rounds
        self.place.rounds = replica.rounds
        self._flush()

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _wants_stop(self) -> bool:
        limit = self.plan.max_seconds
        self._own_reason = self.worker.coordinator.should_stop()
        if not self._own_reason and limit is not None and self.worker.clock() - self.began >= limit:
            self._own_reason = "max_seconds"
        return bool(self._own_reason)

    _own_reason = ""

    def _stopped(self) -> bool:
        """Whether this tick's exchange told all workers to stop; they all hear it at the same tick."""
        if self.replica.heard & STOP:
            self.reason = self._agree_on(self._own_reason)
        return bool(self.reason)

    def _agree_on(self, reason: str) -> str:
        return next((r for r in self.worker.group.all_gather_json(reason) if r), "stopped")

    # -- between ticks and epochs ------------------------------------------------------------------------------------

    def _between(self) -> None:
        for every, action in ((self.plan.validate_every, self._validate), (self.plan.checkpoint_every, self._save)):
            if isinstance(every, int) and self.place.tick % every == 0:
                self._flush()
                action()

    def _end_epoch(self) -> None:
        if self.plan.validate_every == "epoch":
            self._validate()
        if self.plan.checkpoint_every == "epoch" or self.place.epoch == self.task.epochs or self._finished():
            self._save()
        self.worker.coordinator.collect(self.worker.group)
        self._obey(self._ask("epoch", rows=self.place.rows))

    def _ask(self, type: str, **values: Any) -> str:
        """Rank 0 asks the driver; what it says is the same for all ranks after `_obey`."""
        if self.worker.rank:
            return ""
        return str(
            self.worker.ask(type, tick=self.replica.tick, step=self.replica.step, epoch=self.place.epoch, **values).get(
                "stop", ""
            )
        )

    def _obey(self, answer: str) -> None:
        said = [reason for reason in self.worker.group.all_gather_json(answer) if reason]
        if said:
            self.reason = said[0]

    def _validate(self, last: bool = False) -> None:
        """Judge, and tell; a stop that is answered after the last tick says nothing any more."""
        metrics, best = self._judge()
        if metrics:
            self.worker.coordinator.collect(self.worker.group)
            answer = self._ask("validation", metrics=metrics, best=best)
            if not last:
                self._obey(answer)

    def _judge(self) -> tuple[dict[str, float], bool]:
        """Validation metrics of the consensus as it is now, offered to `keep`; ({}, False) without validation data."""
        if self.validation_feed is None:
            return {}, False
        self._judged = self.place.tick
        consensus = self.plan.strategy.consensus(self.replica, self.worker, self.state)
        buffers = self._buffers()
        metrics = self._evaluate(self.validation_feed, consensus, buffers, "validation_")
        return metrics, self.plan.keep.offer(metrics, consensus, buffers)

    def _buffers(self) -> dict[str, Tensor]:
        """Those of the one answer, or this rank's own where there are N."""
        group = self.worker.group if self.plan.strategy.needs.one_model else SoloGroup()
        return evaluation.mean_buffers(self.replica.model, group)

    _judged = -1  # the tick of the newest validation

    def _evaluate(self, feed: Feed, parameters: Tensor, buffers: dict[str, Tensor], prefix: str) -> dict[str, float]:
        worker = self.worker

        def progress(batch: int) -> None:
            worker.coordinator.progress("validation", batch)

        with evaluation.holding(self.replica, parameters, buffers) as model:
            judged = model if self.plan.strategy.needs.one_model else evaluation.ensemble_of(self.replica, worker.group)
            metrics = evaluation.evaluate(self.task, judged, feed, worker.group, progress)
        return {prefix + name: value for name, value in metrics.items()}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    _saved = -1  # the tick of the newest checkpoint of this launch

    def _save(self) -> None:
        if self.plan.checkpoints is None:
            return
        self._saved = self.place.tick
        self.worker.coordinator.progress("checkpoint", self.replica.step)
        start = self.worker.clock()
        facts = {"total": self.total_ticks(), "threads": torch.get_num_threads(), "fingerprint": self._fingerprint()}
        place = {**vars(self.place), **facts}
        tensors, values = snapshot.capture(self.replica, self.state, place)
        kept_tensors, values["keep"] = self.plan.keep.capture(self.replica) if self._keeps_best() else ({}, None)
        path = checkpoint.save(
            self.plan.checkpoints, self.place.tick, self.worker.group, {**tensors, **kept_tensors}, values
        )
        if self.worker.rank == 0:
            self.worker.emit(
                "checkpoint",
                tick=self.place.tick,
                step=self.replica.step,
                path=str(path),
                seconds=self.worker.clock() - start,
            )

    def _keeps_best(self) -> bool:
        """Whether this rank's checkpoint holds what is best: rank 0's is everybody's, an ensemble's member is its own."""
        return self.worker.rank == 0 or not self.plan.strategy.needs.one_model

    def _resume(self, saved: Checkpoint) -> None:
        was, now = saved.values(0)["place"]["fingerprint"], self._fingerprint()
        if was != now:
            differing = ", ".join(
                f"{key} was {was.get(key)} and is {now.get(key)}" for key in now if was.get(key) != now.get(key)
            )
            raise BadInput(
                f"cannot resume from {saved.path}: {differing}. Give what it was, or start in another run directory"
            )
        total, rank, size = self.total_ticks(), self.worker.rank, self.worker.size
        self.state, place = snapshot.restore(saved, self.replica, self.state, rank, size, total)
        for fact in ("total", "threads", "fingerprint"):
            del place[fact]
        self.place = Place(**place)
        if rank == 0 and self.plan.checkpoints is not None:
            checkpoint.discard_newer(self.plan.checkpoints, saved.tick)  # they were passed over: they are damaged
        if saved.ranks != self.worker.size:  # what was counted by ranks that are no more stands with rank 0
            places = [saved.values(rank)["place"] for rank in range(saved.ranks)] if self.worker.rank == 0 else []
            self.place.rows, self.place.unused = sum(p["rows"] for p in places), sum(p["unused"] for p in places)
        self.replica.rounds, self.replica.tick = self.place.rounds, max(0, self.place.tick - 1)
        source = rank if self._keeps_best() else 0
        self.plan.keep.restore(self.replica, saved.tensors(source), saved.values(source)["keep"])

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to mean the same."""
        return {
            "strategy": self.plan.strategy.name,
            "seed": self.task.seed,
            "rows": self.train_feed.rows,
            "batch_size": self.train_feed.batch_size,
            "ticks_per_epoch": self.ticks_per_epoch,
            "shuffle": self.task.shuffle,
        }

    # -- beginning and end -------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        groups, size = self.replica.optimizer.param_groups, self.worker.size
        return {
            "rows": self.train_feed.rows,
            "ticks_per_epoch": self.ticks_per_epoch,
            "epochs": self.task.epochs,
            "total_steps": self.total_ticks(),
            "batch_size": self.train_feed.batch_size,
            "batch_size_per_worker": self.train_feed.batch_size / size,
            "rate": float(groups[0]["lr"]),
            "effective_rate": float(groups[0]["lr"]),
            "parameters": self.replica.layout.size,
            "threads": torch.get_num_threads(),
            "device": str(self.worker.device),
        }

    def _announce(self) -> None:
        self.facts = self._facts()
        if self.worker.rank == 0:
            self.worker.emit("start", tick=self.place.tick, step=self.replica.step, **self.facts, **environment())
        self.worker.group.barrier()

    def outcome(self) -> Outcome:
        """The consensus, or the best that was kept, its metrics, and all workers' counts."""
        worker, replica, keep = self.worker, self.replica, self.plan.keep
        worker.coordinator.progress("end", replica.step)
        consensus = self.plan.strategy.consensus(replica, worker, self.state)
        buffers = self._buffers()
        metrics = dict(keep.newest)
        if keep.parameters is not None:
            consensus, buffers, metrics = keep.parameters, keep.buffers, dict(keep.metrics)
        if self.test_feed is not None and self.reason != PREEMPTED:
            metrics |= self._evaluate(self.test_feed, consensus, buffers, "test_")
        worker.coordinator.collect(worker.group)
        own = {"rows": self.place.rows, "unused": self.place.unused, "ledger": worker.group.ledger.as_dict()}
        return Outcome(
            states=self._states(consensus, buffers),
            metrics=metrics,
            workers=worker.group.all_gather_json(own),
            steps=replica.step,
            ticks=self.place.tick,
            rounds=replica.rounds,
            reason=self.reason,
            facts=self.facts,
        )

    def _states(self, parameters: Tensor, buffers: dict[str, Tensor]) -> list[State]:
        """On the ranks that want them: the answer's values, or each ensemble member's, on the CPU, in memory of their own."""
        wanted = self.worker.rank == 0 or self.plan.everywhere
        if self.plan.strategy.needs.one_model:
            named = self.replica.named(parameters)
            return [(_own(named), _own(buffers))] if wanted else []
        with evaluation.holding(self.replica, parameters, buffers):
            members = evaluation.ensemble_of(self.replica, self.worker.group).members
        trainable = self.replica.layout.names
        states = [({n: p for n, p in m.named_parameters() if n in trainable}, dict(m.named_buffers())) for m in members]
        return [(_own(p), _own(b)) for p, b in states] if wanted else []


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
