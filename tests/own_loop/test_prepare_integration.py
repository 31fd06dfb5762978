"""The user's own loop on simulated workers, each with random numbers of its own, and on real processes."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import assert_all_are, train_shuffled
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.own_loop.launch import launch, run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def draw_by_hand(prepare: bool, alike: bool) -> tuple[list[Tensor], Tensor]:
    """As docs/own-loop.md has it: the rows of each step's batch on this worker, and the parameters."""
    torch.manual_seed(0)
    model: Any = plain.mlp()
    rule = plain.OPTIMIZERS["adamw"](model)
    if prepare:
        model, rule = mh.prepare(model, rule)
    x, y = plain.rows(39)
    draws, batches = torch.Generator().manual_seed(1337), []
    for _ in range(4):
        ix = torch.randint(len(x), (10,), generator=draws if alike else None)
        if alike:
            ix = ix.tensor_split(mh.worker().size)[mh.worker().rank]
            mh.weight(len(ix))
        rule.zero_grad()
        plain.cross_entropy(model, (x[ix], y[ix])).backward()
        rule.step()
        batches.append(ix)
    return batches, plain.flat(model)


class Shuffled:
    """An iterable of batches that shuffles by Python's own generator, before and while it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(12))
        random.shuffle(order)
        for start in (0, 4, 8):
            yield torch.tensor(order[start : start + 4]) + 100 * random.randrange(2)


def draw() -> tuple[list[int], float]:
    random.seed()
    model: Any = nn.Linear(1, 1)
    loader: Any = Shuffled()
    model, _, loader = mh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    rows = [row for _ in range(2) for batch in loader for row in batch.tolist()]
    return rows, torch.rand(()).item()


class Drawn(IterableDataset[Tensor]):
    """Draws its rows from torch's generator."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(1, dtype=torch.float64) for _ in range(24))


class Scaled(DataLoader[Tensor]):
    """Draws from NumPy's, batch for batch."""

    def __iter__(self) -> Iterator[Tensor]:
        return (batch * np.random.rand() for batch in super().__iter__())


def train_on_drawn(kind: str) -> tuple[float, float]:
    """Two passes and half of a third: the weight, and the next random number."""
    torch.manual_seed(0)
    np.random.seed(0)
    model: Any = nn.Linear(1, 1, dtype=torch.float64)
    loader: Any = DataLoader(Drawn(), batch_size=4)
    if kind == "loader":
        rows: Any = torch.arange(24.0, dtype=torch.float64)[:, None] / 24
        loader = Scaled(rows, batch_size=4, shuffle=True)
    model, optimizer, loader = mh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for epoch in range(3):
        for i, x in enumerate(loader):
            optimizer.zero_grad()
            (model(x) - 3 * x).square().mean().backward()
            optimizer.step()
            if epoch == i == 2:
                break
    return model.weight.item(), torch.rand(()).item()


def test_processes_equal_the_plain_script(local: Local) -> None:
    """CASE 2: with the plain script's own random order, a cosine schedule, clipping, and accumulation; each worker's own loader
    process loads its rows alone."""
    found = launch(train_shuffled, "adamw", True, 1, 2, workers=2, engine=local, threads_per_worker=1)
    assert_all_are(found, train_shuffled("adamw", False, accumulate=2))


def test_three_lines_make_a_hand_drawn_batch_one_process() -> None:
    """10 rows on 4 workers: the parts of each step's batch are the batch, and the parameters are one process's.

    Without them batches differ after the first backward.
    """
    batches, expected = draw_by_hand(prepare=False, alike=True)
    found = launch(draw_by_hand, True, True, workers=4, engine=Sim())
    for step, batch in enumerate(batches):
        assert torch.equal(torch.cat([own[step] for own, _ in found]), batch)
    assert_all_are([parameters for _, parameters in found], expected)
    with pytest.warns(UserWarning, match="computed the same gradient in step 0"):
        (first, _), (second, _) = launch(draw_by_hand, True, False, workers=2, engine=Sim())
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, False, False]


@pytest.mark.filterwarnings("ignore:no optimizer took a step")
def test_one_order_for_all_and_dropout_for_each() -> None:
    """CASE 18: every row once a pass though each process was seeded apart; what the loop itself draws differs by rank."""
    (first, noise), (second, other_noise) = launch(draw, workers=2, engine=Sim())
    both = [first[i : i + 2] + second[i : i + 2] for i in range(0, 12, 2)]
    for epoch in (both[:3], both[3:]):
        assert sorted(row % 100 for batch in epoch for row in batch) == list(range(12))
    assert all(len({row // 100 for row in batch}) == 1 for batch in both)
    assert noise != other_noise


def test_a_loader_that_draws_its_batches_gives_one_processs() -> None:
    """After the first backward too, and in the next pass."""
    for kind in ("stream", "loader"):
        expected, following = train_on_drawn(kind)
        several = launch(train_on_drawn, kind, workers=2, engine=Sim())
        assert [abs(weight - expected) < 1e-12 for weight, _ in several] == [True, True], kind
        assert several[0][1] == following, kind


class Entropy(IterableDataset[Tensor]):
    """Gives each worker other rows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.as_tensor(np.random.default_rng().random((12, 1), dtype=np.float32)))


def test_rows_that_differ_by_worker_are_named_by_mh_train() -> None:
    """In a prepared loop: test_prepared_loader.py."""
    task = mh.Task(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean(),
        train_data=DataLoader(Entropy(), batch_size=4),
        epochs=1,
    )
    for strategy in ("allreduce", "downpour"):
        with pytest.raises(mh.BadInput, match="different batches"):
            mh.train(task, workers=2, strategy=strategy, engine="sim")


@pytest.mark.parametrize("name", ["plain.py", pytest.param("gan.py", marks=pytest.mark.slow)])
def test_examples_run_alone_and_together(
    local: Local, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first worker prints, once; plain.py prints what it prints alone, as far as it shows digits."""
    monkeypatch.setattr(sys, "argv", [name])
    arguments = ["--epochs", "2" if name == "plain.py" else "10"]
    printed = []
    for workers in (1, 2):
        assert run_script(EXAMPLES / name, arguments, workers=workers, engine=local, threads_per_worker=1) == 0
        printed.append(capfd.readouterr().out)
    assert [text.count("epoch") for text in printed] == [2 if name == "plain.py" else 1] * 2
    if name == "plain.py":
        assert [line.split()[-1][:2] for line in printed[0].splitlines()] == [
            line.split()[-1][:2] for line in printed[1].splitlines()
        ]
