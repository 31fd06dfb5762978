"""Which modules of a script an optimizer steps, found among the objects that live in the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from manyhands.errors import Unsupported

if TYPE_CHECKING:
    from manyhands.own_loop.session import Session
    from manyhands.strategies.base import Strategy


def outermost_modules() -> list[nn.Module]:
    """All modules of the process that are part of no other module, in the order in which they were made."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def pairs_for(session: Session, strategy: Strategy) -> Callable[[list[torch.optim.Optimizer]], None]:
    """What prepares a script's optimizers, with the modules that hold their parameters, for whole batches."""

    def prepare(optimizers: list[torch.optim.Optimizer]) -> None:
        from manyhands.own_loop.prepare import prepare_whole

        over = replaced(optimizers)
        fresh = [one for one in optimizers if one not in over]
        for optimizer, modules in zip(fresh, stepped_by(fresh, outermost_modules()), strict=True):
            given = modules[0] if len(modules) == 1 else modules
            prepare_whole(session, given, optimizer, strategy=strategy)

    return prepare


def replaced(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Those of which a later one steps a parameter, too: scripts make a new optimizer for another part of the training."""
    taken, found = set[int](), []
    for optimizer in reversed(optimizers):
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own & taken:
            found.append(optimizer)
        taken |= own
    return found


def stepped_by(optimizers: Sequence[torch.optim.Optimizer], roots: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """For each optimizer the outermost modules that hold its parameters, and none that trains by another optimizer.

    Where two optimizers step parts of one module, each gets the largest parts that are its own. Raises Unsupported for
    parameters that are in no module.
    """
    owners = {
        id(p): number
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    found: list[list[nn.Module]] = [[] for _ in optimizers]
    ahead = list(reversed(roots))
    while ahead:
        module = ahead.pop()
        numbers = {owners[id(p)] for p in module.parameters() if id(p) in owners}
        if len(numbers) == 1:
            found[numbers.pop()].append(module)
        elif numbers:
            mixed = [p for p in module._parameters.values() if p is not None and id(p) in owners]
            for p in mixed:
                found[owners[id(p)]].append(_holder(p))
            ahead += reversed([child for child in module._modules.values() if child is not None])
    for optimizer, modules in zip(optimizers, found, strict=True):
        _check_complete(optimizer, modules)
    return found


def _holder(parameter: nn.Parameter) -> nn.Module:
    """A module that holds this parameter, which stays what it is."""
    return nn.ParameterList([parameter])


def _check_complete(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
    held = {id(p) for module in modules for p in module.parameters()}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
    if missing:
        raise Unsupported(
            f"the optimizer {type(optimizer).__name__} steps a tensor (shape {list(missing[0].shape)}) that is a parameter of no nn.Module: make it one "
            "(self.weight = nn.Parameter(...)), or call mh.prepare yourself"
        )
