"""Rules on numbers that a hand can check, each in place and out of place."""

import pytest
import torch
from torch import tensor

from manyhands.comm.reducing import naive_mean
from manyhands.errors import BadInput, UnknownName
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Push
from manyhands.server.rules import RULES, make_rule
from manyhands.server.rules.base import weighted_mean

OPTIONS = {"distance": {"rate": 0.5}, "adagrad": {"rate": 0.1}, "outer": {"momentum": 0.9}}


def push(update, worker=0, **fields):
    return Push(worker=worker, update=tensor(update, dtype=torch.float64), weight=fields.pop("weight", 1.0), **fields)


def merged(rule, pushes, old=(1.0, 2.0), **options):
    """The next center, computed out of place; in place it is the same, and the old one is untouched."""
    old = tensor(old, dtype=torch.float64)
    results = []
    for new in (torch.full_like(old, float("nan")), old.clone()):
        made = make_rule(ServerSpec(rule=rule, options=options))
        made.start(old.clone())
        source = old.clone() if len(results) == 0 else new
        before = source.clone()
        made.merge(source, new, [push(*arguments, **fields) for arguments, fields in pushes])
        assert new is source or torch.equal(source, before), "a merge changed the version that others read"
        results.append(new)
    assert torch.equal(results[0], results[1]), "in place a merge gives something else"
    return results[0].tolist()


def one(update, **fields):
    return ((update,), fields)


def test_add():
    assert merged("add", [one([0.5, -1.0])]) == [1.5, 1.0]
    assert merged("add", [one([0.5, -1.0]), one([1.0, 1.0], worker=1)]) == [2.5, 2.0]


def test_staleness():
    """CASE 12: an update of staleness 3 enters with weight 1/4."""
    assert merged("staleness", [one([4.0, 8.0], staleness=3)]) == [2.0, 4.0]
    assert merged("staleness", [one([4.0, 8.0], staleness=0)]) == [5.0, 10.0]


def test_distance():
    """A center that moved by sqrt(rate) halves the update, one that did not move lets it in whole."""
    pulled = tensor([1.0, 4.0], dtype=torch.float64)
    assert merged("distance", [one([1.0, 1.0], pulled=pulled)], rate=4.0) == [2.0, 2.5]
    assert merged("distance", [one([1.0, 1.0])], rate=4.0) == [2.0, 3.0]


def test_elastic():
    rule = make_rule(ServerSpec(rule="elastic", options={"alpha": 0.25}))
    center, pushes = tensor([1.0, 2.0]), [Push(w, tensor(x), 1.0) for w, x in enumerate(([5.0, 2.0], [1.0, -2.0]))]
    rule.merge(center, center, pushes)
    assert [p.answer.tolist() for p in pushes] == [[1.0, 0.0], [0.0, -1.0]], "differences are to the same old center"
    assert center.tolist() == [2.0, 1.0]
    rule.merge(center, center, [Push(0, tensor([4.0, 1.0]), 2.0)])
    assert center.tolist() == [3.0, 1.0], "the weight multiplies alpha"
    assert merged("elastic", [one([5.0, 2.0]), one([1.0, -2.0], worker=1)], alpha=0.25) == [2.0, 1.0]


def test_elastic_in_step_reaches_its_equilibrium():
    """CASE 6: center 1.0, workers off it by (-1, -.5, 1.5)."""
    rate, alpha, curvature, targets = 0.1, 0.2, 2.0, [-1.0, 0.0, 4.0]
    rule = make_rule(ServerSpec(rule="elastic", options={"alpha": alpha}))
    center, workers = torch.zeros(1, dtype=torch.float64), [torch.zeros(1, dtype=torch.float64) for _ in targets]
    for _ in range(300):
        gradients = [curvature * (x - b) for x, b in zip(workers, targets, strict=True)]
        pushes = [Push(w, x, 1.0) for w, x in enumerate(workers)]
        rule.merge(center, center, pushes)
        workers = [x - rate * g - p.answer for x, g, p in zip(workers, gradients, pushes, strict=True)]
    assert float(center) == pytest.approx(1.0, abs=1e-9)
    assert [float(x - center) for x in workers] == pytest.approx([-1.0, -0.5, 1.5], abs=1e-9)


