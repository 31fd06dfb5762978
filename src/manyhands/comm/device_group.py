"""The group of workers on one host that each have a GPU of their own: tensors on it go from GPU to GPU, by nccl.

Words (weights, bits, JSON), tensors on the CPU and messages between two ranks go through the host group, which these
workers have anyway: so nothing but nccl itself listens, on the loopback interface, and every operation begins with the
host group's rendezvous, which notices a lost peer and a mismatch before the GPUs wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store
from typing_extensions import override

from manyhands.comm.checks import (
    FirstError,
    check_mean,
    check_rank,
    check_sum,
    describe,
    different_operations,
    flattened,
    restore,
    signature,
    slice_of,
    without_line,
)
from manyhands.comm.group import Done, Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox
from manyhands.comm.reducing import added_up_as, shares_of
from manyhands.comm.torch_group import count_ring, put_back, summed_as
from manyhands.errors import PeerLost

_NOTHING = torch.empty(0, dtype=torch.uint8)
INTERFACE = "NCCL_SOCKET_IFNAME"  # nccl's variable: where it listens


def has_own_gpu(wanted: str, workers_here: int, gpus: int) -> bool:
    """Whether each worker of a host computes on a GPU of its own. wanted: auto, own, cuda, or one device for all."""
    if wanted in ("auto", "own", "cuda"):
        return 0 < workers_here <= gpus
    return wanted.startswith("cuda") and workers_here == 1


def _of_host(name: str) -> Any:
    """An attribute that is the host group's own."""
    return property(attrgetter(f"_host.{name}"), lambda self, value: setattr(self._host, name, value))


