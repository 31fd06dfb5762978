"""A training simulated with all its numbers, and with the stand-in: what its workers say of each step."""

from functools import partial

import torch
from torch import nn

import manyhands as mh
from manyhands.data.open_source import open_source
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.events import Event
from manyhands.evidence.estimate.message_lengths import Lengths
from manyhands.evidence.estimate.model_sizes import reading_plan, shape_of
from manyhands.evidence.estimate.scaled_task import NEVER, PATIENCE_S, simulate, stand_in, steady_state
from manyhands.strategies import strategy_of
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import work

CODECS = "bf16=2ns/1ns,topk=15ns/1ns,onebit=3ns/1ns,int8=4ns/1ns,qsgd=20ns/4ns,powersgd=5ns/3ns/2ns/1ns"
COMPUTE = f"row=1e-3,step=1ms,jitter=lognormal:0.1,1=1.5x,lease=1e-4,request=3e-5,merge=1e-9,{CODECS}"
HOSTS = "lan,workers_per_host=2,servers=spread"

Measured = list[tuple[int, float, int]]
"""(rank, when, bytes sent), of each worker's ticks one after the other, worker by worker."""


def task(width: int = 40, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **fields: object) -> mh.Task:
    """Two layers of 64·width + 10·width weights, and their biases, on 240 rows."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(240, 64, generator=generator), torch.randint(0, 10, (240,), generator=generator)
    values = {"batch_size": 24, "train_data": data, **fields}
    return mh.Task.supervised(
        name="wide",
        model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)),
        optimizer=lambda model: optimizer(model.parameters(), lr=1e-3),  # type: ignore[call-arg]
        **values,
    )


class MeasuringObserver(Observer):
    """Records the events of steps."""

    def __init__(self) -> None:
        self.steps: list[Event] = []

    def event(self, event: Event) -> None:
        if event.type == "step":
            self.steps.append(event)

    def result(self) -> Measured:
        in_order = sorted(self.steps, key=lambda event: (event.rank, event.time_s))
        return [(event.rank or 0, event.time_s, event.values["bytes"]) for event in in_order]


def in_full(given: mh.Task, spec: str, workers: int, steps: int, *, servers: int = 1, network: str = HOSTS) -> Measured:
    observer, strategy = MeasuringObserver(), strategy_of(spec)
    bare = given.with_fields(validation_data=None, test_data=None, epochs=NEVER, max_steps=steps)
    plan = WorkerPlan(task=bare, strategy=strategy, validate_every=NEVER, checkpoint_every=NEVER)
    limits = {"observer": observer, "device": "cpu", "timeout_s": PATIENCE_S}
    launch = LaunchSpec(workers=workers, server=strategy.server(), servers=servers, **limits)
    Sim(network=network, compute=COMPUTE).launch(partial(work, plan), launch)
    return observer.result()


def by_stand_in(
    given: mh.Task, spec: str, workers: int, steps: int, servers: int = 1, network: str = HOSTS
) -> Measured:
    observer, strategy, shape = MeasuringObserver(), strategy_of(spec), shape_of(given)
    reading = reading_plan(given, open_source(given.train_data), workers)
    lengths = Lengths(shape, strategy, workers=workers, servers=servers, rows=reading.batch_size / workers)
    small = stand_in(given, shape, reading, lengths.stand_in_length).with_fields(max_steps=steps)
    assert lengths.stand_in_length * 10 < shape.padded
    plan = WorkerPlan(task=small, strategy=steady_state(strategy), validate_every=NEVER, checkpoint_every=NEVER)
    simulate(plan, workers, servers, SimNetworkSpec.parse(network), Compute.parse(COMPUTE), lengths, observer)
    return observer.result()