def test_adagrad_is_torchs():
    """Two pushes of accumulated gradients move the center as two steps of torch's Adagrad."""
    gradients = [[3.0, -4.0], [1.0, 2.0]]
    parameter = torch.nn.Parameter(tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-10)
    for gradient in gradients:
        parameter.grad = tensor(gradient, dtype=torch.float64)
        optimizer.step()
    got = merged("adagrad", [one(gradient, worker=w) for w, gradient in enumerate(gradients)], rate=0.1)
    assert got == pytest.approx(parameter.tolist(), abs=1e-15)


def test_adagrad_leaves_what_never_had_a_gradient():
    assert merged("adagrad", [one([0.0, 1.0])], rate=0.5) == [1.0, pytest.approx(1.5)]


def test_weighted_mean_is_the_naive_one():
    """CASE 24: a mean, not a sum; bit-equal to the reference, and one push is not multiplied."""
    updates, weights = [torch.randn(50) for _ in range(4)], [1.0, 3.0, 0.7, 2.2]
    wanted = naive_mean(updates, weights)
    assert torch.equal(
        weighted_mean([Push(w, u.clone(), x) for w, (u, x) in enumerate(zip(updates, weights, strict=True))]), wanted
    )
    assert weighted_mean([Push(0, updates[0], 7.0)]) is updates[0]


def test_weighted_mean_of_16_bits_is_added_in_32():
    updates = [tensor([256.0], dtype=torch.bfloat16)] + [tensor([3.0], dtype=torch.bfloat16)] * 3
    mean = weighted_mean([Push(w, u.clone(), 1.0) for w, u in enumerate(updates)])
    assert mean.dtype == torch.bfloat16
    assert float(mean) == float(tensor(265 / 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("rule", [name for name in RULES if name != "quorum"])
def test_what_a_rule_remembers_brings_it_back(rule):
    options = OPTIONS.get(rule, {})
    center = tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    first = make_rule(ServerSpec(rule=rule, options=options))
    first.start(center)
    for update in ([1.0, 2.0, -1.0], [0.5, 0.0, 2.0]):
        first.merge(center, center, [push(update)])
    vectors, numbers = {n: v.clone() for n, v in first.vectors().items()}, first.numbers()
    assert all(vector.shape == center.shape for vector in vectors.values())
    again, second = center.clone(), make_rule(ServerSpec(rule=rule, options=options))
    second.load(again, {"center": again, **vectors}, numbers)
    for made, at in ((first, center), (second, again)):
        made.merge(at, at, [push([1.0, 1.0, 1.0])])
    assert torch.equal(again, center)


def test_a_name_that_does_not_exist_lists_those_that_do():
    with pytest.raises(UnknownName, match="add, staleness, distance"):
        make_rule(ServerSpec(rule="sum"))
    with pytest.raises(UnknownName, match="alpha"):
        make_rule(ServerSpec(rule="elastic", options={"beta": 1}))
    with pytest.raises(UnknownName, match="none"):
        make_rule(ServerSpec(rule="add", options={"_sum": 1}))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("elastic", {"alpha": 0.0}),
        ("elastic", {"alpha": float("nan")}),
        ("distance", {"rate": -1}),
        ("adagrad", {"rate": "fast"}),
        ("adagrad", {"eps": 0}),
        ("quorum", {"backups": -1}),
        ("quorum", {"backups": True}),
    ],
)
def test_options_out_of_range(rule, options):
    with pytest.raises(BadInput):
        make_rule(ServerSpec(rule=rule, options=options))


def test_which_rules_add_what_the_workers_own_steps_moved():
    assert {name for name, rule in RULES.items() if rule.adds_steps} == {"add", "staleness", "distance"}
    assert {name for name, rule in RULES.items() if rule.divides_by_staleness} == {"staleness"}
