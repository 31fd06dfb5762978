"""Checkpoints of a training run: when one was written last, what it holds, and how a run goes on from one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.checkpoint import checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.data.feed import Feed
from manyhands.errors import BadInput
from manyhands.replica.replica import Replica
from manyhands.strategies import spec_of
from manyhands.strategies.base import State
from manyhands.training.best_model import BestModel
from manyhands.training.plan import TrainingPosition, WorkerPlan
from manyhands.worker import Worker


@dataclass
class Saver:
    """Writes this worker's part of each checkpoint, and reads it again."""

    plan: WorkerPlan
    worker: Worker
    replica: Replica
    feed: Feed  # of the training data
    total_ticks: int | None  # of the whole training
    best: BestModel
    saved: int = -1  # the tick of the newest checkpoint of this launch
    held: frozenset[str] = frozenset()  # the tensors that the strategy's state had at its start, by field
    warnings: list[str] = field(default_factory=list)  # of resuming

    def __post_init__(self) -> None:
        self._declared = run_state.declared(self.replica)

    def save(self, position: TrainingPosition, state: State) -> None:
        """A collective; nothing where no checkpoints are wanted."""
        if self.plan.checkpoints is None:
            return
        if late := sorted(state.tensors().keys() - self.held):
            raise BadInput(
                f"{type(state).__name__}.{late[0]} of strategy {self.plan.strategy.name} became a tensor after start(), so no run could resume from a "
                "checkpoint with it: make it in start() (replica.zeros(), or zeros of its shape)"
            )
        self.saved = position.tick
        self.worker.driver.progress("checkpoint", self.replica.step)
        start = self.worker.clock()
        facts = {"total": self.total_ticks, "threads": torch.get_num_threads(), "fingerprint": self._fingerprint()}
        facts["options"] = self._options()
        where = {**vars(position), **facts}
        equal = self.plan.strategy.agreed(self.replica, state) is self.replica.parameters
        counted = not equal or self.worker.mesh.data.rank == 0
        tensors, values = run_state.capture(self.replica, state, where, self._declared, counted)
        kept, values["keep"] = self.best.capture(self.replica) if self._keeps_best() else ({}, None)
        shared: run_state.Tensors = {}
        server = self.worker.server
        if server is not None:
            self.worker.group.barrier()  # all have pushed what they push
            if self.worker.rank == 0:
                shared, values["server"] = run_state.capture_server(server, self.replica)
        values["callbacks"] = self._sync_events()
        path = checkpoints.save(
            self.plan.checkpoints,
            position.tick,
            self.worker.group,
            {**tensors, **kept, **shared},
            values,
            claim=self.plan.claim,
            warn=self._warn,
        )
        if self.worker.rank == 0:
            seconds = self.worker.clock() - start
            self.worker.emit("checkpoint", tick=position.tick, step=position.tick, path=str(path), seconds=seconds)

    def _sync_events(self) -> list[Any]:
        """A collective: all events that the checkpoint counts are on disk before its manifest. The states of the
        driver's callbacks, which have seen them, on rank 0.
        """
        worker = self.worker
        worker.driver.collect(worker.group)
        if worker.rank:
            worker.ask("sync")
        worker.group.barrier()
        if worker.rank:
            return []
        answer = worker.ask("sync")  # the driver has by then what all ranks have sent
        return list(answer.get("callbacks", []))

    def _warn(self, message: str) -> None:
        self.worker.emit("warning", step=self.replica.step, message=message)

    def _keeps_best(self) -> bool:
        """Whether this rank's checkpoint holds the best model: rank 0's holds everybody's, a member its own."""
        return self.worker.rank == 0 or not self.plan.strategy.needs.one_model

    def resume(self, saved: Checkpoint, state: State) -> tuple[State, TrainingPosition]:
        """Restore replica, server and best model from a checkpoint; the strategy's state and the position."""
        with checkpoints.within_reach(saved, self.worker.group) as there:
            return self._resume(there, state)

    def _resume(self, saved: Checkpoint, state: State) -> tuple[State, TrainingPosition]:
        self._check(saved)
        rank, size = self.worker.rank, self.worker.size
        state, values = run_state.restore(
            saved, self.replica, state, rank, size, self.total_ticks, self.warnings.append
        )
        was, now = values["options"], self._options()
        for fact in ("total", "threads", "fingerprint", "options"):
            del values[fact]
        if was != now:
            differing = ", ".join(
                f"{name} was {was.get(name)} and is {now[name]}" for name in now if was.get(name) != now[name]
            )
            self.warnings.append(
                f"these settings differ from the checkpoint's: {differing}. The new ones are used from step "
                f"{saved.tick} on. To keep the old ones, give them again"
            )
        position = TrainingPosition(**values)
        if rank == 0 and self.plan.checkpoints is not None:
            checkpoints.discard_newer(
                self.plan.checkpoints, saved.tick, self.warnings.append
            )  # they were passed over: they are damaged
        if rank == 0 and self.worker.server is not None:
            run_state.restore_server(saved, self.worker.server, self.replica)
        if saved.ranks != size:  # what was counted by ranks that are no more stands with rank 0
            positions = [saved.values(r)["position"] for r in range(saved.ranks)] if rank == 0 else []
            for count in ("rows", "unused"):
                setattr(position, count, sum(p[count] for p in positions))
        self.replica.rounds, self.replica.tick = position.rounds, max(0, position.tick - 1)
        source = rank if self._keeps_best() else 0
        kept = saved.tensors(source) if self.plan.keep.metric else {}
        self.best.restore(self.replica, kept, saved.values(source)["keep"])
        return state, position

    def _check(self, saved: Checkpoint) -> None:
        was, now = saved.values(0)["position"]["fingerprint"], self._fingerprint()
        if was != now:
            differing = ", ".join(
                f"{key} was {was.get(key)} and is {now.get(key)}" for key in now if was.get(key) != now.get(key)
            )
            raise BadInput(
                f"cannot resume from {saved.path}: {differing}. Give the old values, or start in another run directory"
            )

    def _options(self) -> dict[str, Any]:
        """What a run may go on with otherwise than it began, and says so."""
        task = self.plan.task
        return {"strategy": spec_of(self.plan.strategy), "clip_norm": task.clip_norm, "precision": task.precision}

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to mean the same."""
        task = self.plan.task
        return {
            "strategy": self.plan.strategy.name,
            "seed": task.seed,
            "rows": self.feed.rows,
            "batch_size": self.feed.batch_size,
            "ticks_per_epoch": self.feed.ticks,
            "shuffle": task.shuffle,
        }
