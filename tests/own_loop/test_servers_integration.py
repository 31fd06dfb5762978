"""A server for a loop of one's own, started with the workers: real processes, the simulator, one worker alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.launch import launch, run_script
from manyhands.server.base import ServerSpec


@pytest.fixture(autouse=True)
def no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_STRATEGY", raising=False)


def train(epochs: int = 2, seed: int = 0) -> tuple[list[int], Tensor]:
    """The rows that this worker trained on, and its model at the end."""
    torch.manual_seed(seed)
    model = plain.mlp()
    rule = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(*plain.rows(39), torch.arange(39))
    loader: Any
    model, rule, loader = mh.prepare(model, rule, DataLoader(data, batch_size=12, shuffle=True))
    rows: list[int] = []
    for _ in range(epochs):
        for x, y, numbers in loader:
            rule.zero_grad()
            plain.cross_entropy(model, (x, y)).backward()
            rule.step()
            rows += numbers.tolist()
    return rows, plain.flat(model)


def assert_trained(found: list[tuple[list[int], Tensor]]) -> None:
    """Each row twice, by one model."""
    assert sorted(row for rows, _ in found for row in rows) == sorted([*range(39)] * 2)
    for _, parameters in found:
        assert torch.equal(parameters, found[0][1])


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [("downpour", 2), *(pytest.param(one, None, marks=pytest.mark.slow) for one in ("hogwild", "quorum"))],
)
def test_launch_starts_what_the_strategy_needs(local: Local, strategy: str, servers: int | None) -> None:
    """Also for a script that launches, where its workers are there already."""
    inside = lambda: launch(train)  # noqa: E731
    found = launch(inside, workers=2, strategy=strategy, servers=servers, engine=local)
    assert_trained([values[rank] for rank, values in enumerate(found)])


@pytest.mark.parametrize("strategy", ["dynsgd:bound=1", "easgd:period=2", "update-sharing"])
def test_the_simulator_has_it_too(strategy: str) -> None:
    assert_trained(launch(train, workers=3, strategy=strategy, engine=Sim()))


def pushes() -> Tensor:
    worker = mh.worker()
    server, center = worker.server, torch.zeros(3)
    assert server is not None
    server.initialize(center)
    server.activate()
    server.push(torch.full((3,), float(worker.rank + 1)))
    server.deactivate()
    worker.group.barrier()
    server.center(center)
    return center


@pytest.mark.parametrize(
    ("workers", "options", "total"), [(1, {"servers": 1}, 1.0), (2, {"server": ServerSpec(rule="add")}, 3.0)]
)
def test_code_of_ones_own_has_a_server(local: Local, workers: int, options: dict[str, Any], total: float) -> None:
    for center in launch(pushes, workers=workers, engine=local, **options):
        assert center.tolist() == [total] * 3
    without = launch(lambda: mh.worker().server is None, workers=2, strategy="local-sgd", engine=Sim())
    assert without == [True, True]


SCRIPT = """
import manyhands as mh
from own_loops import train_shuffled
found = train_shuffled("sgd", prepare=True)
print(mh.worker().server is not None, bool((mh.mean(found) - found).abs().max() < 1e-12))
"""


def test_an_unchanged_script_takes_it(local: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert run_script(path, workers=2, strategy="downpour:bound=2", servers=1, engine=local) == 0
    assert capfd.readouterr().out == "True True\n"


def test_what_cannot_be_is_refused_before_anything_starts(local: Local, nothing_starts: None) -> None:
    downpour: dict[str, Any] = {"strategy": "downpour"}
    for options, error, message in (
        ({"servers": 0}, BadInput, "servers must be a whole number of at least 1, not 0"),
        ({"servers": 2, "strategy": "quorum"}, Unsupported, "needs a server with one shard, and servers=2"),
        ({"strategy": "quorum:backups=2"}, BadInput, "backups=2 must be less than workers=2"),
        (downpour | {"server": ServerSpec(rule="add")}, BadInput, "has a server of its own"),
        (downpour | {"servers": 2, "engine": "torchrun"}, BadInput, "leave servers out"),
        ({"strategy": "no-such"}, mh.UnknownName, "no-such"),
    ):
        with pytest.raises(error, match=message):
            launch(pushes, workers=2, **({"engine": local} | options))
