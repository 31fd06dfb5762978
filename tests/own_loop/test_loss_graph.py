"""Losses that add up over rows: told from means by their graph, named in the first step, and right with the remedy."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from own_loops import assert_all_are, loader_of, loop, seeded, trained
from torch import Tensor, nn
from torch.nn import functional as F

import plain
from manyhands.engines.sim.driver_client import backward_in_turn
from manyhands.errors import Unsupported
from manyhands.own_loop import backward_watch
from manyhands.own_loop.loss_graph import EITHER, MEAN, MIXED, SUM, UNKNOWN, divisor_of, is_mean, over_rows, rows_meet
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker

ROWS = 8
LINEAR = nn.Linear(5, 3)
AS_MANY = nn.Parameter(torch.rand(ROWS, 2))
TARGETS, LABELS = torch.rand(ROWS, 3), torch.arange(ROWS) % 3
Loss = Callable[[Tensor], Tensor]

SUMS: dict[str, Loss] = {
    "criterion": lambda z: nn.CrossEntropyLoss(reduction="sum")(z, LABELS),
    "class weights": lambda z: F.cross_entropy(z, LABELS, torch.rand(3), reduction="sum"),
    "soft targets": lambda z: F.cross_entropy(z, TARGETS, reduction="sum"),
    "mse": lambda z: F.mse_loss(z, TARGETS, reduction="sum"),
    "by hand": lambda z: (z - TARGETS).square().sum(),
    "half of squares": lambda z: 0.5 * ((z - TARGETS) ** 2).sum(),
    "of rows' means": lambda z: F.mse_loss(z, TARGETS, reduction="none").mean(1).sum(),
    "over tokens": lambda z: z.reshape(-1).exp().sum(),
    "vae": lambda z: F.binary_cross_entropy_with_logits(z, TARGETS, reduction="sum") - 0.5 * torch.sum(1 + z - z.exp()),
    "with a penalty": lambda z: F.nll_loss(z, LABELS, reduction="sum") + 1e-3 * LINEAR.weight.square().sum(),
    "beside a mean": lambda z: F.mse_loss(z, TARGETS) + z.square().sum(),
    "kl": lambda z: F.kl_div(z, TARGETS, reduction="sum"),
    "converted": lambda z: z.exp().sum(dim=[0, 1]).double().reshape(()),
}
MEANS: dict[str, Loss] = {
    "criterion": lambda z: nn.CrossEntropyLoss()(z, LABELS),
    "by hand": lambda z: (z - TARGETS).square().sum(1).mean(),
    "features of the mean": lambda z: torch.cat([z] * 8, 1).square().mean(0).sum(),
    "features of the mean, from behind": lambda z: torch.cat([z] * 8, 1).square().mean(-2).sum(),
    "penalties": lambda z: F.mse_loss(z, TARGETS) + sum(p.abs().sum() for p in LINEAR.parameters()),
    "a penalty of as many rows": lambda z: F.mse_loss(z, TARGETS) + AS_MANY.square().sum(),
    "tasks": lambda z: torch.stack([z[:, i].mean() for i in (0, 1, 2, 0, 1, 2, 0, 1)]).sum(),
    "a number alone": lambda z: F.mse_loss(z, TARGETS).sum(),
}


PARTS: dict[str, Loss] = {  # a sum in part, or by a number that may be these rows' or everybody's
    "a penalty": SUMS.pop("with a penalty"),
    "a mean": SUMS.pop("beside a mean"),
    "a small factor": lambda z: F.mse_loss(z, TARGETS) + 1e-3 * z.square().sum(),
    "batchmean": lambda z: F.kl_div(z, TARGETS, reduction="batchmean"),
    "by the rows": lambda z: F.mse_loss(z, TARGETS, reduction="sum") / len(z),
    "over tokens that count": lambda z: (z * (TARGETS > 0.5)).sum() / (TARGETS > 0.5).sum(),
    "variances of features": lambda z: torch.cat([z] * 8, 1).var(0).sum(),  # as many features as rows, or a multiple
    "products of features": lambda z: (torch.cat([z] * 8, 1).T @ torch.cat([z] * 8, 1)).square().sum(),
    "other divisors": lambda z: F.cross_entropy(z, LABELS) + F.nll_loss(z, LABELS, ignore_index=0),
}
NOT_KNOWN: dict[str, Loss] = {
    "rows apart": lambda z: F.mse_loss(z, TARGETS, reduction="none"),
    "a norm": lambda z: z.norm(),
    "a mean of what looks at all rows": lambda z: F.cross_entropy(z / z.norm(dim=0), LABELS),
    "stacked vectors and a mask": lambda z: (torch.stack([z[0], z[1]]) * torch.rand(2, 3)).prod() * 2,
}


def output() -> Tensor:
    return LINEAR(torch.rand(ROWS, 5))


def test_what_a_loss_is_over_rows() -> None:
    for kind, losses in ((SUM, SUMS), (MEAN, MEANS), (MIXED, PARTS), (UNKNOWN, NOT_KNOWN)):
        for name, loss in losses.items():
            assert over_rows(loss(output()), ROWS).kind == kind, name
    assert {name for name, loss in MEANS.items() if is_mean(loss(output()))} == {"criterion", "by hand"}
    assert not any(is_mean(loss(output())) for loss in SUMS.values())
    long = sum((output().mean() for _ in range(3000)), torch.zeros(()))
    assert over_rows(long, ROWS).kind == MEAN
    few = {1: 1.0, 2: 0.5}  # rows that a factor may divide by
    assert all(over_rows(factor * output()[:rows].square().sum(), rows).kind == EITHER for rows, factor in few.items())
    vector = output() / torch.rand(ROWS, 3)
    assert over_rows((vector.sum() / torch.tensor([2.0])).sum(), ROWS).kind == SUM


MEETINGS: dict[str, Loss] = {
    "similarities within the batch": lambda z: F.cross_entropy(z @ z.T, torch.arange(ROWS)),
    "covariances of features": lambda z: (z.T @ z / ROWS - torch.eye(3)).square().sum(),
    "variances of features": lambda z: (1 - z.var(0)).relu().mean(),
}
APART: dict[str, Loss] = {
    "a layer": lambda z: F.linear(z, LINEAR.weight.T).square().mean(),
    "a layer with computed weights": lambda z: (z @ F.normalize(LINEAR.weight, dim=1)).square().mean(),
    "keys of another model": lambda z: F.cross_entropy(z @ torch.rand(3, 9), LABELS),
    "products of each row": lambda z: torch.bmm(z[:, None], z[:, :, None]).mean(),
    "variances of each row": lambda z: z.var(1).mean(),
}


def test_rows_that_look_at_each_other() -> None:
    for losses in (MEETINGS, APART, SUMS, MEANS):
        for name, loss in losses.items():
            assert rows_meet(loss(output())) == (losses is MEETINGS), name


DIVISORS: dict[str, tuple[Loss, float | None]] = {
    "rows": (lambda z: F.cross_entropy(z, LABELS), ROWS),
    "class weights": (lambda z: F.cross_entropy(z, LABELS, torch.tensor([1.0, 2.0, 3.0])), 15.0),
    "ignored targets": (lambda z: F.cross_entropy(z, LABELS, ignore_index=0) * 0.5, 5.0),
    "smoothed": (lambda z: F.cross_entropy(z, LABELS, ignore_index=0, label_smoothing=0.1), None),
    "images": (lambda z: F.nll_loss(z[..., None, None], LABELS[:, None, None], ignore_index=2), 6.0),
    "two that divide by the same": (lambda z: F.cross_entropy(z, LABELS) + F.nll_loss(z, LABELS), ROWS),
    "two that divide by others": (lambda z: F.cross_entropy(z, LABELS) + F.nll_loss(z, LABELS, ignore_index=0), None),
    "beside another loss": (lambda z: F.cross_entropy(z, LABELS, ignore_index=0) + z.square().mean(), None),
    "a sum": (lambda z: F.cross_entropy(z, LABELS, reduction="sum"), None),
}


def test_what_a_loss_divides_by() -> None:
    for name, (loss, expected) in DIVISORS.items():
        assert divisor_of(loss(output())) == expected, name


# -- in the loop -----------------------------------------------------------------------------------------------------


def loss_over_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 1


def train(session: Session, loss: Callable[[nn.Module, Any], Tensor], strategy: str = "allreduce") -> Tensor:
    model: nn.Module = seeded()
    model, rule, shares = prepare_slices(session, model, plain.OPTIMIZERS["sgd"](model), loader_of(), strategy=strategy)
    loop(model, rule, shares, loss=loss, epochs=2)
    return plain.flat(model)


def with_a_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_over_rows(model, batch) + 1e-3 * next(model.parameters()).square().sum()


def test_a_sum_is_one_process_with_and_without_its_weight_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`mh.weight("sum")`: the mean of N times the sums is their sum, also of a batch with fewer rows than workers."""

    def program(worker: Worker, states: bool) -> Tensor:
        session = Session(worker)

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            if states:
                session.state_weight("sum")
            return loss_over_rows(model, batch)

        return train(session, loss)

    expected = plain.flat(trained(None, loss=loss_over_rows, epochs=2)[0])
    for size, states in ((1, True), (5, True), (3, False)):
        assert not capsys.readouterr().err
        assert_all_are(together(size, partial(program, states=states)), expected)
    assert capsys.readouterr().err.count("sum over rows") == 1


