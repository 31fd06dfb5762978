"""Own loops in which all workers compute the same, and programs that never call `prepare`: named in the first steps, and
only where it is a fault."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_loops import seeded
from torch import nn

import plain
from manyhands.comm.solo import SoloGroup
from manyhands.own_loop.first_step_checks import checksum, warning_if_unprepared
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker

Loop = Callable[[Session, nn.Module, torch.optim.Optimizer], Any]
SGD = plain.OPTIMIZERS["sgd"]
X, Y = plain.rows(12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice = slice(12), factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (plain.cross_entropy(model, (X[rows], Y[rows])) * factor).backward()
    optimizer.step()


def own_rows_of(session: Session) -> slice:
    """What the user cuts by hand."""
    return slice(session.worker.rank * 6, session.worker.rank * 6 + 6)


def warned(loop: Loop, strategy: str = "allreduce", size: int = 2) -> list[str]:
    """What the workers were told that ran this loop."""

    def program(worker: Worker) -> None:
        session, model = Session(worker), seeded()
        model, optimizer = prepare_slices(session, model, SGD(model), strategy=strategy)
        loop(session, model, optimizer)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        together(size, program)
    return [str(one.message) for one in told]


def twice(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Prepared without its loader, or the result was not assigned: every worker iterates the plain one."""
    other = seeded()
    other, second = prepare_slices(session, other, SGD(other), strategy=strategy)
    for _ in range(3):
        step(model, optimizer)
        step(other, second)


def noisy(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Dropout differs after the first backward."""
    for number in range(3):
        step(model, optimizer, factor=1 + session.worker.rank * bool(number))


def test_a_forgotten_loader_is_named_once() -> None:
    for strategy in ("allreduce", "local-sgd:period=2"):
        (message,) = warned(partial(twice, strategy=strategy), strategy, 3)
        assert "all 3 workers" in message
        assert "loader = mh.prepare(model, optimizer, loader)" in message
    assert len(warned(noisy)) == 1


def accumulated(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The first backward is on equal rows, the second is not."""
    optimizer.zero_grad()
    plain.cross_entropy(model, (X, Y)).backward()
    plain.cross_entropy(model, (X[session.worker.rank :], Y[session.worker.rank :])).backward()
    optimizer.step()


def steps(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    factor: float = 1.0,
    apart: bool = False,
    **weights: float,
) -> None:
    for _ in range(3):
        if (own := f"rank_{session.worker.rank}") in weights:
            session.state_weight(weights[own])
        step(model, optimizer, own_rows_of(session) if apart else slice(12), factor)


def of_a_loader(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    _, _, shares = prepare_slices(session, model, optimizer, batches)
    for batch in shares:
        optimizer.zero_grad()
        plain.cross_entropy(model, batch).backward()
        optimizer.step()


LAWFUL = {
    "accumulated": accumulated,
    "own rows": partial(steps, apart=True),
    "equal rows of a loader": partial(of_a_loader, batches=[(X[:1].expand(12, -1), Y[:1].expand(12))]),
    "a stand-in, of weight 0": partial(of_a_loader, batches=[(X[:1], Y[:1])] * 3),
    "zeros": partial(steps, factor=0.0),
    "deliberate": partial(steps, rank_0=1, rank_1=1),
    "one without weight": partial(steps, rank_1=0),
}


def test_lawful_equality_is_no_warning() -> None:
    for name, loop in LAWFUL.items():
        assert not warned(loop), name
    for name in ("own rows", "zeros"):
        assert not warned(LAWFUL[name], "local-sgd:period=2"), name


def test_later_steps_are_not_compared() -> None:
    """Nothing travels once the first steps are over."""
    sent = []

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        group, asked = session.worker.group, list[Any]()
        gather = group.all_gather_json
        group.all_gather_json = lambda value: (asked.append(value), gather(value))[1]  # type: ignore[method-assign]
        for _ in range(6):
            step(model, optimizer, own_rows_of(session))
            if not session.worker.rank:
                sent.append(len(asked))

    assert not warned(loop)
    assert sent[0] == sent[-1] > 0


def test_checksum() -> None:
    """Of the bits, in order."""
    vector = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert checksum(vector) == checksum(vector.clone())
    assert len({checksum(v) for v in (vector, vector.flip(0), -vector, vector.double())}) == 4


def warned_unprepared(worker: Worker, steps: int = 5, prepared: Any = None, sent: int = 0) -> list[str]:
    model = plain.mlp()
    optimizer = SGD(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with warning_if_unprepared(worker):
            worker.prepared = prepared
            if sent:
                worker.group.ledger.add("mean", sent)
            for _ in range(steps):
                step(model, optimizer)
        optimizer.step()  # outside, nobody looks
    return [str(one.message) for one in told]


def test_a_program_that_never_prepares_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a few steps, nor where the worker was asked for, something was sent, or torch.distributed is used."""

    def second(**options: Any) -> Worker:
        return Worker(**{"size": 2, "group": SoloGroup(), **options})

    (message,) = warned_unprepared(second())
    assert "2 workers took 3 optimizer steps without exchanging anything" in message
    assert "mh.prepare(model, optimizer, loader)" in message
    for worker, options in (
        (second(), {"steps": 2}),
        (second(), {"prepared": Session(Worker())}),
        (second(), {"sent": 8}),
        (second(rank=1), {}),
        (Worker(size=1), {}),
    ):
        assert not warned_unprepared(worker, **options), options
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not warned_unprepared(second())


def test_an_optimizer_that_a_prepared_one_calls_is_not_named() -> None:
    """SAM steps by another optimizer, of the same parameters. With whole batches all are averaged."""
    wrapped, other = (SGD(seeded()) for _ in range(2))
    own = {id(p) for group in wrapped.param_groups for p in group["params"]}
    slices = SimpleNamespace(prepared=1, whole=None, pairs=[SimpleNamespace(own=own)])
    for session, named in ((slices, 1), (SimpleNamespace(prepared=1, whole=object()), 0)):
        worker = Worker(size=2, group=SoloGroup())
        with warnings.catch_warnings(record=True) as told, warning_if_unprepared(worker):
            warnings.simplefilter("always")
            worker.prepared = session
            for _ in range(3):
                wrapped.step()
                other.step()
        assert ["was not prepared" in str(one.message) for one in told] == [True] * named
