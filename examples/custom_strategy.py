"""A strategy of your own in one file: slow momentum (SlowMo), beside two of the strategies that manyhands has.

python examples/custom_strategy.py
manyhands train digits --workers 2 --strategy examples/custom_strategy.py:SlowMo:period=16,momentum=.6
manyhands compare digits --strategies local-sgd:period=16,examples/custom_strategy.py:SlowMo:period=16
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import manyhands as mh
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class Window(mh.State):
    """What a worker remembers between steps. Checkpoints hold it."""

    center: FlatVector  # where all workers began the open window
    momentum: FlatVector  # the slow one, the same on all workers
    ticks: int = 0  # of the open window
    weight: float = 0.0  # what this worker's loss counted in it: rows, unless the task says otherwise

    def weight_of_window(self) -> float:
        return self.weight


@dataclass(frozen=True, kw_only=True)
class SlowMo(mh.Strategy):
    """Local SGD with a momentum over its averages.

    Source: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, Jianyu Wang, Vinayak Tantia,
    Nicolas Ballas, Michael Rabbat, 2020.

    1. Every worker takes `period` steps of its own optimizer, whose state it keeps, from one center.
    2. u becomes momentum * u + (center - the mean of the workers' parameters).
    3. The center becomes center - rate * u, and all workers go on from there.

    With rate=1 and momentum=0 it is local SGD (optimizer_state=kept).

    Deviations: the mean is weighted by what the loss counts (the paper: equal shards). u is not divided by the inner
    learning rate, which is the same as long as that rate is constant. An epoch's end closes the window.
    """

    period: int = 16
    """Steps between exchanges. Raise it when exchange takes long, lower it when accuracy falls."""
    rate: float = 1.0
    """Of the slow step. Lower it when the loss jumps after an exchange."""
    momentum: float = 0.5
    """From 0 to below 1. A constant direction is amplified 1 / (1 - momentum)-fold: raise it for many exchanges."""

    name: ClassVar[str] = "slowmo"
    source: ClassVar[str] = (
        "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, Wang et al., 2020"
    )
    summary: ClassVar[str] = "parameters, every `period` steps, for a slow step with momentum"
    consistency: ClassVar[str] = "periodic"

    def __post_init__(self) -> None:
        if self.period < 1 or self.rate <= 0 or not 0 <= self.momentum < 1:
            raise mh.BadInput(f"{self} needs a period of at least 1, a rate above 0 and a momentum from 0 to below 1")

    def rate_factor(self, workers: int) -> float:
        return self.rate / (1 - self.momentum)  # for the summary's effective rate

    def start(self, replica: Replica, worker: mh.Worker) -> Window:
        return Window(center=replica.parameters.clone(), momentum=replica.parameters.zeros_like())

    def synchronize(self, replica: Replica, worker: mh.Worker, state: Window, change: object) -> None:
        super().synchronize(replica, worker, state, change)  # all take rank 0's parameters
        state.center.copy_(replica.parameters)

    def exchange(self, replica: Replica, worker: mh.Worker, state: Window) -> mh.StepResult:
        weight, applied = replica.weight, replica.apply()  # clip, optimizer, schedule
        state.ticks += 1
        state.weight += weight if applied else 0.0
        due = state.ticks == self.period
        if due:
            self._slow_step(replica, worker, state)
        return mh.StepResult(applied=applied, rows_left=replica.control.rows_left(worker, exchanged=due))

    def finish(self, replica: Replica, worker: mh.Worker, state: Window) -> None:
        if state.ticks:
            self._slow_step(replica, worker, state)

    def agreed(self, replica: Replica, state: Window) -> FlatVector:
        return state.center

    def consensus(self, replica: Replica, worker: mh.Worker, state: Window) -> FlatVector:
        return state.center

    def _slow_step(self, replica: Replica, worker: mh.Worker, state: Window) -> None:
        moved = state.center - replica.parameters
        total = replica.mean_(worker.mesh.data, moved, state.weight)  # over the workers, in place
        if total.weight:  # else nobody had rows, and a round of nothing changes nothing
            state.momentum.mul_(self.momentum).add_(moved)
            state.center.add_(state.momentum, alpha=-self.rate)
            replica.set_parameters(state.center)
        state.ticks, state.weight = 0, 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    for strategy in ("allreduce", "local-sgd:period=16", SlowMo(period=16)):
        run = mh.train("digits", strategy=strategy, workers=args.workers, epochs=args.epochs)
        accuracy = run.metrics["test_accuracy"]
        print(f"{run.info['strategy']:20} {run.rounds:4} exchanges, {accuracy:.1%} of the test scans right")