class DeviceGroup(FirstError, Group):
    """The ranks of `host` (the group's own from now on), which also meet in `backend`, a backend of torch.distributed.

    Means, sums, all_gather and broadcast_ of tensors on `device` go through the backend; all else through `host`,
    tensors of the device staged in its memory. A mean is the sum of tensor·(weight/total); 16-bit numbers are added up
    in float32.

    Ledger: what this rank sends in a ring, whichever algorithm the backend takes, as `TorchGroup` counts it.
    """

    def __init__(self, host: Group, backend: Any, device: torch.device, timeout_s: float = 300.0) -> None:
        self._host, self._backend, self._device = host, backend, device
        self._timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = host.rank, host.size

    ledger: Ledger = _of_host("ledger")
    step: int = _of_host("step")
    waited_s: float = _of_host("waited_s")  # until all had arrived; the GPUs' own waiting is not seen here

    # -- on the device -----------------------------------------------------------------------------------------------

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self._device)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        """As the contract says; returns once all ranks have come, while their GPUs add up."""
        if not self._covers(tensor):
            return self._through().start_mean_(tensor, weight, bits, lost)
        check_mean(tensor, weight, bits, lost)
        words = self._meet("mean_", tensor, words=[float(weight), f"{bits:x}"])
        weights = [word[0] for word in words]
        total = MeanResult.of(weights, (int(word[1], 16) for word in words))
        if lost is not None:
            lost.zero_()
        if self.size == 1 or not total.weight or not tensor.numel():
            return Done(total)
        flat, share = flattened(tensor), shares_of(weights, total.weight)[self.rank]
        wide = flat.to(added_up_as(flat.dtype, lost))
        if share is None:
            wide = torch.zeros_like(wide)  # what it held may be NaN
        else:
            wide.mul_(share)
        return _Mean(self, tensor, wide, lost, total, self._sum("mean_", wide))

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        if not self._covers(tensor):
            self._through().all_reduce_(tensor)
            return
        restore(self._summed("all_reduce_", tensor), tensor)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        if not self._covers(tensor):
            return self._through().reduce_scatter(tensor)
        low, high = slice_of(self.rank, self.size, tensor.numel())
        return self._summed("reduce_scatter", tensor)[low:high].clone()

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        if not self._covers(tensor):
            return self._through().all_gather(tensor)
        self._meet("all_gather", tensor)
        flat = flattened(tensor).contiguous()
        rows = flat.new_empty((self.size, flat.numel()))
        if flat.numel():
            into = list(rows.view(torch.uint8).unbind())
            self.wait(self._backend.allgather([into], [flat.view(torch.uint8)]))
            self.ledger.add("all_gather", (self.size - 1) * flat.nbytes, messages=self.size - 1)
        return rows.view(self.size, *tensor.shape)

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        if not self._covers(tensor):
            self._through().broadcast_(tensor, source)
            return
        check_rank(source, self.size, "source")
        self._meet("broadcast_", tensor, source)
        flat = flattened(tensor)
        if flat.numel() and self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            self.wait(self._backend.broadcast([flat.view(torch.uint8)], options))
            if self.rank == source:
                self.ledger.add("broadcast_", (self.size - 1) * flat.nbytes, messages=self.size - 1)
        restore(flat, tensor)

    # -- through the host --------------------------------------------------------------------------------------------

    @override
    def barrier(self) -> None:
        self._meet("barrier", _NOTHING)

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        return [word for (word,) in self._meet("all_gather_json", _NOTHING, words=[value])]

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        self._through().send(tensor, target)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        self._through().receive_(tensor, source)

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        self._through().swap(tensor, target, into, source)

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        return self._through().share(tensor, owner)

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        return self._through().open_mailbox(longest)

    @override
    def close(self) -> None:
        if self._backend is not None:
            self._backend.abort()  # not `shutdown`, which waits for peers that may be gone
            self._backend = None
        self._host.close()

    # -- how ---------------------------------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """For what the backend has begun, timeout_s at most."""
        work.wait(self._timeout)

    def _covers(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def _through(self) -> Group:
        """The host group, unless this group is unusable."""
        self.check()
        return self._host

    def _meet(self, operation: str, tensor: Tensor, source: int = 0, words: Sequence[Any] = ()) -> list[list[Any]]:
        """Every rank's words, once all have come to the same operation."""
        host = self._through()
        number, n = signature(operation, tensor.dtype, source, self.line), tensor.numel()
        try:
            everybodys = host.all_gather_json([number, n, *words])
        except PeerLost as lost:
            raise PeerLost(lost.rank, lost.host, operation, self.step, lost.seconds, lost.why) from lost
        for rank, theirs in enumerate(everybodys):
            if [without_line(theirs[0]), theirs[1]] != [without_line(number), n]:
                own, other = describe(number, n), describe(*theirs[:2])
                raise self.fail(different_operations(self.step, self.rank, own, rank, other))
        return [theirs[2:] for theirs in everybodys]

    def _summed(self, operation: str, tensor: Tensor) -> Tensor:
        """[n] the sum over ranks, in the tensor's dtype and memory of its own."""
        check_sum(tensor)
        self._meet(operation, tensor)
        flat = flattened(tensor)
        total = flat.to(summed_as(flat.dtype), copy=True)
        if total.numel() and self.size > 1:
            self.wait(self._sum(operation, total))
        return total.to(flat.dtype)

    def _sum(self, operation: str, wide: Tensor) -> Any:
        """Begin to add up `wide` in place."""
        count_ring(self, operation, wide)
        return self._backend.allreduce([wide])


class _Mean(Work):
    def __init__(
        self, group: DeviceGroup, tensor: Tensor, wide: Tensor, lost: Tensor | None, total: MeanResult, work: Any
    ) -> None:
        self._group, self._tensor, self._wide, self._lost, self._total = group, tensor, wide, lost, total
        self._work = work

    @override
    def wait(self) -> MeanResult:
        if self._work is not None:
            self._group.wait(self._work)
            self._work = None
            put_back(self._wide, self._tensor, self._lost if self._group.rank == 0 else None)
        return self._total


# -- nccl --------------------------------------------------------------------------------------------------------------


def nccl_group(host: Group, device: torch.device, timeout_s: float) -> Group:
    """A DeviceGroup over nccl for workers of one host with a `device` each; `host` without nccl. A collective."""
    if not all(host.all_gather_json(dist.is_nccl_available())):
        return host
    os.environ.setdefault(INTERFACE, "lo")  # all are on this host, and nccl's sockets know no secret
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = dist.ProcessGroupNCCL(store_of(host), host.rank, host.size, options)
    return DeviceGroup(host, backend, device, timeout_s)


def store_of(host: Group) -> Store:
    """Where the ranks' backends find each other: an unnamed file of rank 0's, while it lives. A collective."""
    path = None
    if host.rank == 0:
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('manyhands-store', os.MFD_CLOEXEC)}"
    return FileStore(str(host.all_gather_json(path)[0]), host.size)
