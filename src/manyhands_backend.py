"""Registers the backend `manyhands` of torch.distributed; torch calls `register` at the end of its own import.

It is beside the package and not in it: importing the package here would import torch within torch's import. It is small,
so that `import torch` takes no longer, and it never raises, since that would keep torch from being imported.

MANYHANDS_BACKEND=replace: programs that ask for gloo, or for none by name, get manyhands.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from typing import Any

NAME, VARIABLE = "manyhands", "MANYHANDS_BACKEND"
REPLACED = ("gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")


def register() -> None:
    """For torch's entry points `torch.backends`; idempotent."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
            return
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
        if os.environ.get(VARIABLE) == "replace":
            replace_gloo()
    except Exception as error:  # noqa: BLE001 - see above
        warnings.warn(f"manyhands: its backend for torch.distributed is not there: {error}", stacklevel=2)


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from manyhands.process_group.group import ManyhandsProcessGroup

    return ManyhandsProcessGroup(store, rank, size, timeout)


def replace_gloo() -> None:
    """From now on, programs in this process that ask for gloo, or for none by name, get manyhands; idempotent."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d.init_process_group, "_manyhands"):
        return
    for name, by_default in (("init_process_group", True), ("new_group", False)):
        replaced = _with_ours(getattr(distributed_c10d, name), by_default)
        setattr(distributed_c10d, name, replaced)
        setattr(dist, name, replaced)


def _with_ours(function: Any, by_default: bool) -> Any:
    """The function, with manyhands where it is called for gloo; by_default: also where it is called for none."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        asked = bound.arguments.get("backend")
        if (asked is None and by_default) or (asked is not None and str(asked).lower() in REPLACED):
            bound.arguments["backend"] = NAME
        return function(*bound.args, **bound.kwargs)

    call._manyhands = True  # type: ignore[attr-defined]
    return call
