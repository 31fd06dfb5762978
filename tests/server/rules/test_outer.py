"""The outer optimizer moves the center as torch's own would."""

import pytest
import torch

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Push
from manyhands.server.rules import make_rule
from manyhands.server.rules.outer import ELEMENTWISE


def made(**options):
    return make_rule(ServerSpec(rule="outer", options=options))


def walk(rule, center, updates, *, in_place):
    rule.start(center)
    for update in updates:
        new = center if in_place else torch.full_like(center, float("nan"))
        rule.merge(center, new, [Push(0, update, 1.0)])
        center = new
    return center


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_every_optimizer_steps_along_minus_the_update(optimizer):
    """In place and out of place, over shards too: each weight is treated by itself."""
    updates = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    start = torch.randn(5, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    reference = getattr(torch.optim, optimizer)([parameter], lr=0.1)
    for update in updates:
        parameter.grad = -update
        reference.step()
    for in_place in (True, False):
        got = walk(made(optimizer=optimizer, rate=0.1), start.clone(), updates, in_place=in_place)
        assert torch.equal(got, parameter.detach())
    left = walk(made(optimizer=optimizer, rate=0.1), start[:2].clone(), [u[:2] for u in updates], in_place=False)
    assert torch.equal(left, parameter.detach()[:2])


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_its_state_comes_back(optimizer):
    center = torch.randn(4, dtype=torch.float64)
    rule, again = made(optimizer=optimizer, rate=0.1), made(optimizer=optimizer, rate=0.1)
    rule.start(center)
    for _ in range(2):
        rule.merge(center, center, [Push(0, torch.randn(4, dtype=torch.float64), 1.0)])
    copy = center.clone()
    again.load(copy, {name: v.clone() for name, v in rule.vectors().items()}, rule.numbers())
    update = torch.randn(4, dtype=torch.float64)
    for one, at in ((rule, center), (again, copy)):
        one.merge(at, at, [Push(0, update.clone(), 1.0)])
    assert torch.equal(copy, center)


def test_before_the_first_step_there_is_nothing_to_remember():
    rule, again = made(optimizer="Adam"), made(optimizer="Adam")
    center = torch.zeros(3)
    rule.start(center)
    again.load(center, rule.vectors(), rule.numbers())
    again.merge(center, center, [Push(0, torch.ones(3), 1.0)])
    assert center.tolist() == pytest.approx([0.7] * 3)


def test_a_round_is_one_step_along_the_weighted_mean():
    """CASE 24."""
    center = torch.zeros(1, dtype=torch.float64)
    rule = made(rate=1.0)
    rule.start(center)
    updates = [torch.tensor([x], dtype=torch.float64) for x in (1.0, 5.0)]
    rule.merge(center, center, [Push(w, u, 1.0 + 2 * w) for w, u in enumerate(updates)])
    assert float(center) == 4.0


@pytest.mark.parametrize("optimizer", ["LBFGS", "Muon", "Adafactor", "SparseAdam", "Optimizer", "sgd"])
def test_others_are_refused(optimizer):
    with pytest.raises(BadInput, match="SGD, Adagrad"):
        made(optimizer=optimizer)


@pytest.mark.parametrize("options", [{"rate": 0}, {"optimizer": "Adam", "momentum": 0.9}, {"options": {"speed": 1}}])
def test_options_that_the_optimizer_does_not_take(options):
    with pytest.raises(BadInput):
        made(**options)
