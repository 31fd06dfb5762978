"""Building a part of a model with one process's random numbers: each parameter has the value that it has in the whole model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.parallel.absent import Absent

_DRAWS = frozenset(
    ["normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"]
)
_STD = 0.02  # of values that stand for a model's own: what they compute stays finite
_building = threading.Lock()  # the hook on registrations is the process's


def build(make: Callable[[], nn.Module], held: Collection[str] = (), *, draws: bool = True) -> nn.Module:
    """What `make` builds, in which all parameters but those that are held are absent. The random stream goes on as if all
    were there; without `draws` nothing is drawn for what is absent, which is quicker.

    held: names, any of a tied parameter's. Memory is for what is held and one parameter besides. Two calls
    of `make` are needed where something is held, since a parameter has no name yet when it is registered. Of a module that
    was there before, `make` gives a copy. Raises BadInput where only a part of it was.
    """
    state = torch.get_rng_state()
    model, sources = _build(make, frozenset(), draws)
    every = _every_name(model)
    if every and not any(hasattr(p, "_number") for _, p in every):
        return take_away(copy.deepcopy(model), held)
    if held and all(hasattr(p, "_number") for _, p in every):
        numbers = {p._number for name, p in every if name in held}  # type: ignore[attr-defined]
        while copied := {sources[number] for number in numbers if number in sources} - numbers:
            numbers |= copied  # what a held one is a copy of is there while the model is built
        torch.set_rng_state(state)
        model, _ = _build(make, numbers, draws)
    if old := [name for name, p in _every_name(model) if not hasattr(p, "_number") or (name in held and is_absent(p))]:
        raise BadInput(
            f"model() gave a model with parameters of an earlier call, such as {old[0]}, and a stage builds its part of them: make all layers "
            "inside of model() each time, or give the model itself instead of a function"
        )
    return take_away(model, held) if held else model


def take_away(model: nn.Module, held: Collection[str]) -> nn.Module:
    """The same of a module that is there: its other parameters become absent, in place."""
    kept = {id(p) for name, p in _every_name(model) if name in held}
    _replace(model, lambda p: id(p) not in kept, _absent_parameter)
    _name_them(model)
    return model


def give_memory(model: nn.Module, names: Collection[str] | None = None) -> list[nn.Parameter]:
    """Absent parameters are real ones again, in place; their values are to be set. names: of these alone, any of a tied one's.

    Returns them.
    """
    wanted = {id(p) for name, p in _every_name(model) if (names is None or name in names) and is_absent(p)}

    def real(p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)

    return _replace(model, lambda p: id(p) in wanted, real)


def _replace(
    model: nn.Module, wanted: Callable[[nn.Parameter], bool], other: Callable[[nn.Parameter], Any]
) -> list[Any]:
    """Put others in the place of those that are wanted; one for a tied one. Returns what was put there."""
    made: dict[int, Any] = {}
    for name, p in _every_name(model):
        if wanted(p):
            if id(p) not in made:
                made[id(p)] = other(p)
            module, _, last = name.rpartition(".")
            model.get_submodule(module)._parameters[last] = made[id(p)]
    return list(made.values())


def fill(model: nn.Module, names: Collection[str]) -> None:
    """Absent parameters of these names get memory and small random values, in place."""
    for p in give_memory(model, names):
        p.data.normal_(std=_STD)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """The same module, with its buffers and those of its parameters that are there on a device."""
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None and not is_absent(p):
                p.data = p.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


@contextmanager
def without_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """Within, all parameters of a module are absent; what is written to its buffers is undone."""
    own = [(module, dict(module._parameters)) for module in model.modules()]
    with buffers_kept(model):
        try:
            yield take_away(model, ())
        finally:
            for module, parameters in own:
                module._parameters.update(parameters)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """What is written to a module's buffers within is undone."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)


def is_absent(p: Tensor) -> bool:
    return isinstance(p, Absent)


def tied_names(model: nn.Module) -> dict[str, str]:
    """{each further name of a tied parameter: its first one, which `named_parameters` gives}"""
    first: dict[int, str] = {}
    return {name: first[id(p)] for name, p in _every_name(model) if first.setdefault(id(p), name) != name}


def _build(make: Callable[[], nn.Module], numbers: Collection[int], draws: bool) -> tuple[nn.Module, dict[int, int]]:
    """What `make` builds, with the parameters of these numbers alone, and {number of a parameter: of the one that it is a
    deep copy of}. Parameters have numbers in the order in which they are registered, or copied."""
    count, sources, own = 0, dict[int, int](), threading.get_ident()
    copying: list[nn.Parameter] = []  # those that say how they are copied

    def add(p: nn.Parameter, kept: Callable[[], nn.Parameter]) -> Any:
        nonlocal count
        made: Any = kept() if count in numbers else _absent_parameter(p)
        made._number, made.__deepcopy__ = count, partial(copied, made)
        copying.append(made)
        count += 1
        return made

    def registered(module: nn.Module, name: str, p: nn.Parameter | None) -> Any:
        if threading.get_ident() != own or p is None or hasattr(p, "_number"):  # of another thread, or tied
            return None
        return add(p, lambda: p)

    def copied(p: nn.Parameter, memo: dict[int, Any]) -> Any:
        sources[count] = p._number  # type: ignore[attr-defined]
        memo[id(p)] = add(p, lambda: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
        return memo[id(p)]

    with _building:
        handle = register_module_parameter_registration_hook(registered)
        try:
            with _Drawing(draws):
                model = make()
        finally:
            handle.remove()
            for p in copying:
                del p.__deepcopy__
    _name_them(model)
    return model, sources


def _name_them(model: nn.Module) -> None:
    for name, p in _every_name(model):
        if isinstance(p, Absent) and not p.parameter:
            p.parameter = name


def _every_name(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Tied parameters by each of their names."""
    return list(model.named_parameters(remove_duplicate=False))


def _absent_parameter(p: Tensor) -> Absent:
    absent = Absent.like(p, parameter="")
    absent._is_param = True  # what isinstance(…, nn.Parameter) asks for
    absent.set_requires_grad(p.requires_grad)
    return absent


class _Drawing(TorchDispatchMode):
    """Random fills of absent parameters draw, into memory that nobody reads: later ones get the numbers that they would."""

    def __init__(self, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        if name in _DRAWS and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            if self._draws:
                scratch = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
                func(scratch, *args[1:], **given)
            return args[0]
        return func(*args, **given)