def test_a_loss_that_slices_do_not_show_is_refused_on_all_workers() -> None:
    def refused(worker: Worker, loss: Any, strategy: str) -> str:
        with pytest.raises(Unsupported) as caught:
            train(Session(worker), loss, strategy)
        return str(caught.value)

    contrast = lambda model, batch: F.cross_entropy(model(batch[0]) @ model(batch[0]).T, torch.arange(len(batch[0])))  # noqa: E731
    for loss, why in ((with_a_penalty, "a sum over rows, and another part is none"), (contrast, "look at each other")):
        for message in together(3, partial(refused, loss=loss, strategy="allreduce")):
            assert why in message
            assert 'mh.weight("sum")' in message
    assert together(2, lambda worker: train(Session(worker), contrast, "local-sgd:period=2"))  # each its own, as meant


def test_backward_goes_on_where_another_one_that_stood_before_it_is_gone() -> None:
    """It is torch's own again without a session. One ends while sim replaces backward: sim puts back what it found."""
    gc.collect()
    plain_backward, session = torch.autograd.backward, Session(Worker(size=2))
    assert torch.autograd.backward is backward_watch._backward is not plain_backward
    with backward_in_turn():
        del session
        gc.collect()
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    Session(Worker(size=2))
    gc.collect()
    assert torch.autograd.backward is plain_backward
