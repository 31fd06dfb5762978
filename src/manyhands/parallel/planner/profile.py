"""What a model costs, unit by unit: each one is built alone, and run forward and back."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import rng
from manyhands.comm.group import Group, Ledger
from manyhands.comm.solo import SoloGroup
from manyhands.comm.stage_channel import Sent, StageChannel
from manyhands.data.batch import map_columns, rows_of, slice_rows
from manyhands.parallel.build import build, fill, is_absent, take_away
from manyhands.parallel.mesh import StagePlace
from manyhands.parallel.planner.linear_cost import LinearCost
from manyhands.parallel.stage_executor import StageExecutor
from manyhands.parallel.trace import Cut, ModelTrace, trace
from manyhands.process_memory import forget_peak, give_back, resident
from manyhands.replica.flat_vector import nbytes, tensors_in
from manyhands.task import Task

_HELD = 3  # micro-batches at once, beside one: what they hold is seen in the difference
_LEAST_S, _MOST = 0.15, 9  # a unit is run until both are reached, and at least twice
_MESSAGE = (1 << 12, 1 << 20)  # bytes of the messages that are timed


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """The program from one possible cut to the next. Lines are by rows of a micro-batch, in seconds or bytes."""

    begins: str  # the module that it begins with; "": the program's beginning
    state: int  # bytes of the optimizer's state
    crossing: LinearCost  # bytes of the values at its beginning
    skip: LinearCost  # seconds of the program before it, on a stage that begins here
    forward: LinearCost
    backward: LinearCost
    update: float  # seconds: gradients are gathered, clipped, and the optimizer steps
    held: LinearCost  # bytes of a micro-batch between forward and back
    transient: LinearCost  # bytes besides, while it goes forward and back


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What a task's model costs a worker, on the machine where it was measured."""

    base: int  # bytes resident in a worker before its part of the model is there
    units: tuple[UnitCost, ...]  # in the program's order
    names: tuple[tuple[str, ...], ...]  # of the parameters that each unit uses; a tied one comes with each
    sizes: dict[str, tuple[int, int]]  # of each parameter: its bytes, and those of its gradient
    rows: tuple[int, ...]  # of the micro-batches that were measured
    distinct: int  # units that were measured; the others are like one of these

    @property
    def seconds(self) -> float:
        """Of the largest micro-batch that was measured, forward and back."""
        return sum(one.forward.at(self.rows[-1]) + one.backward.at(self.rows[-1]) for one in self.units)

    @staticmethod
    def of(content: dict[str, Any]) -> ModelProfile:
        """What `asdict` gave, also by way of JSON."""

        def unit(one: dict[str, Any]) -> UnitCost:
            made: dict[str, Any] = {
                name: LinearCost(**value) if isinstance(value, dict) else value for name, value in one.items()
            }
            return UnitCost(**made)

        return ModelProfile(
            base=content["base"],
            units=tuple(map(unit, content["units"])),
            names=tuple(tuple(one) for one in content["names"]),
            sizes={name: (own, gradient) for name, (own, gradient) in content["sizes"].items()},
            rows=tuple(content["rows"]),
            distinct=content["distinct"],
        )


