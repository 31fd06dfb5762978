"""A simulated run on a free network beside the same run on real processes: the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from noisy_runs import digests, train
from torch import Tensor

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError
from manyhands.strategies import CATALOGUE, strategy_of

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
from noisy_runs import digests
print(*digests())
"""


@pytest.mark.slow
def test_the_machines_load_and_another_process_change_nothing() -> None:
    """The other process runs beside this one, hashes strings to other numbers, and starts its clock elsewhere."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", PROGRAM.format(paths=paths)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        here, (there, _) = digests(), other.communicate(timeout=300)
    assert there.split() == here
