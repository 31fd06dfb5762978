"""The one answer of a run: validated while it trains, and returned at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.checkpoint import model_file
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed
from manyhands.errors import Unsupported
from manyhands.replica import evaluation, fingerprint
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.replica.shard import ParameterSlice
from manyhands.strategies.base import State as StrategyState
from manyhands.task import Metrics
from manyhands.training.best_model import BestModel
from manyhands.training.plan import State, TrainingPosition, WorkerPlan
from manyhands.worker import Worker
from manyhands.worker_callback import WorkerCallback


class FinalAnswer(NamedTuple):
    """What a run found."""

    states: list[State]  # see `Outcome`
    file: str
    metrics: dict[str, float]
    callback_result: Any  # of worker 0's callback


@dataclass
class Validator:
    """Metrics of the consensus; everything here is a collective."""

    plan: WorkerPlan
    worker: Worker
    replica: Replica
    validation: Feed | None
    test: Feed | None
    validated_at: int = -1  # the tick of the newest validation of which all know the driver's answer
    best: BestModel = field(init=False)

    def __post_init__(self) -> None:
        self.best = BestModel(self.plan.keep)

    def facts(self) -> fingerprint.Facts:
        """What must be alike on all workers: the rows that are judged by."""
        feeds = {"validation_data": self.validation, "test_data": self.test}
        seed, facts = self.plan.task.seed, fingerprint.Facts()
        for name, feed in feeds.items():
            facts |= {} if feed is None else fingerprint.of_rows(feed.source, name, seed)
        return facts

    def validate(self, position: TrainingPosition, state: StrategyState) -> tuple[dict[str, float], bool]:
        """Validation metrics of the consensus as it is now, offered to `best`; ({}, False) without validation data."""
        if self.validation is None:
            return {}, False
        consensus = self.plan.strategy.consensus(self.replica, self.worker, state)
        buffers = self._buffers()
        metrics = self._evaluate(self.validation, consensus, buffers, "validation_")
        at = {"epoch": position.epoch, "step": position.tick}
        best = self.best.offer(metrics, consensus, buffers, at)
        # the same again, where a lost worker ended it before the driver had heard of it
        return metrics, best or (self.worker.elastic and self.best.at == at)

    @contextmanager
    def showing(self, state: StrategyState) -> Iterator[None]:
        """The model holds the current consensus, read-only; Unsupported if its parameters were changed."""
        consensus = self.plan.strategy.consensus(self.replica, self.worker, state)
        with evaluation.holding(self.replica, consensus, self._buffers()):
            before = self.replica.parameters.clone()
            yield
            if not _same_vector(before, self.replica.parameters):
                raise Unsupported(
                    "a callback changed the model's parameters between two epochs, and the other workers would not get "
                    "the change: change them after training, or leave the callback out"
                )

    def answer(self, state: StrategyState, over: bool, worker_callback: WorkerCallback | None = None) -> FinalAnswer:
        """The consensus, or the best model if wanted, and its metrics. over: the run is complete, and not preempted."""
        consensus = self.plan.strategy.consensus(self.replica, self.worker, state)
        buffers = self._buffers()
        metrics = dict(self.best.newest)
        if self.best.parameters is not None:
            consensus, buffers, metrics = self.best.parameters, self.best.buffers, dict(self.best.metrics)
        callback_result = None
        if worker_callback is not None:
            callback_result, changed, consensus, buffers = self._ended(worker_callback, consensus, buffers)
            if changed and self.validation is not None:
                metrics = self._evaluate(self.validation, consensus, buffers, "validation_")
        if self.test is not None and over:
            metrics |= self._evaluate(self.test, consensus, buffers, "test_")
        states, file = self._delivered(consensus, buffers, over)
        return FinalAnswer(states, file, metrics, callback_result)

    def _ended(
        self, worker_callback: WorkerCallback, parameters: FlatVector, buffers: dict[str, Tensor]
    ) -> tuple[Any, bool, FlatVector, dict[str, Tensor]]:
        """(what worker 0's callback returned, whether it changed the answer, the answer's parameters and buffers)"""
        group = self.worker.group
        with evaluation.holding(self.replica, parameters, buffers) as model:
            before = self.replica.parameters.clone()
            callback_result = worker_callback.on_end()
            after = self.replica.parameters.clone()
            held = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        changed = not _same_vector(before, after) or not all(_same(buffers[name], held[name]) for name in buffers)
        changed, callback_result = group.all_gather_json([changed, callback_result])[0]
        if not changed:
            return callback_result, False, parameters, buffers
        after.broadcast_(self.worker.mesh.data, 0)
        for tensor in held.values():
            self.worker.mesh.data.broadcast_(tensor, 0)
        return callback_result, True, after, held

    def _buffers(self) -> dict[str, Tensor]:
        """Those of the one answer, or this rank's own where there are N."""
        group = self.worker.mesh.data if self.plan.strategy.needs.one_model else SoloGroup()
        return evaluation.mean_buffers(self.replica.model, group)

    def _evaluate(
        self, feed: Feed, parameters: FlatVector, buffers: dict[str, Tensor], prefix: str
    ) -> dict[str, float]:
        worker = self.worker

        def progress(batch: int) -> None:
            worker.driver.progress("validation", batch)

        with evaluation.holding(self.replica, parameters, buffers):
            task = self.plan.task
            measure: Callable[[Any], Metrics] = partial(self.replica.executor.evaluate, task.metrics)
            if not self.plan.strategy.needs.one_model:
                members = evaluation.members_of(self.replica, worker.mesh.data)
                if worker.mesh.model.size > 1:
                    measure = evaluation.of_parts(self.replica, members, task.metrics)
                else:
                    ensemble = evaluation.ensemble_of(self.replica, members)
                    measure = evaluation.of_model(task, ensemble, worker.device)
            group = worker.mesh.world if worker.mesh.own_rows else worker.mesh.data
            together = self.replica.executor.computes_together
            metrics = evaluation.evaluate(measure, feed, group, progress, together=together)
        return {prefix + name: value for name, value in metrics.items()}

    def _delivered(self, parameters: FlatVector, buffers: dict[str, Tensor], over: bool) -> tuple[list[State], str]:
        """(`Outcome.states`, `Outcome.file`) of this answer, or of each member of an ensemble; nothing on ranks that nobody
        asks."""
        everywhere, mesh, one = self.plan.every_rank_returns, self.worker.mesh, self.plan.strategy.needs.one_model
        members = [(parameters, buffers)]
        if not one:
            with evaluation.holding(self.replica, parameters, buffers):
                members = evaluation.members_of(self.replica, mesh.data)
        if not (everywhere or mesh.data.rank == 0):
            return [], ""
        if one and self.plan.model_parallel is not None and mesh.model.size > 1:
            readers = self.worker.group if everywhere else mesh.model
            if model_file.seen_by_all(self.plan.claim, readers):
                return self._written(parameters, buffers) if over else ([], "")
        states = [self._joined(self._state(*member)) for member in members]
        if mesh.model.rank and not everywhere:
            return states, ""  # without what the others hold
        whole = self.replica.executor.whole
        return [(whole(trained), buffers, rest) for trained, buffers, rest in states], ""

    def _state(self, parameters: FlatVector, buffers: dict[str, Tensor]) -> State:
        """What this worker holds of a model with these values, copied to the CPU."""
        rest: dict[str, Tensor] = {}
        if self._rest(self.replica.model):
            with evaluation.holding(self.replica, parameters, buffers) as model:
                rest = _own(self._rest(model))
        return _own(self.replica.named(parameters)), _own(buffers), rest

    def _written(self, parameters: FlatVector, buffers: dict[str, Tensor]) -> tuple[list[State], str]:
        """The first replica's workers write the run's model file, each its part; what that holds is in no state."""
        mesh, claim, counts = self.worker.mesh, self.plan.claim, self.replica.executor.counts
        assert claim is not None
        with evaluation.holding(self.replica, parameters, buffers) as model:
            saved = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
            if mesh.data.rank == 0:
                own = {name: (tensor, self._slices.get(name)) for name, tensor in saved.items() if counts(name)}
                model_file.write_ranges(claim, mesh.model, own)
        if self.plan.every_rank_returns:
            self.worker.group.barrier()  # the file is there for all
        others = {name: buffer for name, buffer in buffers.items() if name not in saved}
        return [self._joined(({}, _own(others), {}))], model_file.FINAL

    @property
    def _slices(self) -> dict[str, ParameterSlice]:
        """Which part of each parameter this worker holds."""
        return {name: part for shard in self.replica.shards for name, part in shard.slices.items()}

    def _joined(self, own: State) -> State:
        """The whole model's, of what each worker of a replica holds; on its first one, unless every rank returns it. A
        collective of these workers."""
        members, counts, slices = self.worker.mesh.model, self.replica.executor.counts, self._slices
        if members.size == 1:
            return own
        counted = [(kind, name) for kind, part in enumerate(own) for name in part if counts(name)]
        listed = [(kind, name, *_listed(own[kind][name], slices.get(name))) for kind, name in counted]
        joined: State = {}, {}, {}
        for rank, theirs in enumerate(members.all_gather_json(listed)):
            for kind, name, whole, start, stop, dtype in theirs:
                held = own[kind][name] if rank == members.rank else None
                lengths = [b - a for a, b in zip(start, stop, strict=True)]
                tensor = self._brought(rank, held, lengths, getattr(torch, dtype))
                if tensor is None or lengths == whole:
                    joined[kind].update({} if tensor is None else {name: tensor})
                    continue
                all_of_it = joined[kind].setdefault(name, torch.empty(whole, dtype=tensor.dtype))
                all_of_it[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = tensor
        return joined

    def _brought(self, source: int, held: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor that this worker or another of its replica holds, where it is wanted; a collective of these workers."""
        members, everywhere = self.worker.mesh.model, self.plan.every_rank_returns
        if held is None and members.rank and not everywhere:
            return None
        tensor = torch.empty(shape, dtype=dtype) if held is None else held
        if everywhere:
            members.broadcast_(tensor, source)
        elif source and members.rank == 0:
            members.receive_(tensor, source)
        elif source:
            members.send(tensor, 0)
        return tensor

    def _rest(self, model: nn.Module) -> dict[str, Tensor]:
        """What the state_dict of a model has besides trainable parameters and buffers, where a run directory wants it."""
        if self.plan.checkpoints is None:
            return {}
        known = {*self.replica.layout.names, *(name for name, _ in model.named_buffers())}
        return {n: t for n, t in model.state_dict().items() if n not in known and isinstance(t, Tensor)}


def _same_vector(one: FlatVector, other: FlatVector) -> bool:
    return all(_same(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: a NaN is itself."""
    views = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*views)


def _listed(tensor: Tensor, part: ParameterSlice | None) -> tuple[list[int], list[int], list[int], str]:
    """(the shape of all of it, where this part begins and ends, the dtype)"""
    shape = list(tensor.shape) if part is None else list(part.shape)
    start = [0] * tensor.dim() if part is None else list(part.start)
    return shape, start, list(tensor.shape) if part is None else list(part.stop), str(tensor.dtype)[6:]


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
