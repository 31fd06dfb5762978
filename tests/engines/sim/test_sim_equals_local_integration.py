"""A simulated run on a free network beside the same run on real processes: the same bits."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError
from manyhands.strategies import CATALOGUE, strategy_of
from plain import cross_entropy, task

FORMS = ("", ":bound=0", ":via=group")
"""The options that may make a strategy synchronous."""
OTHERS = (
    "allreduce:overlap=true",
    "diloco:period=4,streaming=2",
    "gossip:graph=random,weights=push-sum",
    "gossip:graph=pairs,bound=0",
    "downpour:push_every=2,pull_every=3,rule=adagrad,bound=0",
    "allreduce:compress=topk:0.3",
    "allreduce:compress=powersgd:2",
)
"""Further ones, whose exchange is another."""


def _is_synchronous(spec: str) -> bool:
    """Of strategies that train models: for kernels see test_kernel_strategies_integration.py."""
    try:
        return strategy_of(spec).leasing() is None and not strategy_of(spec).needs.kernel
    except ManyhandsError:
        return False


def _form(name: str) -> str:
    """Its first form in which workers wait for each other, "" where there is none."""
    return next((name + form for form in FORMS if _is_synchronous(name + form)), "")


SYNCHRONOUS = [form for name in CATALOGUE if name != "solo" and (form := _form(name))]
FAST = ("allreduce", "downpour:bound=0", "gossip")
"""One of each way in which workers wait for each other: in the group, at the server, in pairs."""


def test_every_strategy_with_a_synchronous_form_is_here() -> None:
    """Hogwild has none: its workers never wait for each other."""
    assert {spec.partition(":")[0] for spec in SYNCHRONOUS} == set(CATALOGUE) - {"solo", "hogwild", "rotate"}
    assert all(_is_synchronous(spec) for spec in OTHERS)
    assert {*FAST} <= {*SYNCHRONOUS}


class Noisy(torch.utils.data.Dataset):
    """Rows with noise from all three generators, drawn when they are read."""

    def __init__(self, rows: int = 37) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * np.random.randn() + 0.1 * random.random() + 0.1 * torch.rand(5, dtype=torch.float64)
        return self.x[index] + noise, self.y[index]


def model() -> nn.Module:
    """Draws in its forward too, and has buffers that every batch moves."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Numpy's and Python's generators are drawn from here too."""
    return cross_entropy(module, batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def noisy_task() -> mh.Task:
    """Batches of 10, the last of 7: shares of two sizes, none of fewer rows than batch-norm needs."""
    return task(model=model, loss=loss, train_data=Noisy(), validation_data=Noisy(7), batch_size=10, epochs=2)


def train(spec: str, workers: int, engine: Any) -> mh.Run:
    return mh.train(noisy_task(), strategy=spec, engine=engine, workers=workers, threads_per_worker=1)


def buffers(run: mh.Run) -> list[Tensor]:
    return [buffer for one in ([run.model] if run.model is not None else run.models) for buffer in one.buffers()]


def losses(run: mh.Run) -> list[float]:
    return [row["loss"] for row in run.history]


@pytest.mark.parametrize(
    ("workers", "spec"),
    [
        pytest.param(2 + index % 2, spec, marks=() if spec in FAST else pytest.mark.slow)
        for index, spec in enumerate([*SYNCHRONOUS, *OTHERS])
    ],
)
def test_a_free_network_gives_the_bits_of_local(workers: int, spec: str, local: Local) -> None:
    """Parameters, buffers, metrics and each step's loss."""
    simulated, real = (train(spec, workers, engine) for engine in ("sim:compute=row=0", local))
    assert torch.equal(simulated.parameters, real.parameters)
    assert all(torch.equal(a, b) for a, b in zip(buffers(simulated), buffers(real), strict=True))
    assert simulated.metrics == real.metrics
    assert losses(simulated) == pytest.approx(losses(real), rel=1e-12)  # the driver adds them up as they come
    assert (simulated.rows, simulated.steps, simulated.rounds) == (real.rows, real.steps, real.rounds)


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from test_sim_equals_local_integration import digests
print(*digests())
"""
BUSY = "while True: sum(range(1000))"


def digests() -> list[str]:
    """Of runs on a network with jitter, stragglers and lost messages, where what happens first is drawn."""
    engine = "sim:network='latency=1ms,bandwidth=1e8',compute='row=1e-3,jitter=lognormal:0.5,1=3x'"
    lossy = f"{engine},faults='drop=0.1,delay=0.1:0.01,retry=0.05'"
    trained = (("downpour", lossy), ("gossip:graph=pairs", engine), ("local-sgd:period=2", engine))
    runs = [train(spec, 3, engine) for spec, engine in trained]
    return [hashlib.sha256(run.parameters.numpy().tobytes()).hexdigest() + repr(run.seconds) for run in runs]


@pytest.mark.slow
def test_the_machines_load_and_another_process_change_nothing() -> None:
    """The other process also hashes strings to other numbers, and starts its clock elsewhere."""
    quiet = digests()
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        assert digests() == quiet
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        other = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(paths=paths)],
            env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    finally:
        busy.kill()
        busy.wait(10)
    assert other.stdout.split() == quiet
