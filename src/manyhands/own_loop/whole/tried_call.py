"""What computing a call once has shown: outputs, what was drawn, printed, taken out of torch, and what lives on."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_RELATIVE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass
class TriedCall:
    """What computing a call gave."""

    outputs: list[Any]
    structure: Any
    ends: list[Tensor]  # buffers afterwards
    drawn: list[tuple[int, ...]]
    decides: bool  # a number that Python was given, or a size, follows from rows
    of_rows: list[bool]  # by output, whether it was computed from them
    printed: str
    kept: str  # what lives on: an attribute that changed, or a tensor; ""
    hooked: bool = False  # gradients may go another way than values
    gradients: list[Tensor] = field(default_factory=list)  # where they were asked for


class Observer(TorchDispatchMode):
    """Random numbers become constants, so that both ways can be compared; what was drawn, looked at and made is noted."""

    def __init__(self, parameters: Sequence[Tensor], rows: Sequence[Tensor] = ()) -> None:
        """rows: arguments of which the call has a part."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_rows = {one.untyped_storage()._cdata for one in rows}  # memory of what was computed from them
        self._parameters = {one.untyped_storage()._cdata: one for one in parameters if one.layout == torch.strided}
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # parameters, by identity, and what they were before
        self.drawn: list[tuple[int, ...]] = []  # shapes
        self.decides = False  # a number or a size follows from the rows: what Python does may, too
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # the script's own, and their states
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            self._keep([*args, *kwargs.values()])
        drawing = torch.Tag.nondeterministic_seeded in function.tags
        result = self._drawn(function, args, kwargs) if drawing else function(*args, **kwargs)
        if self._of_rows:
            self._follow(function, args, kwargs, result)
        self.note(result)
        return result

    def _follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """What follows from rows: memory, numbers that Python gets, sizes."""
        tensors = [*args, *kwargs.values()]
        tensors = [one for given in tensors for one in (given if isinstance(given, list | tuple) else (given,))]
        if not any(map(self.is_of_rows, tensors)):
            return
        if isinstance(result, bool | int | float):
            self.decides = True
        if torch.Tag.dynamic_output_shape in function.tags:
            self.decides |= function is not torch.ops.aten.index.Tensor or _by_mask(args[1])
        written = tensors[:1] if function._schema.is_mutable else []
        for one in (*written, *(result if isinstance(result, list | tuple) else (result,))):
            if isinstance(one, Tensor) and one.layout == torch.strided:
                self._of_rows.add(one.untyped_storage()._cdata)

    def is_of_rows(self, one: Any) -> bool:
        """Whether it was computed from the rows."""
        return isinstance(one, Tensor) and one.layout == torch.strided and one.untyped_storage()._cdata in self._of_rows

    def _keep(self, values: Sequence[Any]) -> None:
        """A parameter among these may be written to."""
        for one in values:
            if isinstance(one, Tensor) and one.layout == torch.strided:
                found = self._parameters.get(one.untyped_storage()._cdata)
                if found is not None and id(found) not in self.written:
                    self.written[id(found)] = found, found.detach().clone()

    def note(self, values: Any) -> None:
        """These were made for this call."""
        found = [values] if isinstance(values, Tensor) else pytree.tree_leaves(values)
        self._made += [
            StorageWeakRef(one.untyped_storage())
            for one in found
            if type(one) is Tensor and one.layout == torch.strided and not one.is_meta
        ]

    def alive(self, known: Sequence[Any]) -> bool:
        """Whether memory that was made is still somebody's, beside these."""
        torch.clear_autocast_cache()
        own = {one.untyped_storage()._cdata for one in known if isinstance(one, Tensor) and one.layout == torch.strided}
        if not any(self._lives(one, own) for one in self._made):
            return False
        gc.collect()
        return any(self._lives(one, own) for one in self._made)

    def _lives(self, storage: StorageWeakRef, own: set[int]) -> bool:
        return not storage.expired() and storage.cdata not in own

    def _drawn(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = function._schema.name.partition("::")[2]
        names = function._schema.arguments
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            self.generators.setdefault(id(generator), (generator, generator.get_state()))
        defaults = {one.name: one.default_value for one in names}
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        rate = next(
            (one for one in ("dropout_p", "dropout", "p") if one in given and not name.startswith("bernoulli")), ""
        )
        if rate and (not given[rate] or given.get("train") is False):
            return function(*args, **kwargs)
        if name == "native_dropout":
            self.drawn.append(tuple(args[0].shape))
            return args[0] / max(1 - args[1], 1e-9), torch.ones_like(args[0], dtype=torch.bool)
        if rate:  # of attention and recurrent layers, which drop out within
            result = function(**{**given, rate: 0.0})
            self.drawn.append(tuple(result[0].shape))
            return result
        result = function(*args, **kwargs)
        self.drawn.append(tuple(result.shape) if isinstance(result, Tensor) else ())
        if not isinstance(result, Tensor) or name.startswith(("randperm", "multinomial")):
            return result
        return result.fill_(1 if name.startswith("bernoulli") else 0.5 if result.is_floating_point() else 0)


def _by_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def needs_all_rows(part: TriedCall, whole: TriedCall) -> str:
    """Why the call is another one with fewer rows; "" where only its outputs can say it."""
    if part.kept:
        return f"it keeps something of all rows from call to call ({part.kept})"
    if part.printed != whole.printed:
        return "it prints something of all rows"
    if part.decides:
        return "what it computes is decided by values of its rows"
    if not all(map(is_close, part.ends, whole.ends)):
        return "its buffers depend on all rows"
    return "" if _drawn_by_row(part.drawn, whole.drawn) else "it draws random numbers for the batch as a whole"


def _drawn_by_row(part: list[tuple[int, ...]], whole: list[tuple[int, ...]]) -> bool:
    """Whether all numbers, if any, were drawn for each row."""
    return len(whole) == len(part) and all(a != b for a, b in zip(whole, part, strict=True))


def _largest(x: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    least, most = torch.aminmax(x.abs() if x.is_complex() else x)
    return max(-float(least), float(most))


def is_close(one: Tensor, other: Tensor) -> bool:
    """But for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = _RELATIVE.get(one.dtype.to_real() if one.is_complex() else one.dtype, 1e-5)
    if not other.numel():
        return True
    difference = one - other
    apart = _largest(difference)
    if not apart:
        return True
    largest = _largest(other.where(difference != 0, 0))  # a mask's -1e9 is no measure for the others
    if math.isfinite(apart) and math.isfinite(largest):
        return apart <= tolerance * max(largest, 1e-30)
    largest = float(torch.nan_to_num(other.abs().float(), 0, 0, 0).max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(largest, 1e-30), equal_nan=True)
