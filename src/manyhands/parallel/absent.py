"""Absent tensors: shape and dtype without data, in the place of what other stages hold or compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree
from typing_extensions import override

from manyhands.errors import Unsupported, calling_line

_NO_VALUES = {
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}
"""Functions that look at shape and dtype alone: what they make is there."""
_READ = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.nonzero, torch.nonzero, torch.equal, Tensor.equal, torch.allclose),
}
_DEVICE = Tensor.device.__get__
_KINDS = {
    Tensor.is_meta.__get__: "meta",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: "cuda",  # type: ignore[attr-defined]
}
_MOVES = {Tensor.cpu, Tensor.cuda}


class AbsentRecorder(Protocol):
    """Who notes what happens to absent tensors while a program is traced."""

    def made(self, absent: Absent) -> None:
        """A function, or a parameter's registration, has made it."""

    def used(self, absent: Absent) -> None:
        """A function computes with its data."""


_recording = threading.local()


@contextmanager
def recorded(recorder: AbsentRecorder) -> Iterator[None]:
    """Within, this thread's absent tensors are noted."""
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None


_running = threading.local()
_CPU = torch.device("cpu")


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Within, this thread's absent tensors say that they are on this device."""
    before = device_now()
    _running.device = device
    try:
        yield
    finally:
        _running.device = before


def device_now() -> torch.device:
    """Where absent tensors say that they are: on the CPU, unless within `on`."""
    found: torch.device = getattr(_running, "device", _CPU)
    return found


class Absent(Tensor):
    """A tensor without data. Functions of it give absent tensors; what reads data raises Unsupported, with file and line.

    Once `fill` was called it stands for that tensor.
    """

    filled: Tensor | None
    parameter: str | None
    """Its name, if it is one."""

    @staticmethod
    def like(tensor: Tensor, *, parameter: str | None = None) -> Absent:
        """Of the shape, strides and dtype of a tensor, on whatever device."""
        with DisableTorchFunctionSubclass():
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            return Absent._of(meta, parameter)

    @staticmethod
    def _of(meta: Tensor, parameter: str | None = None) -> Absent:
        absent = meta.detach().as_subclass(Absent)
        absent.filled, absent.parameter = None, parameter
        if (recorder := getattr(_recording, "recorder", None)) is not None:
            recorder.made(absent)
        return absent

    def fill(self, tensor: Tensor) -> None:
        """From now on it is this one."""
        self.filled = tensor

    def set_requires_grad(self, value: bool) -> None:
        with DisableTorchFunctionSubclass():
            self.requires_grad_(value)

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        if any(one.filled is not None for one in absent):
            leaves = [leaf if not isinstance(leaf, Absent) or leaf.filled is None else leaf.filled for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
            if not absent:
                return func(*args, **kwargs)
        if func == _DEVICE:
            return device_now()
        if func in _KINDS:
            return _KINDS[func] == device_now().type
        if func in _READ:
            raise Unsupported(f"{calling_line()}: this reads a value that another stage computes; {_REMEDY}")
        if func in _NO_VALUES:
            return _run(func, leaves, spec, _real)
        if func in _MOVES and isinstance(args[0], Absent):
            return args[0]
        if func is Tensor.__getitem__:
            leaves, spec = pytree.tree_flatten(((args[0], _without_masks(args[1])), {}))
        _check_writes(func, args, kwargs)
        try:
            result = _run(func, leaves, spec, _meta)
        except NotImplementedError as error:  # the shape depends on values
            raise Unsupported(
                f"{calling_line()}: what this gives depends on values that another stage computes; {_REMEDY}"
            ) from error
        found = pytree.tree_map(_absent, result)
        if (recorder := getattr(_recording, "recorder", None)) is not None and tensors_of(found):
            for one in absent:
                recorder.used(one)
        return found

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return f"Absent({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        with DisableTorchFunctionSubclass():
            made = Absent.like(self, parameter=self.parameter)
            made._is_param = getattr(self, "_is_param", False)
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    __hash__ = object.__hash__


_REMEDY = "stages cannot cut a model there. Compute it from inputs that every stage has, put cut= where nothing before it is read, or train without stages"


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a nested structure, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _run(func: Callable[..., Any], leaves: list[Any], spec: Any, to: Callable[[Any], Any]) -> Any:
    with DisableTorchFunctionSubclass(), torch.no_grad():
        args, kwargs = pytree.tree_unflatten([to(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)


def _real(leaf: Any) -> Any:
    """Memory that nobody reads, in the place of an absent tensor."""
    if not isinstance(leaf, Absent):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device_now())


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")):
        return torch.device("meta")
    return leaf


def _absent(leaf: Any) -> Any:
    if isinstance(leaf, Absent) or not isinstance(leaf, Tensor):
        return leaf
    with DisableTorchFunctionSubclass():
        return Absent._of(leaf) if leaf.is_meta else leaf


def _without_masks(index: Any) -> Any:
    """An index in which masks that are there are numbers of elements: shapes follow from these."""
    parts = index if isinstance(index, tuple) else (index,)
    found = list[Any]()
    for part in parts:
        mask = isinstance(part, Tensor) and not isinstance(part, Absent) and part.dtype in (torch.bool, torch.uint8)
        found += part.nonzero(as_tuple=True) if mask else [part]
    return tuple(found)


def _check_writes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Unsupported for what would be written into a tensor that is there."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    target = (kwargs or {}).get("out", args[0] if in_place and args else None)
    if isinstance(target, Tensor) and not isinstance(target, Absent):
        raise Unsupported(
            f"{calling_line()}: this writes a value that another stage computes into a tensor that every stage makes for itself; make a new tensor of them "
            "(torch.cat, torch.stack, torch.where)"
        )