def profile_units(task: Task, batch: Any, group: Group) -> ModelProfile:
    """Measure each distinct unit, all workers of a group the same one at once. A collective.

    batch: rows of a global batch. Micro-batches of a sixteenth and a quarter of them are measured. The model is never there
    as a whole: memory is for one unit and three micro-batches.
    """
    count = rows_of(batch)
    rows = tuple(sorted({max(1, count // 16), max(1, count // 4)}))
    with rng.kept():
        given = task.model
        model = take_away(given, ()) if isinstance(given, nn.Module) else build(given, draws=False)
        sizes = {name: (p.nbytes, p.nbytes if p.requires_grad else 0) for name, p in model.named_parameters()}
        traces = [trace(model, task.loss, slice_rows(batch, 0, size)) for size in rows]
        give_back()
        base = resident()
        found, measured = traces[-1], dict[str, list[_Measured]]()
        kinds = _kinds(found)
        for unit, kind in enumerate(kinds):
            if kind in measured:
                continue
            measured[kind] = []
            for size, one in zip(rows, traces, strict=True):
                group.barrier()
                measured[kind].append(_measure(task, one, unit, model, batch, size))
    units = tuple(_costs(found, traces, kinds, measured, rows))
    names = tuple(
        tuple(name for name, at in found.uses.items() if any(begin <= time < end for time in at or (0,)))
        for begin, end in _spans(found)
    )
    return ModelProfile(base=base, units=units, names=names, sizes=sizes, rows=rows, distinct=len(measured))


def message_line(channel: StageChannel, first: bool) -> LinearCost:
    """Seconds of a message from one end to the other, by its bytes. Both ends call it."""

    def once(size: int) -> float:
        payload = [Sent(torch.zeros(size, dtype=torch.uint8))]
        began = time.perf_counter()
        for sends in (first, not first):
            if sends:
                channel.send("profile", payload)
            else:
                channel.receive(torch.device("cpu"))
        return (time.perf_counter() - began) / 2

    return LinearCost.of_medians(_MESSAGE, once)


# -- one unit -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Measured:
    skip: float
    forward: float
    backward: float
    update: float
    held: float
    transient: float
    state: int


class _Neighbour(StageChannel):
    """In the place of a channel to a stage that is not there: it gives random values of the right shapes."""

    def __init__(self, cut: Cut, sent: Callable[[], None], received: Callable[[], None]) -> None:
        """sent, received: called once something was."""
        self.ledger = Ledger()
        self._cut, self._sent, self._received = cut, sent, received

    @override
    def send(self, operation: str, tensors: Sequence[Sent]) -> None:
        self._sent()

    @override
    def receive(self, device: torch.device) -> list[Sent]:
        values = [_value(shape, dtype).to(device) for shape, dtype in self._cut.values]
        self._received()
        return [Sent(value, value.is_floating_point()) for value in values]

    @property
    @override
    def waited_s(self) -> float:
        return 0.0

    @override
    def close(self) -> None:
        pass


def _value(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


class _UnitExecutor(StageExecutor):
    """A stage of one unit, whose neighbours are not there. It notes when each pass begins and ends."""

    def __init__(self, task: Task, found: ModelTrace, cuts: list[Cut], unit: int, model: nn.Module) -> None:
        """cuts: of the chain. model: all of it absent; the unit's parameters get memory until `close`."""
        begin, end = cuts[unit - 1] if unit else None, cuts[unit] if unit < len(cuts) else None
        place = StagePlace(
            stage=0 if begin is None else 1,
            members=SoloGroup(),
            before=None if begin is None else _Neighbour(begin, self._note("done"), self._note("start")),
            after=None if end is None else _Neighbour(end, self._note("forward"), self._note("back")),
            tied={},
        )
        self._absent, self._at = model, dict[str, float]()
        own = [cut for cut in (begin, end) if cut is not None]
        super().__init__(task, found, own, place, schedule="gpipe", micro_batches=1)

    def _note(self, *what: str) -> Callable[[], None]:
        def note() -> None:
            self._at |= dict.fromkeys(what, time.perf_counter())

        return note

    @override
    def _part_of_model(self) -> nn.Module:
        fill(self._absent, self.held)
        return self._absent

    @override
    def _measured(self, measure: Any, rows: int) -> tuple[Tensor, float]:
        self._note("forward", "back")()
        return super()._measured(measure, rows)

    @override
    def collect(self, scale: float | None = None) -> int:
        if self.place.before is None:
            self._note("done")()
        return super().collect(scale)

    def tick(self, batch: Any, micro_batches: int) -> tuple[float, float, float, float]:
        """Make a step of micro-batches of equal rows. Seconds: the program before this unit, the last micro-batch forward,
        and back, and what follows."""
        self._micro_batches = micro_batches
        self.begin_tick()
        self._note("start")()
        self.backward(batch)
        if (norm := self._task.clip_norm) is not None:
            self.clip(norm)
        self.apply()
        at, skipped = self._at, self.program.skipped_s if self.place.before is not None else 0.0
        forward = at["forward"] - at["start"] - skipped
        return skipped, forward, at["done"] - at["back"], time.perf_counter() - at["done"]

    def close(self) -> None:
        """Its model is as before, and its memory goes."""
        self.program.remove()
        take_away(self._absent, ())
        del self.model, self.shards, self.optimizer, self.program


def _measure(task: Task, found: ModelTrace, unit: int, model: nn.Module, batch: Any, rows: int) -> _Measured:
    give_back()
    before = resident()
    executor = _UnitExecutor(task, found, found.chain, unit, model)
    executor.build(lambda n, dtype, device: torch.zeros(n, dtype=dtype, device=device))
    one, again = slice_rows(batch, 0, rows), list(range(rows)) * _HELD
    executor.tick(one, 1)  # makes the optimizer's state
    took: list[tuple[float, ...]] = []
    forget_peak()
    began = time.perf_counter()
    while len(took) < 2 or (time.perf_counter() - began < _LEAST_S and len(took) < _MOST):
        took.append(executor.tick(one, 1))
    peak = resident(name="VmHWM") - before
    own = nbytes(p for p in executor.model.parameters() if not is_absent(p))
    own += sum(shard.gradients.nbytes for shard in executor.shards)
    state = nbytes(tensors_in(list(executor.optimizer.state.values())))
    free = max(0, peak - own - state)
    executor.tick(map_columns(batch, lambda column: column[again]), _HELD)
    held = min(free, max(0, resident(name="VmHWM") - before - peak) / (_HELD - 1))
    executor.close()
    skip, forward, backward, update = (statistics.median(part) for part in zip(*took, strict=True))
    return _Measured(
        skip=skip,
        forward=max(0.0, forward),
        backward=backward,
        update=update,
        held=held,
        transient=free - held,
        state=state,
    )


# -- all units ----------------------------------------------------------------------------------------------------------


def _spans(found: ModelTrace) -> list[tuple[float, float]]:
    """[begin, end) of each unit, on the clock of the trace."""
    times = [0.0, *(cut.time for cut in found.chain), math.inf]
    return list(pairwise(times))


def _kinds(found: ModelTrace) -> list[str]:
    """Of each unit; units of one kind cost the same."""
    crossing = [(), *(cut.values for cut in found.chain), ()]
    kinds = []
    for unit, (begin, end) in enumerate(_spans(found)):
        calls = [kind for time, kind in found.calls if begin <= time < end]
        kinds.append(repr((calls, crossing[unit], crossing[unit + 1])))
    return kinds


def _costs(
    found: ModelTrace,
    traces: Sequence[ModelTrace],
    kinds: list[str],
    measured: dict[str, list[_Measured]],
    rows: Sequence[int],
) -> Iterator[UnitCost]:
    last = max(kinds.index(kind) for kind in measured)  # that was measured, with the most before it
    skipped = _line(rows, measured[kinds[last]], "skip")
    crossing = [LinearCost()] + [
        LinearCost.through(rows, [float(one.chain[cut].nbytes) for one in traces]) for cut in range(len(found.chain))
    ]
    for unit, kind in enumerate(kinds):
        own = measured[kind]
        share = unit / last if last else 0.0
        yield UnitCost(
            begins=found.chain[unit - 1].name if unit else "",
            state=own[-1].state,
            crossing=crossing[unit],
            skip=LinearCost(skipped.fixed * share, skipped.slope * share),
            forward=_line(rows, own, "forward"),
            backward=_line(rows, own, "backward"),
            update=statistics.fmean(one.update for one in own),
            held=_line(rows, own, "held"),
            transient=_line(rows, own, "transient"),
        )


def _line(rows: Sequence[int], measured: Sequence[_Measured], name: str) -> LinearCost:
    return LinearCost.through(rows, [getattr(one, name) for one in measured])
