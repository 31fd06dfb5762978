"""What a module computes with beside tensors: its attributes and hooks, and the variables that its methods name."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from manyhands.errors import is_users

_KEPT = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = (bool, int, float, str, tuple, type(None))
_CONTAINERS = (list, dict, set, deque)
_SHORT = 64  # of a container of fewer, what is in it counts, too
_OF_TORCH = {*vars(nn.Module())} - {"training"}  # attributes that every module has
_GLOBAL_HOOKS = (
    *(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks),
    *(torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks),
)
_NOT_THERE = object()


class ModuleState:
    """Of one module: a number that is another one where the script has changed layers, hooks, attributes or variables."""

    def __init__(self, module: nn.Module) -> None:
        self._variables = variables_of(module)
        self._identities: list[int] = []
        self._numbers: dict[Any, int] = {}
        self._newest = 0

    def number(self, module: nn.Module) -> int:
        """Alike for the same state; of a float it counts whether it is 0 or 1, of a tensor dtype and dimensions."""
        identities = self._identities_of(module)
        if identities != self._identities:
            self._variables = variables_of(module)
            self._identities = self._identities_of(module)
            self._newest = self._numbers.setdefault(self._fingerprint(module), len(self._numbers))
        return self._newest

    def follow(self, module: nn.Module) -> None:
        """What has changed since is no other state: a call has filled an attribute."""
        self._identities = self._identities_of(module)

    def _identities_of(self, module: nn.Module) -> list[int]:
        """Of objects, in an order; of hooks the numbers under which they were registered, which never come again."""
        found = [*chain.from_iterable(_GLOBAL_HOOKS)]
        seen, seen_types = set[int](), set[type]()
        for inner in _modules(module):
            state = vars(inner)
            if type(inner) not in seen_types:
                seen_types.add(type(inner))
                if not type(inner).__module__.startswith("torch."):
                    found += map(id, vars(type(inner)).values())
            found += map(id, state.values())
            for name in _HOOKS:
                if hooks := state.get(name):
                    found += hooks
            found += map(id, inner._modules.values())
            for name, value in state.items():
                if name not in _OF_TORCH and type(value) not in _PLAIN:
                    _add_contents(value, found, seen)
        for variable in self._variables:
            found.append(id(variable.value))
            _add_contents(variable.value, found, seen)
        return found

    def _fingerprint(self, module: nn.Module) -> Any:
        modules = [
            (
                type(inner),
                *map(_serial, _functions_of(type(inner))),
                *(tuple(vars(inner).get(name) or ()) for name in _HOOKS),
                *((name, _of_value(value)) for name, value in vars(inner).items() if name not in _OF_TORCH),
            )
            for inner in _modules(module)
        ]
        variables = [(one.name, _of_value(one.value)) for one in self._variables]
        return (*modules, *variables, *chain.from_iterable(_GLOBAL_HOOKS))


def _functions_of(kind: type) -> list[Any]:
    """Of a class of the script: one of them may be replaced."""
    return [] if kind.__module__.startswith("torch.") else [one for one in vars(kind).values() if callable(one)]


def _add_contents(value: Any, found: list[int], seen: set[int]) -> None:
    """What a container or an object of the script holds, to so many values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _CONTAINERS):
        if len(value) < _SHORT:
            found += map(id, _contents(value))
    else:
        found += map(id, _fields_of(value).values())


def _fields_of(value: Any) -> dict[str, Any]:
    """Plain values and containers that an object or a class of the script holds: options, a configuration, counts."""
    if isinstance(value, type):
        held: Any = {} if value.__module__.partition(".")[0] in ("torch", "builtins") else vars(value)
    elif isinstance(value, (nn.Module, Tensor, FunctionType, MethodType, ModuleType, *_PLAIN, *_CONTAINERS)):
        return {}
    else:
        held = getattr(value, "__dict__", {})
    kinds = (*_PLAIN, *_CONTAINERS)
    return {name: one for name, one in held.items() if isinstance(one, kinds) and not name.startswith("__")}


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """`module.modules()`, in half the time."""
    ahead, seen = [module], {module}
    while ahead:
        inner = ahead.pop()
        yield inner
        for child in inner._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                ahead.append(child)


def _of_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if value in (0.0, 1.0) else None
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, tuple) or (isinstance(value, _CONTAINERS) and len(value) < _SHORT):
        return tuple(_of_value(one) if isinstance(one, _PLAIN) else _serial(one) for one in _contents(value))
    if isinstance(value, _PLAIN):
        return value
    if fields := _fields_of(value):
        return type(value), tuple((name, _of_value(one)) for name, one in fields.items())
    return _serial(value)


_serials: dict[int, tuple[Any, int]] = {}  # by identity: a weak reference, and a number that never comes again
_next_serial = count()


def _serial(value: Any) -> Any:
    """Alike for one object alone, also where another one has its address later."""
    reference, number = _serials.get(id(value), (None, 0))
    if reference is not None and reference() is value:
        return number
    try:
        _serials[id(value)] = weakref.ref(value), next(_next_serial)
    except TypeError:  # of some types no weak reference can be made
        return id(value)
    return _serials[id(value)][1]


