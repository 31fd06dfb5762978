"""Own loops in which all workers compute the same: named in the first steps, and only where it is a fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from own_loops import loader_of, seeded
from torch import nn

import plain
from manyhands.own_loop.first_step_checks import checksum
from manyhands.own_loop.prepare import prepare_on
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker

Loop = Callable[[Session, nn.Module, torch.optim.Optimizer], None]
X, Y = plain.rows(12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = 12) -> None:
    optimizer.zero_grad()
    plain.cross_entropy(model, (X[start:stop], Y[start:stop])).backward()
    optimizer.step()


def warned(loop: Loop, strategy: str = "allreduce", size: int = 2) -> list[str]:
    """What the workers were told that ran this loop."""

    def program(worker: Worker) -> None:
        session, model = Session(worker), seeded()
        model, optimizer = prepare_on(session, model, plain.OPTIMIZERS["sgd"](model), strategy=strategy)
        loop(session, model, optimizer)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        together(size, program)
    return [str(one.message) for one in told]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=2"])
def test_a_forgotten_loader_is_named_once(strategy: str) -> None:
    """Prepared without its loader, or the result was not assigned: every worker iterates the plain one."""

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in loader_of():
            optimizer.zero_grad()
            plain.cross_entropy(model, (x, y)).backward()
            optimizer.step()

    (message,) = warned(loop, strategy, 3)
    assert "all 3 workers" in message
    assert "loader = mh.prepare(model, optimizer, loader)" in message


def test_a_forgotten_loader_is_named_where_dropout_differs_after_the_first_backward() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (plain.cross_entropy(model, (X, Y)) * (1 + session.worker.rank)).backward()  # as noise of its own
            optimizer.step()

    assert len(warned(loop)) == 1


def test_two_pairs_are_one_warning() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        other = seeded()
        other, second = prepare_on(session, other, plain.OPTIMIZERS["sgd"](other))
        step(model, optimizer)
        step(other, second)

    assert len(warned(loop)) == 1


def test_accumulated_gradients_are_compared_together() -> None:
    """The first backward is on equal rows, the second is not."""

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        plain.cross_entropy(model, (X, Y)).backward()
        plain.cross_entropy(model, (X[session.worker.rank :], Y[session.worker.rank :])).backward()
        optimizer.step()

    assert not warned(loop)


def own_rows(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the user cut by hand."""
    for _ in range(4):
        step(model, optimizer, session.worker.rank * 6, session.worker.rank * 6 + 6)


def equal_rows_of_a_loader(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A full batch of equal rows: every worker's share is the same, lawfully."""
    rows = [(X[:1].expand(12, -1), Y[:1].expand(12))]
    _, _, shares = prepare_on(session, model, optimizer, rows)
    for x, y in shares:
        optimizer.zero_grad()
        plain.cross_entropy(model, (x, y)).backward()
        optimizer.step()


def zeros(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        (model(X).sum() * 0).backward()
        optimizer.step()


def deliberate(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        session.state_weight(1)
        step(model, optimizer)


def one_without_weight(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        if session.worker.rank:
            session.state_weight(0)
        step(model, optimizer)


@pytest.mark.parametrize("loop", [own_rows, equal_rows_of_a_loader, zeros, deliberate, one_without_weight])
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=2"])
def test_lawful_equality_is_no_warning(loop: Loop, strategy: str) -> None:
    assert not warned(loop, strategy)


def test_stand_in_rows_are_no_warning() -> None:
    """One row for two workers: the first gets a stand-in of weight 0."""

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _, _, shares = prepare_on(session, model, optimizer, [(X[:1], Y[:1])] * 3)
        for x, y in shares:
            optimizer.zero_grad()
            plain.cross_entropy(model, (x, y)).backward()
            optimizer.step()

    assert not warned(loop)


def test_later_steps_are_not_compared() -> None:
    """A few small messages in all: nothing travels once the first steps are over."""
    gathered = []

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(6):
            step(model, optimizer, session.worker.rank * 6, session.worker.rank * 6 + 6)
            if not session.worker.rank:
                gathered.append(session.worker.group.ledger.as_dict().get("all_gather_json"))

    assert not warned(loop)
    assert gathered[0] == gathered[-1]


def test_checksum() -> None:
    """Of the bits, in order."""
    vector = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert checksum(vector) == checksum(vector.clone())
    assert len({checksum(v) for v in (vector, vector.flip(0), -vector, vector.double())}) == 4
