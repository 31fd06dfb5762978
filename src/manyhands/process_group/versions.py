"""What torch calls differently from version to version: its process groups' operations, and gloo's options."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""{name since torch 2.13: before}. Scripts and other libraries call either."""


def method_of(inner: Any, name: str) -> Any:
    """The operation of gloo's or nccl's object, by whichever name it has there."""
    return getattr(inner, name, None) or getattr(inner, OLD_NAMES[name])


def gloo_of(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> ProcessGroupGloo:
    """gloo, listening on this address. Two ranks are connected when they first have something for each other."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    lazy = {"lazy_init": True} if "lazy_init" in (ProcessGroupGloo.create_device.__doc__ or "") else {}
    options._devices = [ProcessGroupGloo.create_device(hostname=host, **lazy)]
    options._timeout = timeout
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    gloo._set_sequence_number_for_group()
    return gloo


def has_old_and_new_names(group: type[ProcessGroup]) -> type[ProcessGroup]:
    """A class decorator: what has the new name is found by the old one too."""
    for new, old in OLD_NAMES.items():
        setattr(group, old, inspect.getattr_static(group, new))
    return group
