"""Checkpoints of a training run: when one was written last, what it holds, and how a run goes on from one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.checkpoint import by_replica, checkpoints, run_state
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.checkpoint.part_writer import PartWriter, WrittenPart
from manyhands.data.feed import Feed
from manyhands.data.loader_position import LoaderPosition
from manyhands.data.source import ShardPositions
from manyhands.errors import BadInput
from manyhands.events import Event
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
    loader: LoaderPosition | None = None  # after the newest batch that is trained on

    def __post_init__(self) -> None:
        self.declared = run_state.declared(self.replica)
        self._writer = PartWriter(at_once=self.worker.shares_process)
        self._resumed: ShardPositions | None = None  # of the epoch in which this launch went on

    def save(self, position: TrainingPosition, state: State) -> None:
        """A collective; nothing where no checkpoints are wanted."""
        if self.plan.checkpoints is None:
            return
        if late := sorted(state.tensors().keys() - self.held):
            raise BadInput(
                f"{type(state).__name__}.{late[0]} of strategy {self.plan.strategy.name} became a tensor after start(), so no run could resume from a "
                "checkpoint with it: make it in start() (replica.zeros(), or zeros of its shape)"
            )
        self.worker.driver.progress("checkpoint", self.replica.step)
        start = self.worker.clock()
        self._writer.wait()  # one at a time: a second one would need memory of its own
        facts = {"total": self.total_ticks, "threads": torch.get_num_threads(), "fingerprint": self._fingerprint()}
        facts["options"] = self._options()
        where = {**vars(position), **facts, "shards": self._shards(position), "loader": self._loader(position)}
        if self.worker.elastic and self.worker.rank:
            where |= {"rows": 0, "unused": 0}  # each has counted everybody's, and a checkpoint's ranks are summed up
        equal = self.plan.strategy.agreed(self.replica, state) is self.replica.parameters
        counted = not equal or self.worker.mesh.data.rank == 0
        tensors, values = run_state.capture(self.replica, state, where, self.declared, counted)
        kept, values["keep"] = self.best.capture(self.replica) if self._keeps_best() else ({}, None)
        shared: run_state.Tensors = {}
        server = self.worker.server
        if server is not None:
            self.worker.group.barrier()  # all have pushed what they push
            if self.worker.mesh.data.rank == 0:
                shared, values["server"] = run_state.capture_server(server, self.replica)
        tensors |= kept | shared
        if self.worker.elastic:
            self._save_beside_training(position.tick, tensors, values, start)
        else:
            self._save_now(position.tick, tensors, values, start)
        self.saved = position.tick  # now: one that a lost worker ended is made again

    def _shards(self, position: TrainingPosition) -> dict[str, Any] | None:
        """What is out of all workers' shards."""
        if self.feed.ticks is not None or self.worker.elastic:
            return None
        found = [own for own in self.worker.group.all_gather_json(position.shards) if own]
        if self._resumed is not None:  # who has read nothing since then knows of no new deal
            was = self._resumed.size, self._resumed.begun
            found = [own for own in found if (own["size"], own["begun"]) != was] or found
        return vars(ShardPositions.together([ShardPositions(**own) for own in found])) if found else None

    def _loader(self, position: TrainingPosition) -> str | None:
        """Where the loader stands, where it knows: all workers read the same, and the first one's is everybody's."""
        loader = None if self.worker.rank else self.loader
        if loader is None or (loader.epoch, loader.batches) != (position.epoch, position.epoch_tick):
            return None  # at an epoch's end it stands nowhere
        return loader.text()

    def _save_now(self, tick: int, tensors: run_state.Tensors, values: dict[str, Any], start: float) -> None:
        """All of it is on the disk when this returns."""
        assert self.plan.checkpoints is not None
        values["callbacks"] = self._sync_events().get("callbacks", [])
        path = checkpoints.save(
            self.plan.checkpoints,
            tick,
            self.worker.group,
            tensors,
            values,
            claim=self.plan.claim,
            warn=self._warn,
        )
        if self.worker.rank == 0:
            seconds = self.worker.clock() - start
            self.worker.emit("checkpoint", tick=tick, step=tick, path=str(path), seconds=seconds)

    def _save_beside_training(
        self, tick: int, tensors: run_state.Tensors, values: dict[str, Any], start: float
    ) -> None:
        """A copy is all that this waits for; each rank reports its part to the driver once it is written."""
        worker = self.worker
        assert self.plan.checkpoints is not None
        answer = self._sync_events(tick=tick, members=list(worker.members))
        values["callbacks"] = answer.get("callbacks", [])
        token = worker.group.all_gather_json(answer.get("token", ""))[0]
        if not token:
            return  # the driver could not make the folder, and has said so
        self._writer.copy(tensors)
        partial = checkpoints.partial_of(self.plan.checkpoints, tick, token)
        where = {"generation": worker.generation, "rank": worker.worker_id, "tick": tick, "step": tick}
        stall_s: float | None = None

        def report(part: WrittenPart) -> None:  # in the thread, when the worker may be in another generation
            now = worker.clock()
            took = {"seconds": now - start, "stall_s": now - start if stall_s is None else stall_s}
            worker.driver.emit(Event(type="part", time_s=now, **where, values=part.as_dict() | took))

        self._writer.start(partial, worker.group, json.dumps(values).encode(), report)
        stall_s = worker.clock() - start

    def settle(self) -> bool:
        """A collective at the run's end: wait until the newest checkpoint is written. False: it was dropped, because a
        worker was lost, and is to be saved again. Where that failed, the driver ends the run."""
        if not self.worker.elastic or self.saved < 0 or self.plan.checkpoints is None:
            return True
        self.worker.driver.progress("checkpoint", self.replica.step)
        self._writer.wait()
        self.worker.driver.progress("wait", self.replica.step)  # for the others: who hangs in its write is the culprit
        answer = self._sync_events(tick=self.saved, settle=self.saved)
        return bool(self.worker.group.all_gather_json(answer.get("whole", False))[0])

    def wait(self) -> None:
        """Until this worker's part is written and reported: it leaves."""
        self._writer.wait()

    def _sync_events(self, **values: Any) -> dict[str, Any]:
        """A collective: the driver has all events that the checkpoint counts, and on disk before its manifest. Its answer
        to `values`, with the states of its callbacks, which have seen them, on rank 0; {} on others.
        """
        worker = self.worker
        worker.driver.collect(worker.group)
        who = {"first": worker.rank == 0} if worker.elastic else {}  # events name a worker by its id
        if worker.rank:
            worker.ask("sync", **who)
        worker.group.barrier()
        if worker.rank:
            return {}
        return worker.ask("sync", **who, **values)  # the driver has by then what all ranks have sent

    def _warn(self, message: str) -> None:
        self.worker.emit("warning", step=self.replica.step, message=message)

    def _keeps_best(self) -> bool:
        """Whether this rank's checkpoint holds the best model: the first replica's holds everybody's, a member its own."""
        return self.worker.mesh.data.rank == 0 or not self.plan.strategy.needs.one_model

    def resume(self, saved: Checkpoint, state: State) -> tuple[State, TrainingPosition]:
        """Restore replica, server and best model from a checkpoint; the strategy's state and the position."""
        with checkpoints.within_reach(saved, self.worker.group) as there:
            return self._resume(there, state)

    def _resume(self, saved: Checkpoint, state: State) -> tuple[State, TrainingPosition]:
        self._check(saved)
        rank, size, mesh = self.worker.rank, self.worker.size, self.worker.mesh
        snapshot: run_state.Snapshot = saved
        place = rank, size
        if (then := by_replica.members_of(saved.values(0))) != mesh.model.size or (then > 1 and saved.ranks != size):
            snapshot, place = (
                by_replica.ByReplica(saved, set(self.replica.layout.names)),
                (mesh.data.rank, mesh.data.size),
            )
        state, values = run_state.restore(snapshot, self.replica, state, *place, self.total_ticks, self.warnings.append)
        was, now = values["options"], self._options()
        if was != now:
            differing = ", ".join(
                f"{name} was {was.get(name)} and is {now[name]}" for name in now if was.get(name) != now[name]
            )
            self.warnings.append(
                f"these settings differ from the checkpoint's: {differing}. The new ones are used from step "
                f"{saved.tick} on. To keep the old ones, give them again"
            )
        facts = ("total", "threads", "fingerprint", "options", "loader")
        position = TrainingPosition(**{name: value for name, value in values.items() if name not in facts})
        if (text := saved.values(0)["position"].get("loader")) is not None:
            self.loader = LoaderPosition.read(text)
        if position.shards is not None:
            self._resumed = ShardPositions(**position.shards)
        self.feed.go_on(position.epoch, self._resumed, self.loader)
        if rank == 0 and self.plan.checkpoints is not None:
            checkpoints.discard_newer(
                self.plan.checkpoints, saved.tick, self.warnings.append
            )  # they were passed over: they are damaged
        if mesh.data.rank == 0 and self.worker.server is not None:
            first = mesh.coordinate if snapshot is saved else 0
            run_state.restore_server(snapshot, first, self.worker.server, self.replica)
        if saved.ranks != size or self.worker.elastic:  # what was counted by ranks that are no more stands with rank 0
            positions = [saved.values(r)["position"] for r in range(saved.ranks)] if rank == 0 else []
            counts = {count: sum(p[count] for p in positions) for count in ("rows", "unused")}
            if self.worker.elastic:  # … or with each, who may be the one that is left
                counts = self.worker.group.all_gather_json(counts)[0]
            for count, total in counts.items():
                setattr(position, count, total)
        self.replica.rounds, self.replica.tick = position.rounds, max(0, position.tick - 1)
        source = place[0] if self._keeps_best() else mesh.coordinate if snapshot is saved else 0
        kept = dict(snapshot.reader(source)) if self.plan.keep.metric else {}
        self.best.restore(self.replica, kept, snapshot.values(source)["keep"])
        return state, position

    def _check(self, saved: Checkpoint) -> None:
        was = {"partition": "none"} | saved.values(0)["position"]["fingerprint"]  # an earlier version's knew no other
        now = self._fingerprint()
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
        task, workers = self.plan.task, self.worker.mesh.rows[1]
        return {
            "partition": f"fixed for {workers} workers" if self.plan.partition == "fixed" else "none",
            "strategy": self.plan.strategy.name,
            "seed": task.seed,
            "rows": self.feed.rows,
            "batch_size": self.feed.batch_size,
            "ticks_per_epoch": self.feed.ticks,
            "shuffle": task.shuffle,
        }
