"""What all groups share: checks of arguments, flat views, the signature of an operation, and the first error.

A signature is an operation as one number: ranks compare it, and a message names both sides where they differ.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import BadInput, ManyhandsError
from manyhands.transport.frame import DTYPES

MEAN_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)


def check_mean(tensor: Tensor, weight: float, bits: int, lost: Tensor | None = None) -> None:
    """BadInput unless `tensor` can be averaged, `weight` is finite and >= 0, `bits` is an int >= 0, and `lost` fits."""
    if tensor.dtype not in MEAN_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in MEAN_DTYPES)
        raise BadInput(
            f"a mean needs a tensor of {names}; got {tensor.dtype}: sum it with all_reduce_, or convert it first"
        )
    if not 0 <= weight < math.inf:
        raise BadInput(
            f"the weight of a mean must be a finite number of at least 0; got {weight}: check the weight that the loss "
            "returns"
        )
    if bits < 0:
        raise BadInput(f"bits must be a whole number of at least 0; got {bits}: set bits with |, and do not use ~")
    if lost is not None and (lost.shape != tensor.shape or lost.dtype not in WIDE or tensor.dtype in WIDE):
        raise BadInput(
            f"lost must be a float32 or float64 tensor of the shape of a 16-bit tensor; got {list(lost.shape)} "
            f"{lost.dtype} for {list(tensor.shape)} {tensor.dtype}: leave lost out for wider numbers"
        )


def check_sum(tensor: Tensor) -> None:
    """BadInput unless sums of `tensor`'s dtype have a meaning."""
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise BadInput(
            f"a sum needs a tensor of real numbers; got {tensor.dtype}: convert it to an integer or floating dtype first"
        )


def check_rank(rank: int, size: int, what: str) -> None:
    """BadInput unless `rank` is in range(size); `what` names the argument."""
    if not 0 <= rank < size:
        raise BadInput(f"{what} must be a rank from 0 to {size - 1}; got {rank}")


def check_peer(rank: int, own: int, size: int, what: str) -> None:
    """BadInput unless `rank` is another rank than `own`."""
    check_rank(rank, size, what)
    if rank == own:
        raise BadInput(
            f"{what} must be another worker's rank; got {rank} on worker {own} itself: copy the tensor instead"
        )


def check_swap(tensor: Tensor, target: int, into: Tensor, source: int, own: int, size: int) -> None:
    """BadInput unless both peers are other ranks than `own`, and both tensors of one shape and dtype."""
    check_peer(target, own, size, "target")
    check_peer(source, own, size, "source")
    if (tensor.shape, tensor.dtype) != (into.shape, into.dtype):
        raise BadInput(
            f"swap needs two tensors of the same shape and dtype; got {list(tensor.shape)} {tensor.dtype} to send and "
            f"{list(into.shape)} {into.dtype} to receive into: use send and receive_"
        )


def slice_of(rank: int, size: int, n: int) -> tuple[int, int]:
    """[start, stop) of the slice of n elements that belongs to `rank`."""
    return rank * n // size, (rank + 1) * n // size


def json_bytes(value: Any) -> bytes:
    """`value` as JSON text; BadInput if it is none."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(
            "all_gather_json takes a JSON value (None, numbers, strings, lists, dicts of them), and this value is not "
            f"one: {error}"
        ) from error


def bits_bytes(bits: int) -> bytes:
    """`bits` as little-endian bytes, none for 0."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little") if bits else b""


def bits_of(blob: bytes | bytearray | memoryview) -> int:
    """The number that `bits_bytes` wrote."""
    return int.from_bytes(blob, "little")


def tensor_of(data: bytes | bytearray) -> Tensor:
    """uint8 [n] of bytes; a bytearray's own memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def flattened(tensor: Tensor) -> Tensor:
    """[n] the elements in order: a view where the tensor is contiguous, else a copy. Its stride is 1."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.as_strided((len(flat),), (1,))  # up to one element counts as contiguous with any stride


def restore(flat: Tensor, tensor: Tensor) -> None:
    """Copy what `flattened` gave back into the tensor, where it was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


OPERATIONS = (
    "mean_",
    "all_reduce_",
    "all_gather",
    "reduce_scatter",
    "broadcast_",
    "barrier",
    "all_gather_json",
    "send",
)
_OPERATION = {name: number for number, name in enumerate(OPERATIONS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


_LINE = 40  # above these bits of a signature stands the caller's line


def signature(operation: str, dtype: torch.dtype = torch.uint8, source: int = 0, line: int = 0) -> int:
    """One number of 64 bits for (operation, dtype, source), and for errors `Group.line`. BadInput for a dtype that cannot travel."""
    number = _DTYPE.get(dtype)
    if number is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise BadInput(f"{operation} takes tensors of {names}; got {dtype}: convert or view it as one of these first")
    return _OPERATION[operation] | number << 8 | source << 16 | min(line, 0x7FFFFF) << _LINE


def without_line(number: int) -> int:
    """What must be equal on all ranks of a signature."""
    return number & ((1 << _LINE) - 1)


def describe(number: int, n: int) -> str:
    """The operation of a signature on n elements, in words."""
    operation = OPERATIONS[number & 0xFF]
    line = f" in line {number >> _LINE}" if number >> _LINE else ""
    if operation in ("barrier", "all_gather_json"):
        return f"{operation}{line}"
    dtype = str(DTYPES[number >> 8 & 0xFF]).removeprefix("torch.")
    source = f" from worker {without_line(number) >> 16}" if operation == "broadcast_" else ""
    return f"{operation}{source} of {n} {dtype}{line}"


def itemsize(number: int) -> int:
    """Bytes an element of a signature's dtype."""
    return DTYPES[number >> 8 & 0xFF].itemsize


class FirstError:
    """Remembers the error that made a group unusable, and raises it at every later call.

    A copy is kept, since a raised error holds its frames and their tensors.
    """

    _error: ManyhandsError | None = None

    def check(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)

    def fail(self, error: ManyhandsError) -> ManyhandsError:
        """Remember the error, unless there was one before; returns it."""
        if self._error is None:
            self._error = copy.copy(error)
            self._failed(error)
        return error

    def _failed(self, error: ManyhandsError) -> None:
        """For subclasses: called once, with the error that counts."""


def closed() -> ManyhandsError:
    return ManyhandsError("this group was closed; make a new one")


def different_operations(step: int, rank: int, own: object, peer: int, theirs: object) -> ManyhandsError:
    """The error of ranks that do not call the same; `own` and `theirs` as `describe` gives them."""
    return ManyhandsError(
        f"the workers called different operations at step {step}: worker {rank} called {own}, worker {peer} called "
        f"{theirs}. All must call the same ones in the same order: look for an if that only some workers enter"
    )


def other_message(step: int, rank: int, expected: str, source: int, came: str) -> ManyhandsError:
    """The error of a `receive_` that does not fit the `send`."""
    return ManyhandsError(
        f"worker {rank} expected {expected} from worker {source} at step {step}; {came} came: "
        "give send and receive_ tensors of the same shape and dtype"
    )
