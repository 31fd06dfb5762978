"""The executor of one stage of a model: micro-batches forward and back in a schedule's order, between its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.comm.group import Group, Ledger
from manyhands.comm.stage_channel import Sent, StageChannel
from manyhands.data.batch import rows_of, slice_rows
from manyhands.errors import BadInput
from manyhands.parallel.absent import Absent
from manyhands.parallel.build import build, is_absent, move, take_away
from manyhands.parallel.mesh import StagePlace, place_of
from manyhands.parallel.offload import StateOnDisk
from manyhands.parallel.schedules import Action, Schedule, actions, micro_batches_of
from manyhands.parallel.stage_program import StagePass, StageProgram
from manyhands.parallel.trace import Cut, ModelTrace
from manyhands.process_memory import giving_back
from manyhands.replica.executor import Allocate, AutogradExecutor, StepLoss
from manyhands.task import Evaluate, Metrics, Summed, Task
from manyhands.worker import Worker


@dataclass(frozen=True)
class _TiedGradients:
    """Of the parameters of one dtype that the same stages hold."""

    group: Group  # of these stages' workers
    numbers: list[int]  # of the parameters' bits in a mask
    gradients: list[Tensor]  # views of the shards' gradients

    def add_up(self, grad_mask: int) -> int:
        """Each stage's gradients become the sum over the stages; the mask of the parameters that got one on any of them. A
        collective of these stages, and one message."""
        flags = self.gradients[0].new_tensor([float(grad_mask >> number & 1) for number in self.numbers])
        sent = torch.cat([*(gradient.reshape(-1) for gradient in self.gradients), flags])
        self.group.all_reduce_(sent)
        *sums, got = sent.split([*(gradient.numel() for gradient in self.gradients), len(flags)])
        for gradient, summed in zip(self.gradients, sums, strict=True):
            gradient.copy_(summed.view(gradient.shape))
        return grad_mask | sum(1 << number for number, flag in zip(self.numbers, got.tolist(), strict=True) if flag)


class StageExecutor(AutogradExecutor):
    """A stage of the task's model. Gradients are those of the mean over all of the replica's rows.

    Every micro-batch's gradient is that of its mean times its weight. One scaling by the sum of the weights ends the step,
    as `AutogradExecutor` does it. Parameters of other stages are absent, and no optimizer steps them.
    """

    times_passes = True

    def __init__(
        self,
        task: Task,
        trace: ModelTrace,
        cuts: list[Cut],
        place: StagePlace,
        *,
        schedule: Schedule = "1f1b",
        micro_batches: int | None = None,
        recomputes: bool = False,
        offloads: bool = False,
    ) -> None:
        """micro_batches: so many of a replica's rows, at most one a row; None: of the task's micro_batch_size. recomputes:
        units are computed again in backward. offloads: the optimizer's state lies in a file."""
        super().__init__(
            self._make,
            self._optimizer_of_stage,
            loss=task.loss,
            precision=task.precision,
            micro_batch_size=task.micro_batch_size if micro_batches is None else None,
            members=place.members,
        )
        self._task, self._trace, self._cuts, self.place = task, trace, cuts, place
        self._schedule, self._micro_batches, self._offloads = schedule, micro_batches, offloads
        self._most_rows: int | None = None  # of a micro-batch, where others' rows may come besides
        self._recomputed = {unit.name for unit in trace.units(cuts)} if recomputes else set[str]()
        self.stages_of = trace.stages_of(cuts)
        """{parameter: the stages that hold it}"""
        self.held = {name for name, stages in self.stages_of.items() if place.stage in stages}
        if not self.held:
            raise BadInput(
                f"stage {place.stage} would have none of the model's {len(trace.uses)} parameters: cut elsewhere, or give fewer stages"
            )
        self._sizes = [
            sum(trace.sizes[name] for name, stages in self.stages_of.items() if stage in stages and trace.uses[name])
            for stage in range(place.stages)
        ]
        """How many parameters each stage uses; one that several use counts for each of them."""
        self._communicated_s = 0.0

    # -- building ------------------------------------------------------------------------------------------------------

    def _make(self) -> nn.Module:
        model = move(self._part_of_model(), self.place.device)
        self._trainable_elsewhere = [p for p in model.parameters() if isinstance(p, Absent) and p.requires_grad]
        for p in self._trainable_elsewhere:
            p.set_requires_grad(False)  # no part of the shards
        return model

    def _part_of_model(self) -> nn.Module:
        """The task's, of whose parameters there are only those that this stage holds."""
        given = self._task.model
        with giving_back():  # parameters that are drawn into scratch
            return take_away(given, self.held) if isinstance(given, nn.Module) else build(given, self.held)

    def _optimizer_of_stage(self, model: nn.Module) -> torch.optim.Optimizer:
        """The task's, made for the whole model, without what is absent: groups keep their number and rates."""
        for p in self._trainable_elsewhere:
            p.set_requires_grad(True)
        optimizer = self._task.optimizer(model)
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
            group["params"] = [p for p in group["params"] if not is_absent(p)]
        return optimizer

    @override
    def build(self, allocate: Allocate) -> None:
        super().build(allocate)
        for shard in self.shards:
            for name, part in shard.slices.items():
                if self.stages_of[name][0] != self.place.stage:  # a tied one counts at the first stage that holds it
                    shard.slices[name] = replace(part, counted=False)
        self._offloaded = StateOnDisk(self.optimizer) if self._offloads else None
        self._got = 0  # bits: the parameters that got a gradient in this tick
        for number, p in enumerate(self._parameters):
            p.register_post_accumulate_grad_hook(partial(self._note_gradient, 1 << number))
        self._tied = list(self._tied_gradients())
        self.program = StageProgram(
            self.model, self._cuts, self.place.stage, self._recomputed, device=self.place.device
        )

    def _tied_gradients(self) -> Iterator[_TiedGradients]:
        """In the same order on all of their stages, whatever else each holds."""
        for stages, group in self.place.tied.items():
            for shard in sorted(self.shards, key=lambda shard: str(shard.layout.dtype)):
                layout = shard.layout
                views = zip(layout.names, layout.numbers, layout.views(shard.gradients), strict=True)
                shared = sorted((name, number, view) for name, number, view in views if self.stages_of[name] == stages)
                if shared:
                    _, numbers, gradients = zip(*shared, strict=True)
                    yield _TiedGradients(group, list(numbers), list(gradients))

    @override
    def join(self, worker: Worker) -> None:
        self.place = place_of(worker, self._trace, self._cuts)
        self.members = self.place.members
        self._tied = list(self._tied_gradients())

    @override
    def leave(self) -> None:
        for channel in self.place.channels:
            channel.close()
        for group in self.place.tied.values():
            group.close()
        self.place = StagePlace.alone(self.place.stage, self.place.stages, self.place.device)
        self.members, self._tied = self.place.members, []

    @override
    def limit_rows(self, rows: int) -> None:
        """Micro-batches stay as large as they are with so many rows."""
        if self._micro_batches is None:
            super().limit_rows(rows)
        else:
            self._most_rows = -(-rows // self._micro_batches)

    @override
    def facts(self) -> dict[str, Any]:
        begin = self.program.begin
        own = {
            "begins": "" if begin is None else begin.name,
            "parameters": sum(shard.layout.size for shard in self.shards),
        }
        return {"stages": self.place.members.all_gather_json(own)}

    @override
    def waited_s(self) -> float:
        return sum(channel.waited_s for channel in self.place.channels) + sum(
            group.waited_s for group in self.place.tied.values()
        )

    @override
    def communicated_s(self) -> float:
        return self._communicated_s

    @override
    def ledgers(self) -> list[Ledger]:
        return [
            *(channel.ledger for channel in self.place.channels),
            *(group.ledger for group in self.place.tied.values()),
        ]

    @override
    def counts(self, name: str) -> bool:
        if name in self._trace.buffers:
            return self._trace.stage_of(name, self._cuts) == self.place.stage
        stages = self.stages_of.get(
            self._trace.names.get(name, name), (0,)
        )  # what a module keeps besides is the first's
        return stages[0] == self.place.stage

    @override
    def copied(self) -> list[str]:
        return sorted(name for name, stages in self.stages_of.items() if len(stages) > 1)

    # -- a step --------------------------------------------------------------------------------------------------------

    @override
    def begin_tick(self) -> None:
        """Autograd adds what comes to the shards' gradients: they have no second memory while micro-batches are under way."""
        self._got = 0
        for shard in self.shards:
            shard.gradients.zero_()
        for p, view in zip(self._parameters, self._grads, strict=True):
            p.grad = view

    def _note_gradient(self, bit: int, p: Tensor) -> None:
        self._got |= bit

    @override
    def apply(self) -> None:
        if self._offloaded is not None:
            self._offloaded.step()
        else:
            super().apply()

    @override
    def collect(self, scale: float | None = None) -> int:
        if scale is not None:
            for shard in self.shards:
                shard.gradients.mul_(scale)
        return self._got

    @override
    def backward(self, batch: Any | None) -> StepLoss:
        rows = 0 if batch is None else rows_of(batch)
        micro_batches = self._micro_batches
        if micro_batches is not None and self._most_rows is not None:
            micro_batches = max(micro_batches, -(-rows // self._most_rows))
        pieces = list(micro_batches_of(rows, micro_batches, self._micro)) if rows else []
        under_way: dict[int, StagePass] = {}
        summed = total = 0.0
        passed = self.place.driver.begin_passes(rows, self.place.stage, self._sizes)
        for action in actions(self._schedule, self.place.stages, len(pieces), self.place.stage):
            start, stop = pieces[action.micro]
            share = (stop - start) / rows
            with self._named(action, len(pieces)):
                if action.forward:
                    part = slice_rows(batch, start, stop) if len(pieces) > 1 else batch
                    under_way[action.micro] = own = self._span(self._task.loss, part, partial(passed, True, share))
                    if self.place.after is None:
                        mean, weight = self._measured(own.result, stop - start)
                        own.values = [mean * weight if weight and len(pieces) > 1 else mean] if weight else []
                        total += weight
                        summed += float(mean.detach()) * weight if weight else 0.0
                else:
                    own = under_way.pop(action.micro)
                    after = self.place.after
                    back = self._received(after) if after else [Sent(torch.ones_like(value)) for value in own.values]
                    gradients = own.backward(back)
                    if self._recomputed:
                        passed(True, share)
                    passed(False, share)
                    if self.place.before is not None:
                        self._send(self.place.before, "back", gradients)
        wishes = [float(self.stop), float(self.regroup)]
        summed, total, stops, regroups = self.reduce(
            torch.tensor([summed, total, *wishes], dtype=torch.float64)
        ).tolist()
        grad_mask = self.collect(1 / total if total and len(pieces) > 1 else None)
        for tied in self._tied:
            with self._communicating():
                grad_mask = tied.add_up(grad_mask)
        self.show_gradients(grad_mask)
        return StepLoss(
            loss=summed / total if total else 0.0,
            weight=total,
            grad_mask=grad_mask,
            stop=stops > 0,
            regroup=regroups > 0,
        )

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        began = self.place.clock()
        yield
        self._communicated_s += self.place.clock() - began

    def _received(self, channel: StageChannel) -> list[Sent]:
        with self._communicating():
            return channel.receive(self.place.device)

    def _send(self, channel: StageChannel, operation: str, tensors: list[Sent]) -> None:
        with self._communicating():
            channel.send(operation, tensors)

    @override
    def reduce(self, sums: Tensor) -> Tensor:
        with self._communicating():
            return super().reduce(sums)

    @contextmanager
    def _named(self, action: Action, micro_batches: int) -> Iterator[None]:
        """An error within says of which stage and micro-batch it is."""
        try:
            yield
        except Exception as error:
            way = "forward" if action.forward else "back"
            where = (
                f"stage {self.place.stage} of {self.place.stages}, micro-batch {action.micro} of {micro_batches}, {way}"
            )
            error.add_note(f"manyhands: {where} (both count from 0)")
            raise

    def _span(
        self, function: Callable[[nn.Module, Any], Any], rows: Any, passed: Callable[[], None] = lambda: None
    ) -> StagePass:
        """This stage's part of `function(model, rows)`, between its neighbours. passed: called once it is computed."""
        before, after = self.place.before, self.place.after
        received = [] if before is None else self._received(before)
        with torch.autocast(self.place.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            own = self.program.run(function, rows, received)
        passed()
        if after is not None:
            self._send(after, "forward", own.sent())
        return own

    @override
    def share(self, named: Mapping[str, torch.Tensor]) -> None:
        for stages, group in self.place.tied.items():
            for name in (name for name in named if self.stages_of[name] == stages):
                flat = named[name].reshape(-1)
                group.broadcast_(flat, 0)
                named[name].copy_(flat.view(named[name].shape))

    @override
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        """The last stage's metrics, on all of the replica's workers."""
        with torch.no_grad():
            own = self._span(function, batch)
        last = self.place.after is None
        found = self.place.members.all_gather_json(_as_json(own.result) if last else None)[-1]
        return {name: value[0] if len(value) == 1 else tuple(value) for name, value in found.items()}


def _as_json(metrics: Metrics) -> dict[str, list[float]]:
    found = {}
    for name, value in metrics.items():
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, Summed) for part in parts):
            raise BadInput(
                f"the metric {name} is a {type(parts[0]).__name__}, and with stages metrics are numbers, or (mean, weight)"
            )
        found[name] = [float(part) for part in parts if not isinstance(part, Summed)]
    return found
