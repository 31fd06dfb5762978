"""The group over torch.distributed: gloo between CPUs, nccl between GPUs with a gloo group for control words."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import (
    FirstError,
    bits_bytes,
    bits_of,
    check_mean,
    check_peer,
    check_rank,
    check_sum,
    check_swap,
    closed,
    flattened,
    json_bytes,
    restore,
    slice_of,
    tensor_of,
)
from manyhands.comm.group import Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox
from manyhands.comm.ring.mailbox import Connect, SocketMailbox
from manyhands.errors import BadInput, PeerLost

_INLINE = 112  # bytes of bits beside a weight; more take an exchange of their own
_CONTROL = struct.Struct("<dq")
_SUMMED_AS_THEY_ARE = (torch.float32, torch.float64, torch.int64, torch.int32)

# what gloo and nccl say when a peer is gone or silent; there is no type or code for it
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out",
    "timeout",
    "remote process exited",
)


class TorchGroup(FirstError, Group):
    """The ranks of a torch.distributed process group (None: the default one), which stays the caller's.

    device: where `allocate` makes tensors, which need no copies under nccl only if they are on the GPU.
    hosts: of the ranks, for messages. connect: for mailboxes, which torch.distributed does not have.
    timeout_s: of every wait on the host. gloo also has its own, given to `init_process_group`: the shorter one counts.

    A mean multiplies by the own weight, sums, and divides by the total, since the total travels beside the tensor:
    weight·tensor must not overflow. 16-bit numbers are summed in float32.
    `waited_s` is the time until all ranks' control words were here.

    Ledger: what this rank sends in a ring, whichever algorithm the backend takes: 2·(n - n/size) elements in
    2·(size-1) messages for a mean or sum (also for reduce_scatter, which is a sum here), (size-1)·n for all_gather;
    broadcast_ counts (size-1)·n where it comes from.

    PeerLost has rank -1 where torch.distributed does not report which peer it was.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 300.0,
        device: torch.device | str = "cpu",
        hosts: Sequence[str] = (),
        connect: Connect | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise BadInput("TorchGroup needs torch.distributed: call torch.distributed.init_process_group first")
        self._process_group: dist.ProcessGroup = process_group or dist.group.WORLD  # type: ignore[assignment]
        self._timeout_s, self._device = timeout_s, torch.device(device)
        self._ranks = dist.get_process_group_ranks(self._process_group)
        self.rank, self.size, self.ledger = dist.get_rank(self._process_group), len(self._ranks), Ledger()
        self._hosts, self._connect, self._mailboxes = (
            list(hosts) or ["an unknown host"] * self.size,
            connect,
            list[SocketMailbox](),
        )
        self._control = self._process_group
        if dist.get_backend(self._process_group) != "gloo":
            self._control = dist.new_group(self._ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))

    # -- the contract ------------------------------------------------------------------------------------------------

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self._device)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        return _Mean(self, tensor, float(weight), bits_bytes(bits), lost)

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)
        total = self._sum(tensor, "all_reduce_")
        tensor.detach().copy_(total.view(tensor.shape))

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        flat = flattened(tensor).contiguous()
        result = flat.new_empty((self.size, flat.numel()))
        self.gather(flat.view(torch.uint8), result.view(torch.uint8), "all_gather")
        self.ledger.add("all_gather", (self.size - 1) * flat.nbytes, messages=self.size - 1)
        return result.view(self.size, *tensor.shape)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        check_sum(tensor)
        low, high = slice_of(self.rank, self.size, tensor.numel())
        return self._sum(tensor, "reduce_scatter")[low:high].to(tensor.dtype, copy=True)

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")
        flat = flattened(tensor)
        if flat.numel() and self.size > 1:
            with self.watching("broadcast_"):
                group, data = self.group_for(tensor), flat.view(torch.uint8)
                self.wait(dist.broadcast(data, self._ranks[source], group=group, async_op=True))
        restore(flat, tensor)
        if self.rank == source:
            self.ledger.add("broadcast_", (self.size - 1) * flat.nbytes, messages=self.size - 1)

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        """As the contract says; it may wait until `target` receives."""
        check_peer(target, self.rank, self.size, "target")
        flat = flattened(tensor)
        with self.watching("send", target):
            self.wait(dist.isend(_sendable(flat), self._ranks[target], group=self.group_for(tensor)))
        self.ledger.add("send", flat.nbytes)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        check_peer(source, self.rank, self.size, "source")
        flat = flattened(tensor)
        with self.watching("receive_", source):
            self.wait(dist.irecv(_sendable(flat), self._ranks[source], group=self.group_for(tensor)))
        restore(flat, tensor)

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        check_swap(tensor, target, into, source, self.rank, self.size)
        flat, came = flattened(tensor), flattened(into)
        with self.watching("swap", source):
            sending = dist.isend(_sendable(flat), self._ranks[target], group=self.group_for(tensor))
            self.wait(dist.irecv(_sendable(came), self._ranks[source], group=self.group_for(into)))
            self.wait(sending)
        self.ledger.add("send", flat.nbytes)
        restore(came, into)

    @override
    def barrier(self) -> None:
        start = time.perf_counter()
        with self.watching("barrier"):
            self.wait(dist.barrier(self._control, async_op=True))
        self.waited_s += time.perf_counter() - start

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.gather_bytes(json_bytes(value), "all_gather_json")]

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        self.check()
        if self._connect is None:
            return super().open_mailbox(longest)
        channels = self._connect()
        self._mailboxes.append(SocketMailbox(self, channels, range(self.size), self._hosts, self._timeout_s))
        return self._mailboxes[-1]

    @override
    def close(self) -> None:
        """As the contract says; the process group given stays open, and is let go of.

        While anything holds it, its threads live on when its owner has destroyed it. Those of gloo may then drop a
        tensor while Python ends, which aborts the process.
        """
        if self._error is None and self._control is not self._process_group:
            dist.destroy_process_group(self._control)
        for mailbox in self._mailboxes:
            mailbox.close()
        self.fail(closed())
        if hasattr(self, "_control"):
            del self._control, self._process_group

    # -- for this file -----------------------------------------------------------------------------------------------

    def group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """nccl moves nothing between CPUs."""
        return self._control if tensor.device.type == "cpu" else self._process_group

    def wait(self, work: dist.Work | None) -> None:
        """Wait for what was started, timeout_s at most."""
        if work is not None:
            work.wait(timedelta(seconds=self._timeout_s))

    @contextmanager
    def watching(self, operation: str, peer: int = -1) -> Iterator[None]:
        """Turn torch's errors that mean a lost peer into PeerLost; raise it again for ever after."""
        self.check()
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error).lower() for sign in _LOST):
                raise
            rank = 1 - self.rank if self.size == 2 else peer
            host, why = "an unknown host", f"is gone or silent (torch.distributed: {str(error).splitlines()[0]})"
            seconds = time.perf_counter() - start
            raise self.fail(PeerLost(rank, host, operation, self.step, seconds, why)) from error

    def gather(self, data: Tensor, into: Tensor, operation: str) -> None:
        """uint8 [n] of every rank -> `into` [size, n]."""
        if data.numel():
            with self.watching(operation):
                self.wait(dist.all_gather(list(into.unbind()), data, group=self.group_for(data), async_op=True))

    def gather_bytes(self, text: bytes, operation: str) -> list[bytes]:
        """Every rank's bytes, of any length."""
        lengths = torch.empty((self.size, 8), dtype=torch.uint8)
        self.gather(tensor_of(struct.pack("<q", len(text))), lengths, operation)
        sizes = [struct.unpack("<q", bytes(row.tolist()))[0] for row in lengths]
        texts = torch.empty((self.size, max(sizes)), dtype=torch.uint8)
        self.gather(tensor_of(text.ljust(max(sizes), b"\0")), texts, operation)
        return [row.numpy().tobytes()[:size] for row, size in zip(texts, sizes, strict=True)]

    def _sum(self, tensor: Tensor, operation: str) -> Tensor:
        """[n] the sum over ranks, in a tensor of its own."""
        flat = flattened(tensor)
        total = flat.to(summed_as(tensor.dtype), copy=True)
        if total.numel() and self.size > 1:
            with self.watching(operation):
                self.wait(dist.all_reduce(total, group=self.group_for(tensor), async_op=True))
            count_ring(self, operation, flat)
        return total


