"""Which modules an optimizer steps."""

import pytest
import torch
from torch import nn

from manyhands.errors import Unsupported
from manyhands.own_loop.observed.modules import outermost_modules, replaced, stepped_by

SGD = torch.optim.SGD


def test_the_outermost_modules_of_the_process() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.ReLU())
    found = outermost_modules()
    assert any(one is outer for one in found)
    assert not any(one is inner or one is outer[1] for one in found)


def test_a_model_with_a_head_apart_and_a_model_of_which_a_part_trains() -> None:
    body, head, other = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)
    (modules,) = stepped_by([SGD([*body.parameters(), *head.parameters()], 0.1)], [body, other, head])
    assert modules == [body, head]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert stepped_by([SGD(model[1].parameters(), 0.1)], [model]) == [[model]]
    alone = torch.zeros(3, requires_grad=True)
    with pytest.raises(Unsupported, match=r"shape \[3\].*no nn.Module"):
        stepped_by([SGD([alone], 0.1)], [])


def test_two_optimizers_of_one_module_get_a_part_each() -> None:
    both = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))})
    both.scale = nn.Parameter(torch.ones(1))
    of_generator, of_critic = [*both["generator"].parameters(), both.scale], both["critic"].parameters()
    first, second = stepped_by([SGD(of_generator, 0.1), SGD(of_critic, 0.1)], [both])
    assert both["generator"] in first
    assert [p for module in first for p in module.parameters() if p is both.scale]
    assert second == [both["critic"]]


def test_an_optimizer_that_a_later_one_replaces() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, apart, second = SGD(model.parameters(), 0.1), SGD(other.parameters(), 0.1), SGD(model.parameters(), 0.01)
    assert replaced([first, apart, second]) == [first]
