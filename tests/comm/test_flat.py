"""Tensors of any layout as flat ones, and back."""

import pytest
import torch

from manyhands.comm.flat import flattened, restore


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(2, 3)
    flattened(tensor).fill_(1)
    assert tensor.sum() == 6


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2).t(), torch.zeros(6)[::2], torch.tensor(0.0), torch.zeros(2)[::2]])
def test_there_and_back(tensor):
    flat = flattened(tensor)
    assert flat.stride() == (1,)
    flat.copy_(torch.arange(1.0, 1 + tensor.numel()))
    restore(flat, tensor)
    assert tensor.reshape(-1).tolist() == list(range(1, 1 + tensor.numel()))


def test_a_leaf_that_requires_grad():
    leaf = torch.nn.Parameter(torch.zeros(3, 2).t())
    flat = flattened(leaf)
    flat.fill_(2)
    restore(flat, leaf)
    assert leaf.requires_grad
    assert leaf.sum() == 12