class _Mean(Work):
    """A mean under way: weight·tensor is being summed, and the control words gathered, at the same time."""

    def __init__(self, group: TorchGroup, tensor: Tensor, weight: float, blob: bytes, lost: Tensor | None) -> None:
        self._group, self._tensor, self._blob = group, tensor, blob
        self._lost = None if lost is None else lost.zero_()
        self._total: MeanResult | None = MeanResult(weight, bits_of(blob)) if group.size == 1 else None
        if self._total is None:
            with group.watching("mean_"):
                self._start(weight)

    @override
    def wait(self) -> MeanResult:
        if self._total is None:
            self._total = self._finish()
        return self._total

    def _start(self, weight: float) -> None:
        words = tensor_of(_CONTROL.pack(weight, len(self._blob)) + self._blob[:_INLINE].ljust(_INLINE, b"\0"))
        self._words = words.new_empty((self._group.size, len(words)))
        control = self._group.group_for(words)
        self._gathered = dist.all_gather(list(self._words.unbind()), words, group=control, async_op=True)
        self._summed = None
        dtype = summed_as(self._tensor.dtype) if self._lost is None else self._lost.dtype
        self._shares = flattened(self._tensor)  # [n] weight·tensor, in its own memory where that can be undone
        if not weight:  # zeros, not 0·tensor, which may be NaN; and if all have weight 0 the tensor stays as it is
            self._shares = torch.zeros_like(self._shares, dtype=dtype)
        elif weight == 1:
            self._shares = self._shares.to(dtype)
        else:
            self._shares = self._shares.to(dtype).mul_(weight)
        if len(self._shares):
            self._summed = dist.all_reduce(self._shares, group=self._group.group_for(self._shares), async_op=True)

    def _finish(self) -> MeanResult:
        group, start = self._group, time.perf_counter()
        with group.watching("mean_"):
            group.wait(self._gathered)
            group.waited_s += time.perf_counter() - start
            group.wait(self._summed)
        rows = [row.numpy().tobytes() for row in self._words]
        weights, lengths = zip(*(_CONTROL.unpack_from(row) for row in rows), strict=True)
        blobs = [row[_CONTROL.size : _CONTROL.size + length] for row, length in zip(rows, lengths, strict=True)]
        if max(lengths) > _INLINE:
            blobs = group.gather_bytes(self._blob, "mean_")
        total = MeanResult.of(weights, map(bits_of, blobs))
        if total.weight and len(self._shares):
            mean = self._shares.div_(total.weight)
            put_back(mean, self._tensor, self._lost if group.rank == 0 else None)
        if len(self._shares):
            count_ring(group, "mean_", self._shares)
        return total


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: gloo knows few, and 16-bit floats lose too much."""
    if dtype in _SUMMED_AS_THEY_ARE:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def put_back(wide: Tensor, tensor: Tensor, lost: Tensor | None) -> None:
    """The mean `wide` [n] into the tensor, whose own memory it may be; `lost` gets what rounding it takes away."""
    restore(wide, tensor)
    if lost is not None:
        lost.copy_(wide.view(tensor.shape) - tensor)


def count_ring(group: Group, operation: str, flat: Tensor) -> None:
    """Add what this rank sends of `flat` in a ring."""
    low, high = slice_of(group.rank, group.size, flat.numel())
    nbytes = 2 * (flat.numel() - (high - low)) * flat.dtype.itemsize
    group.ledger.add(operation, nbytes, messages=2 * (group.size - 1))


def _sendable(flat: Tensor) -> Tensor:
    """Bytes, at least one: an empty message would not arrive."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_zeros(1, dtype=torch.uint8)
