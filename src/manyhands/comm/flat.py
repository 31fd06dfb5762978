"""Tensors of any shape and layout as flat ones, and back."""

from __future__ import annotations

from torch import Tensor


def flattened(tensor: Tensor) -> Tensor:
    """[n] the elements in order: a view where the tensor is contiguous, else a copy. Its stride is 1."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.as_strided((len(flat),), (1,))  # up to one element counts as contiguous with any stride


def restore(flat: Tensor, tensor: Tensor) -> None:
    """Copy what `flattened` gave back into the tensor, where it was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
