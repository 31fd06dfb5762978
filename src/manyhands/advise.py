"""The line of advice at the end of a summary: rules over what was measured, the first that applies speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INPUT_SHARE = 0.20
SHORT_STEP_S = 0.010
WAIT_SHARE = 0.15
UNEVEN = 1.10
EXCHANGE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run's own clocks say. Seconds are sums over the run, the mean over workers."""

    workers: int
    steps: int
    input_s: float
    compute_s: float
    exchange_s: float
    wait_s: float
    strategy: str = "allreduce"  # its spec
    threads_per_worker: int = 1
    cores: int = 1  # that this host lets the run use
    device: str = "cpu"
    simulated: bool = False  # seconds are of a cost model, not of a machine
    server: bool = False  # replicas agree through a parameter server
    compute_of_workers_s: list[float] = field(default_factory=list)  # by rank; empty: not known

    @property
    def total_s(self) -> float:
        return self.input_s + self.compute_s + self.exchange_s + self.wait_s

    @property
    def compute_per_step_s(self) -> float:
        return self.compute_s / max(1, self.steps)

    def share(self, seconds: float) -> float:
        return seconds / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One line for people, and what it rests on for programs.

    kind: unmeasured | input-bound | too-short | stragglers | exchange-bound | solo | fine
    """

    kind: str
    text: str
    numbers: dict[str, Any]


def advise(measured: Measured) -> Advice:
    """The first rule that applies, in the order of RULES: what starves the workers comes before how they share."""
    for rule in RULES:
        advice = rule(measured)
        if advice is not None:
            return advice
    return _fine(measured)


def _unmeasured(m: Measured) -> Advice | None:
    """Nothing can be said without a step."""
    if m.steps and m.total_s > 0:
        return None
    return Advice(kind="unmeasured", text="no step was made, so nothing was measured.", numbers={"steps": m.steps})


def _input_bound(m: Measured) -> Advice | None:
    """Input takes at least 20 % of the time: without it the run would be at least 1 / (1 - 0.20) = 1.25 times as fast (Amdahl)."""
    share = m.share(m.input_s)
    if share < INPUT_SHARE:
        return None
    text = (
        f"input-bound: {_percent(share)} of the time waits for rows. Load them beside the training with --loader-processes 2, "
        f"or prepare them once as arrays; without that wait it would be {1 / (1 - min(share, 0.99)):.2g}x as fast."
    )
    return Advice(kind="input-bound", text=text, numbers={"input_share": share})


def _too_short(m: Measured) -> Advice | None:
    """Several workers, each computing under 10 ms a step.

    What a step costs whatever its rows (calling the model's operators, the optimizer, one exchange) is 1 to 3 ms on
    CPUs: at 10 ms that is already a tenth to a third of the step, and it does not shrink with more workers. A simulated
    step costs what it was said to cost.
    """
    if m.simulated or m.workers == 1 or m.compute_per_step_s >= SHORT_STEP_S:
        return None
    ms = m.compute_per_step_s * 1000
    text = (
        f"too short to distribute: a step computes {_ms(m)} ms, under 10 ms, where costs that no worker takes off another prevail. "
        "Stay with one process (--workers 1), or raise --batch-size."
    )
    return Advice(kind="too-short", text=text, numbers={"compute_ms_per_step": ms})


def _stragglers(m: Measured) -> Advice | None:
    """Workers wait for the slowest at least 15 % of the time: 1 / (1 - 0.15) = 1.18 times as fast if they were even.

    A worker that computes 10 % longer than the mean is named; below that it is jitter, most of all when there are more
    threads than cores.
    """
    share = m.share(m.wait_s)
    if m.workers == 1 or share < WAIT_SHARE:
        return None
    numbers: dict[str, Any] = {"wait_share": share}
    return Advice(
        kind="stragglers",
        text=f"waiting: {_percent(share)} of the time workers wait for the slowest. {_why_uneven(m, numbers)}",
        numbers=numbers,
    )


def _why_uneven(m: Measured, numbers: dict[str, Any]) -> str:
    rarer = "raise bound" if m.server else "average less often (local-sgd:period=8)"
    threads = m.workers * m.threads_per_worker
    if m.device == "cpu" and threads > m.cores:
        numbers |= {"threads": threads, "cores": m.cores}
        return f"{threads} threads share {m.cores} {'core' if m.cores == 1 else 'cores'}: take fewer workers or --threads-per-worker."
    mean = sum(m.compute_of_workers_s) / len(m.compute_of_workers_s) if m.compute_of_workers_s else 0.0
    slowest = max(range(len(m.compute_of_workers_s)), key=m.compute_of_workers_s.__getitem__, default=0)
    if mean and m.compute_of_workers_s[slowest] >= UNEVEN * mean:
        more = m.compute_of_workers_s[slowest] / mean - 1
        numbers |= {"slowest": slowest, "slower_by": more}
        return f"Worker {slowest} computes {_percent(more)} longer than the mean: free its core, or {rarer}."
    return f"They are equally slow on the whole, so it is jitter: {rarer}."


def _exchange_bound(m: Measured) -> Advice | None:
    """Exchange takes at least 25 %: every 8 steps instead of each leaves 1 / (1 - 0.25 * 7/8) = 1.28 times the speed."""
    share = m.share(m.exchange_s)
    if m.workers == 1 or share < EXCHANGE_SHARE:
        return None
    faster = 1 / (1 - min(share, 0.99) * 7 / 8)
    remedy = f"Average every 8 steps with --strategy local-sgd:period=8 (about {faster:.2g}x as fast)"
    if m.strategy.startswith("local-sgd"):
        remedy = "Raise the period of local-sgd"
    elif m.server:
        remedy = "Push and pull every 8 steps (push_every, window or period, as the strategy calls it)"
    text = f"exchange-bound: {_percent(share)} of the time is exchange. {remedy}, or take fewer workers."
    return Advice(kind="exchange-bound", text=text, numbers={"exchange_share": share})


def _solo(m: Measured) -> Advice | None:
    """One worker: two can pay when a step computes 10 ms or more and cores are idle.

    Where its threads have all cores already, two workers of half the threads gain little: a transformer's step took
    43.6 ms on 2 workers and 48.9 ms in one process with 2 threads, 1.12 times as long.
    """
    if m.workers > 1:
        return None
    ms, idle = m.compute_per_step_s * 1000, m.cores - m.threads_per_worker
    numbers = {"compute_ms_per_step": ms, "idle_cores": idle}
    if m.compute_per_step_s < SHORT_STEP_S:
        text = (
            f"one process is right: a step computes {_ms(m)} ms, and under 10 ms sharing it costs more than it gains."
        )
    elif m.device != "cpu":
        text = f"one worker on {m.device}, {_ms(m)} ms a step: with another GPU, --workers 2 can pay."
    elif idle > 0:
        text = f"try --workers 2: a step computes {_ms(m)} ms, and {idle} of {m.cores} cores {'is' if idle == 1 else 'are'} idle."
    elif m.cores > 1:
        text = (
            f"one process already has all {m.cores} cores ({_ms(m)} ms a step): --workers 2 gains only where its threads wait for "
            "each other; try it and compare rows/s."
        )
    else:
        text = f"one process is right: there is one core, and a second worker would share it ({_ms(m)} ms a step)."
    return Advice(kind="solo", text=text, numbers=numbers)


def _fine(m: Measured) -> Advice:
    """No rule found a loss: says which part of the time was computing."""
    efficiency = m.share(m.compute_s)
    text = f"fine: workers compute {_percent(efficiency)} of the time ({_ms(m)} ms a step)."
    return Advice(kind="fine", text=text, numbers={"efficiency": efficiency})


def _ms(m: Measured) -> str:
    ms = m.compute_per_step_s * 1000
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


RULES: tuple[Callable[[Measured], Advice | None], ...] = (
    _unmeasured,
    _input_bound,
    _too_short,
    _stragglers,
    _exchange_bound,
    _solo,
)
