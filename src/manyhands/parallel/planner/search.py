"""Which ways there are to put a model on workers, what each costs, and which is best. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from manyhands.comm.shared_memory.mailbox import ring_bytes
from manyhands.parallel.mesh import piece_bytes
from manyhands.parallel.planner.linear_cost import LinearCost
from manyhands.parallel.planner.partition import partition
from manyhands.parallel.planner.profile import ModelProfile, UnitCost
from manyhands.parallel.planner.timing import Cores, step_seconds
from manyhands.parallel.schedules import actions, in_flight
from manyhands.parallel.spec import ModelParallel

_NEARLY = 1.03  # a plan that takes so much longer than the fastest is as good, where it has fewer stages
_MOST_MICRO_BATCHES = 64

_DISK_S = 2e-9  # seconds a byte of state that comes from the page cache and goes back there


class Options(NamedTuple):
    """What trades time for memory."""

    recompute: Literal["none", "units"] = "none"
    offload: Literal["none", "disk"] = "none"


PLAIN = Options()


@dataclass(frozen=True, kw_only=True)
class MachineCosts:
    """What a step costs besides the model's units. Seconds and bytes."""

    workers: int
    rows: int  # of a global batch
    cores: Cores
    base: int  # resident in a worker before its model is there
    message: LinearCost  # seconds of a message between neighbours, by its bytes
    exchange: LinearCost  # seconds of an exchange between replicas, by bytes of parameters
    period: int = 1  # steps between two exchanges
    vectors: float = 0.0  # that a strategy keeps, each as long as the parameters
    caps: tuple[float, ...] = ()  # bytes that each worker may have; (): as much as it wants
    micro_batch_size: int | None = None  # the task's own


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Of one stage, in bytes and seconds."""

    begins: str
    memory: float
    forward: float  # of a micro-batch
    backward: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to put a model on workers, and what a step of it is predicted to cost."""

    spec: ModelParallel | None  # None: each worker holds the whole model
    workers: int
    rows: int  # of a global batch
    stages: tuple[StagePrediction, ...] = ()
    step_s: float = math.inf
    terms: dict[str, float] = field(default_factory=dict)  # seconds: {"compute", "wait", "update", "exchange"}
    over: float = 0.0  # bytes over the limit, of the worker that needs most
    refused: str = ""  # why it cannot be
    alone: bool = False  # one process, for comparison

    @property
    def memory(self) -> float:
        """Bytes of the worker that needs most."""
        return max((stage.memory for stage in self.stages), default=math.inf)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.step_s

    @property
    def fits(self) -> bool:
        return not self.refused and self.over <= 0

    def __str__(self) -> str:
        if self.alone:
            return "one process"
        if self.spec is None:
            return "one worker a replica"
        parts = [f"stages={self.spec.stages}"]
        parts += [] if self.spec.micro_batches is None else [f"micro_batches={self.spec.micro_batches}"]
        parts += [f"{name}={value}" for name in Options._fields if (value := getattr(self.spec, name)) != "none"]
        return ",".join(parts)


def plans_of(profile: ModelProfile, machine: MachineCosts) -> list[Plan]:
    """Every number of stages that the workers allow, with every power of two of micro-batches and what trades time for
    memory: the one to take, then the other ones that fit, the fastest first, then the rest."""
    found = list[Plan]()
    for stages in range(1, machine.workers + 1):
        if machine.workers % stages:
            continue
        if stages > len(profile.units):
            spec = ModelParallel(stages=stages)
            why = f"the model has {len(profile.units) - 1} places to cut it"
            found.append(Plan(spec=spec, workers=machine.workers, rows=machine.rows, refused=why))
            continue
        ways = [PLAIN] if stages == 1 else [PLAIN, Options("units"), Options("none", "disk"), Options("units", "disk")]
        for micro_batches in _micro_batches(machine, stages):
            found += [plan_of(profile, machine, stages, micro_batches, options) for options in ways]
    ordered = sorted(
        found, key=lambda plan: (bool(plan.refused), plan.over > 0, plan.step_s if plan.fits else plan.over)
    )
    if ordered and ordered[0].fits:
        good = [plan for plan in ordered if plan.fits and plan.step_s <= _NEARLY * ordered[0].step_s]
        first = min(good, key=lambda plan: (len(plan.stages), plan.step_s))
        ordered.remove(first)
        ordered.insert(0, first)
    return ordered


def one_process(profile: ModelProfile, machine: MachineCosts) -> Plan:
    """For comparison: a process that has all cores, whose units were measured so."""
    costs = replace(machine, workers=1, cores=Cores(), vectors=0.0, caps=machine.caps[:1])
    return replace(plan_of(profile, costs, 1, 1, PLAIN), alone=True)


