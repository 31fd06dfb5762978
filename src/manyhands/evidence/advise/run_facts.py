"""What the rules of advice look at, what they say, and the words they say it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.server.staleness import Histogram, limit, quantile
from manyhands.strategies import kind_of
from manyhands.strategies.base import Needs, Traits

SHORT_STEP_S = 0.010
UNEVEN = 1.10
NEAR_LIMIT = 0.80  # of the staleness that a rate can bear


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Workers that share one machine's cores, whether by one launch or by several `manyhands join`."""

    host: str  # by name; "": this one
    workers: int
    threads: int  # of all these workers
    cores: int


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """What a run's own clocks and counters say. Seconds are sums over the run, the mean over workers."""

    workers: int
    steps: int  # global batches
    input_s: float
    compute_s: float
    exchange_s: float
    wait_s: float
    strategy: str = "allreduce"  # its spec
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options of the strategy with their values; empty: not known."""
    own_pace: bool = False  # every worker goes at its own pace, with slices that are leased
    period: float = 1.0  # steps between exchanges, as they were counted
    threads_per_worker: int = 1
    cores: int = 1  # that this host lets the run use
    device: str = "cpu"
    simulated: bool = False  # seconds are of a cost model, not of a machine
    assumed: bool = False  # it is a cost model that nobody measured (engine sim without a profile)
    server: bool = False  # replicas agree through a parameter server
    machines: Sequence[Machine] = ()  # the most crowded first; empty: not known
    loader_processes: int = 0  # that load rows beside a worker
    loader_option: str = "--loader-processes"  # what sets their number; "" where more would do nothing
    input: Mapping[str, float] = field(
        default_factory=dict
    )  # `Run.input`; empty: rows lay in memory, or were not counted
    clipped: bool = False  # gradients are clipped
    one_host: bool = False  # all workers are on this host: they share its cores, and memory is their link
    compute_of_workers_s: Sequence[float] = field(default_factory=list)  # by rank; empty: not known
    sent_bytes: float = 0.0  # by a worker, the mean; of a server, pulled ones too; 0: not known
    parameters: int = 0  # trainable numbers of the model; 0: not known
    shapes: Sequence[Sequence[int]] = ()  # of its trainable tensors; empty: not known
    rows_per_step: float = 0.0  # of a worker; 0: not known
    epoch_steps: int | None = None  # global batches of an epoch; None: not known
    unused: float = 0.0  # share of the rows whose gradient was dropped or skipped
    rate: float = 0.0  # the highest learning rate; 0: not known
    staleness: Histogram = field(default_factory=dict)  # {versions: pushes}, of a server
    push_gain: float | None = None  # rate times largest curvature of a push (docs/events.md); None: not known

    @property
    def name(self) -> str:
        """Of the strategy, without options."""
        return self.strategy.partition(":")[0]

    @property
    def traits(self) -> Traits:
        """What is known of the strategy in general; nothing of a user's own."""
        kind = kind_of(self.strategy)
        return Traits() if kind is None else kind.traits

    @property
    def needs(self) -> Needs:
        """The strategy's."""
        kind = kind_of(self.strategy)
        return Needs() if kind is None else kind.needs

    @property
    def codec(self) -> str:
        """Of what is exchanged, or "none"."""
        options = self.strategy.partition(":")[2].split(",")
        return next((text.partition("=")[2] for text in options if text.startswith("compress=")), "none")

    @property
    def late(self) -> int:
        """Versions that 9 of 10 pushes are late at most."""
        return quantile(self.staleness, 0.9)

    @property
    def crowded(self) -> Machine | None:
        """A machine whose workers have more threads than it has cores."""
        if self.device != "cpu" or self.simulated:
            return None
        here = Machine(host="", workers=self.workers, threads=self.workers * self.threads_per_worker, cores=self.cores)
        known = self.machines or ([here] if self.one_host else [])
        return next((one for one in known if one.threads > one.cores), None)

    @property
    def total_s(self) -> float:
        return self.input_s + self.compute_s + self.exchange_s + self.wait_s

    @property
    def compute_per_step_s(self) -> float:
        return self.compute_s / max(1, self.steps)

    @property
    def rounds(self) -> float:
        """Exchanges; at least 1."""
        return max(1.0, self.steps / self.period)

    @property
    def even(self) -> bool:
        """No worker is known to compute 10 % longer than the mean."""
        known = self.compute_of_workers_s
        return not any(known) or max(known) * len(known) < UNEVEN * sum(known)

    @property
    def too_short(self) -> bool:
        """Steps of several workers that are too short to be shared: whatever else would help them does not matter.

        Members of an ensemble share none, and a simulated step costs what the simulator was given.
        """
        alone = self.workers == 1 or not self.needs.one_model
        return not alone and not self.simulated and self.compute_per_step_s < SHORT_STEP_S

    @property
    def worth_sharing(self) -> bool:
        """Several workers share steps that are long enough."""
        return self.workers > 1 and not self.too_short

    @property
    def near_limit(self) -> bool:
        """Pushes are known to be nearly as late as the rate can bear, or later: nothing may make them later still."""
        return self.push_gain is not None and self.late > 0 and self.push_gain >= NEAR_LIMIT * limit(self.late)

    def share(self, seconds: float) -> float:
        """Of all seconds."""
        return seconds / self.total_s if self.total_s else 0.0


TASK_FACTS = ("loader_processes", "loader_option", "clip_norm")


def of_task(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of RunMeasurements that a run's facts say of its task; results of earlier versions lack them."""
    known = {name: facts[name] for name in ("loader_processes", "loader_option") if name in facts}
    return {**known, "clipped": facts.get("clip_norm") is not None}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One line for people, and what it rests on for programs."""

    kind: str
    """The rule that spoke, as docs/advice.md lists them."""
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    wins: float = 0.0
    """Predicted share of the time that following it saves; 1 where all is at stake, 0 without a promise."""


def ms(seconds: float) -> str:
    """Milliseconds, without their unit."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.01 else f"{1000 * seconds:.2g}"


def times(factor: float) -> str:
    """1.3x, 12x."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"