def _contents(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something of the script sees gradients of a layer's inputs or outputs."""
    return any(_GLOBAL_HOOKS[2:]) or any(
        inner._backward_hooks or inner._backward_pre_hooks for inner in _modules(module)
    )


# -- variables -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """A global variable, or one of a function around a method."""

    name: str
    place: dict[str, Any] | CellType = field(hash=False)

    @property
    def value(self) -> Any:
        if isinstance(self.place, dict):
            return self.place.get(self.name, _NOT_THERE)
        try:
            return self.place.cell_contents
        except ValueError:  # nothing was assigned yet
            return _NOT_THERE

    def assign(self, value: Any) -> None:
        if isinstance(self.place, dict):
            self.place[self.name] = value
        else:
            self.place.cell_contents = value


def variables_of(module: nn.Module) -> list[Variable]:
    """Those with a plain value or a container that the script's own methods and hooks of its layers name, or functions in them."""
    ahead: list[Any] = [hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()]
    for base in dict.fromkeys(base for inner in _modules(module) for base in type(inner).__mro__):
        ahead += vars(base).values()
    for inner in _modules(module):
        ahead += vars(inner).values()
        for name in _HOOKS:
            ahead += vars(inner).get(name, {}).values()
    return variables_in(ahead)


def variables_in(functions: Sequence[Any]) -> list[Variable]:
    """Those that these functions of the script name, or functions in them."""
    found: dict[tuple[str, int], Variable] = {}
    ahead, seen = list(functions), set[int]()
    while ahead:
        function = ahead.pop()
        function = getattr(function, "__func__", function)
        if (
            id(function) in seen
            or not isinstance(function, FunctionType)
            or not is_users(function.__code__.co_filename)
        ):
            continue
        seen.add(id(function))
        names = _names(function.__code__)
        variables = [Variable(name, function.__globals__) for name in names if name in function.__globals__]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            variables.append(Variable(name, cell))
        for variable in variables:
            value = variable.value
            if isinstance(value, FunctionType):
                ahead.append(value)
            elif isinstance(value, (*_PLAIN, *_CONTAINERS)) or _fields_of(value):
                place = variable.place
                found[variable.name, id(place)] = variable
    return list(found.values())


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The global names of a function and of functions in it."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


# -- what a call changes ---------------------------------------------------------------------------------------------------


@dataclass
class KeptValue:
    """A value, and copies of what may change in it."""

    value: Any
    contents: Any = None  # a copy of a container
    version: int = 0
    tensor: Tensor | None = None  # a copy
    fields: dict[str, KeptValue] = field(default_factory=dict)  # of an object of the script

    @classmethod
    def of(cls, value: Any, depth: int = 1) -> KeptValue:
        contents = value.copy() if isinstance(value, _CONTAINERS) else None
        if type(value) is not Tensor:
            held = _fields_of(value) if depth else {}
            return cls(value, contents, fields={name: cls.of(one, depth - 1) for name, one in held.items()})
        version = 0 if value.is_inference() else value._version
        return cls(value, contents, version, value.detach().clone())

    def is_changed(self, now: Any) -> bool:
        if now is not self.value and not _is_same(now, self.value):
            return True
        if self._is_written:
            return True
        held = _fields_of(self.value) if self.fields else {}
        return self._has_other_contents or any(
            kept.is_changed(held.get(name, _NOT_THERE)) for name, kept in self.fields.items()
        )

    @property
    def _is_written(self) -> bool:
        return self.tensor is not None and not self.value.is_inference() and self.value._version != self.version

    @property
    def _has_other_contents(self) -> bool:
        if self.contents is None:
            return False
        before, now = _contents(self.contents), _contents(self.value)
        return len(before) != len(now) or not all(map(_is_same, before, now))

    def put_back(self) -> Any:
        """The value as it was."""
        if self._has_other_contents:
            self.value.clear()
            (self.value.update if isinstance(self.value, dict | set) else self.value.extend)(self.contents)
        if self._is_written:
            self.value.data.copy_(self.tensor)
        for name, kept in self.fields.items():
            if kept.is_changed(getattr(self.value, name, _NOT_THERE)):
                setattr(self.value, name, kept.put_back())
        return self.value


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or not isinstance(one, _PLAIN):
        return one is other
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


class Kept:
    """Attributes of objects of the script, and variables of its functions, as they are now."""

    def __init__(self, objects: Iterable[Any], variables: Sequence[Variable]) -> None:
        """objects: a module's layers, or those of which a dataset consists."""
        self._attributes: list[tuple[dict[str, Any], dict[str, KeptValue]]] = [
            (vars(one), {name: KeptValue.of(value) for name, value in vars(one).items() if name not in _KEPT})
            for one in objects
        ]
        self._variables = [(one, KeptValue.of(one.value)) for one in variables]

    @property
    def changed(self) -> str:
        """The name of one that is another one now; "" where none is."""
        for now, attributes in self._attributes:
            for name, kept in attributes.items():
                if kept.is_changed(now.get(name, _NOT_THERE)):
                    return name
            if fresh := now.keys() - attributes.keys() - set(_KEPT):
                return str(min(fresh))
        return next((one.name for one, kept in self._variables if kept.is_changed(one.value)), "")

    def put_back(self) -> None:
        for now, attributes in self._attributes:
            for name in now.keys() - attributes.keys() - set(_KEPT):
                del now[name]
            for name, kept in attributes.items():
                now[name] = kept.put_back()
        for one, kept in self._variables:
            if kept.is_changed(one.value):
                one.assign(kept.put_back())