def _micro_batches(machine: MachineCosts, stages: int) -> list[int]:
    """To be tried, of a replica's rows."""
    rows = max(1, machine.rows * stages // machine.workers)
    if stages == 1:
        return [1 if machine.micro_batch_size is None else max(1, math.ceil(rows / machine.micro_batch_size))]
    most = min(rows, _MOST_MICRO_BATCHES)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def plan_of(profile: ModelProfile, machine: MachineCosts, stages: int, micro_batches: int, options: Options) -> Plan:
    """So many stages, cut where the slowest is fastest among those cuts with which each worker has room."""
    replicas = machine.workers // stages
    rows = machine.rows / replicas / micro_batches
    caps = [min(machine.caps[stage::stages], default=math.inf) for stage in range(stages)]
    model = _Stages(profile, machine, stages, micro_batches, rows, options)

    def cost_of(start: int, stop: int, stage: int) -> float:
        fits = model.memory(start, stop, stage) <= caps[stage]
        return sum(model.passes(start, stop, stage)) if fits else math.inf

    best = partition(len(profile.units), stages, cost_of)
    if math.isinf(best.cost):  # for the message: the cuts with which the fullest stage is least full
        best = partition(
            len(profile.units), stages, lambda start, stop, stage: model.memory(start, stop, stage) - caps[stage]
        )
    bounds = list(zip([0, *best.starts], [*best.starts, len(profile.units)], strict=True))
    predictions = []
    for stage, (start, stop) in enumerate(bounds):
        forward, backward = model.passes(start, stop, stage)
        predictions.append(
            StagePrediction(
                begins=profile.units[start].begins,
                memory=model.memory(start, stop, stage),
                forward=forward,
                backward=backward,
            )
        )
    ahead, back = [one.forward for one in predictions], [one.backward for one in predictions]
    played = step_seconds("1f1b", ahead, back, micro_batches, cores=machine.cores, replicas=replicas)
    rate = machine.cores.rate(machine.workers)
    update = max(model.update(start, stop) for start, stop in bounds) / rate
    held = max(model.parameters(start, stop) for start, stop in bounds)
    exchange = machine.exchange.at(held) / machine.period if replicas > 1 else 0.0
    computed = min(played, micro_batches * max(f + b for f, b in zip(ahead, back, strict=True)) / rate)
    spec = None
    if stages > 1:
        cut = ",".join(profile.units[start].begins for start in best.starts)
        spec = ModelParallel(stages=stages, cut=f"[{cut}]", micro_batches=micro_batches, **options._asdict())
    return Plan(
        spec=spec,
        workers=machine.workers,
        rows=machine.rows,
        stages=tuple(predictions),
        step_s=played + update + exchange,
        terms={"compute": computed, "wait": played - computed, "update": update, "exchange": exchange},
        over=max(one.memory - cap for one, cap in zip(predictions, caps, strict=True)) if machine.caps else 0.0,
    )


class _Stages:
    """What stages of units [start, stop) cost under one number of micro-batches."""

    def __init__(
        self,
        profile: ModelProfile,
        machine: MachineCosts,
        stages: int,
        micro_batches: int,
        rows: float,
        options: Options,
    ) -> None:
        self._profile, self._machine, self._rows = profile, machine, rows
        self._recomputes, self._offloads = options.recompute == "units", options.offload == "disk"
        self._in_flight = [in_flight(actions("1f1b", stages, micro_batches, stage)) for stage in range(stages)]
        self._replicas = machine.workers // stages

    def passes(self, start: int, stop: int, stage: int) -> tuple[float, float]:
        """Seconds forward and back, of a micro-batch. Messages are packed and unpacked by those who send and receive."""
        units, rows = self._profile.units[start:stop], self._rows
        messages = sum(self._machine.message.at(cut) for cut in self._crossing(start, stop, stage)) / 2
        ahead = sum(one.forward.at(rows) for one in units)
        again = sum(one.forward.at(rows) for one in units if self._is_recomputed(one))
        forward = units[0].skip.at(rows) + ahead + messages
        return forward, sum(one.backward.at(rows) for one in units) + again + messages

    def update(self, start: int, stop: int) -> float:
        """Seconds after the last pass."""
        units = self._profile.units[start:stop]
        return sum(one.update + (_DISK_S * one.state if self._offloads else 0.0) for one in units)

    def parameters(self, start: int, stop: int) -> float:
        """Bytes that have gradients; a tied one counts once."""
        return sum(self._profile.sizes[name][1] for name in self._names(start, stop))

    def memory(self, start: int, stop: int, stage: int) -> float:
        """Bytes that a worker's process has at most."""
        units, rows, machine = self._profile.units[start:stop], self._rows, self._machine
        names = self._names(start, stop)
        own = sum(self._profile.sizes[name][0] for name in names)
        gradients = self.parameters(start, stop)
        twice = sum(
            sum(self._profile.sizes[name][1] for name in self._profile.names[unit]) for unit in range(start, stop)
        )
        state = sum(one.state for one in units) * gradients / twice if twice else 0.0  # a tied parameter's once
        if self._offloads:  # of one parameter at a time
            largest = max((self._profile.sizes[name][1] for name in names), default=0)
            state = state * largest / gradients if gradients else 0.0
        others = gradients * (self._replicas - 1)  # of the other replicas, which an exchange in shared memory looks at
        held = sum(one.crossing.at(rows) if self._is_recomputed(one) else one.held.at(rows) for one in units)
        transient = max(
            one.transient.at(rows) + (one.held.at(rows) if self._is_recomputed(one) else 0.0) for one in units
        )
        rings = sum(2 * ring_bytes(piece_bytes(int(cut))) for cut in self._crossing(start, stop, stage))
        vectors = gradients * (1 + machine.vectors) + state + others
        return machine.base + own + vectors + self._in_flight[stage] * held + transient + rings

    def _names(self, start: int, stop: int) -> set[str]:
        return {name for names in self._profile.names[start:stop] for name in names}

    def _crossing(self, start: int, stop: int, stage: int) -> list[float]:
        """Bytes of a micro-batch at the cuts before and after."""
        units = self._profile.units
        cuts = [units[start]] if stage else []
        cuts += [units[stop]] if stop < len(units) else []
        return [one.crossing.at(self._rows) for one in cuts]

    def _is_recomputed(self, unit: UnitCost) -> bool:
        return self._recomputes and unit.begins != ""
