"""data/rng_scope.py: a random state that nobody else sees."""

import random

import numpy as np
import torch

from manyhands.data.rng_scope import RngScope
from manyhands.rng import mixed


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_it_goes_on_where_it_stood_and_leaves_no_trace():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected_outside = [draw(), draw()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    own, inside, outside = RngScope((5, 0)), [], []
    for _ in range(2):
        with own:
            inside.append(draw())
        outside.append(draw())
    assert outside == expected_outside
    torch.manual_seed(mixed((5, 0)))
    assert [torch.rand(1).item(), torch.rand(1).item()] == [first for first, _, _ in inside]
    assert inside[0] != inside[1]


def test_an_error_inside_puts_the_outside_back():
    before = torch.get_rng_state()
    try:
        with RngScope((1,)):
            torch.rand(3)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_it_goes_on_from_here_as_if_there_were_one_stream():
    """Where nobody else draws; else the process's generators stay where they went, which is another way."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [draw() for _ in range(4)]
    for else_drawn in (False, True):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        got, own = [draw()], RngScope.from_here()
        with own.in_place():
            for _ in range(2):
                with own:
                    got.append(draw())
                if else_drawn:
                    assert draw() not in expected
        got.append(draw())
        assert got[:3] == expected[:3]
        assert (got[3] in expected) is not else_drawn


def test_neighbouring_keys_are_far_apart():
    assert len({mixed((a, b)) for a in range(30) for b in range(30)}) == 900
