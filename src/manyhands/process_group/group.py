"""The process group behind `torch.distributed.init_process_group("manyhands")`: this library's collectives, for any program
that was written for torch.distributed.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.futures import Future
from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.engines.make_group import Topology, hosts_met, make_group, meet_at
from manyhands.engines.shared_memory import host_identity
from manyhands.errors import BadInput
from manyhands.process_group.versions import gloo_of, has_old_and_new_names, method_of
from manyhands.transport.frame import DTYPES

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
PLAIN = "MANYHANDS_PLAIN_NETWORK"
"""The variable that allows gloo between hosts, where nothing of its traffic is authenticated or encrypted."""
_CARRIED = frozenset(DTYPES)
_ADDED = frozenset(dtype for dtype in DTYPES if dtype.is_floating_point or (dtype.is_signed and not dtype.is_complex))
_ADDED |= {torch.uint8}  # torch cannot add the wider unsigned ones on a CPU


@has_old_and_new_names
class ManyhandsProcessGroup(dist.ProcessGroup):
    """The ranks of one process group.

    On one host they work in shared memory (`SharedMemoryGroup`); between hosts over TLS, with the credentials that
    MANYHANDS_CREDENTIALS names. Sums and means, broadcasts, all-gathers, reduce-scatters and barriers of tensors on the
    CPU are this library's. Everything else (other reductions, complex numbers, all-to-all, messages between two ranks)
    goes to gloo, and what is on a GPU to nccl. Those are made when they are first needed.

    An operation is over when it returns, also with async_op=True: its work is done in the calling thread. A rank that
    is gone, or silent for the timeout, raises PeerLost on all others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """A collective of the group's ranks, which meet at the store. BadInput where a host is without credentials."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._place, self._members, self._timeout = store, rank, size, timeout
        self._lock = threading.RLock()
        self._inner: dict[str, Any] = {}
        self._name = self._description = "undefined"
        self._one_host, self._group = _group_of(store, rank, size, timeout.total_seconds())

    # -- this library's ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None) -> dist.Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        how = _op_of(opts) if op is None else op
        if not self._adds(how, tensors):
            return self._through("allreduce", tensors, opts if op is None else _options_of(op))

        def reduce() -> None:
            for tensor in tensors:
                self._group.all_reduce_(tensor)
                if how == AVG:
                    _divide(tensor, self._members)

        return self._run(tensors, reduce)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = 0) -> dist.Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        source = opts if isinstance(opts, int) else opts.rootRank
        if not self._moves(tensors):
            return self._through("broadcast", tensors, opts)
        return self._run(tensors, lambda: [self._group.broadcast_(tensor, source) for tensor in tensors])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = isinstance(inputs, Tensor)
        into, tensors = ([outputs], [inputs]) if flat else (list(outputs), list(inputs))
        alike = all(
            one.numel() == tensor.numel() and one.dtype == tensor.dtype
            for ones, tensor in zip(into, tensors, strict=True)
            for one in ones
        )
        if not alike or not self._moves([*tensors, *(one for ones in into for one in ones)]):
            return self._through("allgather", outputs, inputs, opts)

        def gather() -> None:
            for ones, tensor in zip(into, tensors, strict=True):
                for one, row in zip(ones, self._group.all_gather(tensor), strict=True):
                    one.copy_(row.view(one.shape))

        return self._run([one for ones in into for one in ones], gather)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        pairs = list(zip(outputs, inputs, strict=True))
        fits = all(one.numel() == self._members * tensor.numel() and one.dtype == tensor.dtype for one, tensor in pairs)
        if not fits or not self._moves([*outputs, *inputs]):
            return self._each("all_gather_single", outputs, inputs, opts)
        return self._run(
            list(outputs), lambda: [one.copy_(self._group.all_gather(tensor).view(one.shape)) for one, tensor in pairs]
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        op, pairs = _op_of(opts), list(zip(outputs, inputs, strict=True))
        fits = all(tensor.numel() == self._members * one.numel() and one.dtype == tensor.dtype for one, tensor in pairs)
        if not fits or not self._adds(op, [*outputs, *inputs]):
            return self._each("reduce_scatter_single", outputs, inputs, opts)

        def scatter() -> None:
            for one, tensor in pairs:
                one.copy_(self._group.reduce_scatter(tensor).view(one.shape))
                if op == AVG:
                    _divide(one, self._members)

        return self._run(list(outputs), scatter)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run([], self._group.barrier)

    def _run(self, tensors: list[Tensor], action: Callable[[], object]) -> dist.Work:
        """Do it now; what comes back is over."""
        with self._lock:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    action()
            else:  # as in a backward
                action()
        future: Future[Any] = Future()
        future.set_result(tensors)
        work: dist.Work = _create_work_from_future(future)
        return work

    def _moves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are tensors that our groups carry."""
        return all(t.is_cpu and t.layout == torch.strided and t.dtype in _CARRIED for t in tensors)

    def _adds(self, op: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether our groups reduce them by this operation."""
        adds = any(
            op == known for known in (SUM, AVG)
        )  # not `in`: it asks `known == op`, which is False for a ReduceOp
        return adds and self._moves(tensors) and all(tensor.dtype in _ADDED for tensor in tensors)

    # -- what goes through -------------------------------------------------------------------------------------------

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._through("reduce_scatter", outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._through("allgather_coalesced", outputs, inputs, opts)

    def reduce(self, *arguments: Any) -> dist.Work:
        return self._through("reduce", *arguments)

    def gather(self, *arguments: Any) -> dist.Work:
        return self._through("gather", *arguments)

    def scatter(self, *arguments: Any) -> dist.Work:
        return self._through("scatter", *arguments)

    def alltoall(self, *arguments: Any) -> dist.Work:
        return self._through("alltoall", *arguments)

    def all_to_all_single(self, *arguments: Any) -> dist.Work:
        return self._through("all_to_all_single", *arguments)

    def send(self, *arguments: Any) -> dist.Work:
        return self._through("send", *arguments)

    def recv(self, *arguments: Any) -> dist.Work:
        return self._through("recv", *arguments)

    def recv_anysource(self, *arguments: Any) -> dist.Work:
        return self._through("recv_anysource", *arguments)

    def monitored_barrier(self, *arguments: Any, **options: Any) -> None:
        self._backend("cpu").monitored_barrier(*arguments, **options)

    def _through(self, name: str, *arguments: Any) -> dist.Work:
        """gloo's or nccl's own, of their object: by way of `super()` it may hang. An argument that is None is left out."""
        arguments = tuple(argument for argument in arguments if argument is not None)
        work: dist.Work = method_of(self._backend(_device_in(arguments)), name)(*arguments)
        return work

    def _each(self, name: str, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """One after the other; the work of the last."""
        works = [self._through(name, one, tensor, opts) for one, tensor in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def _backend(self, device: str) -> Any:
        with self._lock:
            if device not in self._inner:
                self._inner[device] = self._new_nccl() if device == "cuda" else self._new_gloo()
            return self._inner[device]

    def _new_gloo(self) -> Any:
        if not self._one_host and os.environ.get(PLAIN) != "on":
            raise BadInput(
                "this operation goes through gloo, whose connections between hosts are neither authenticated nor encrypted: use "
                f"SUM or AVG of real numbers on the CPU, or set {PLAIN}=on on all hosts if you trust their network"
            )
        host = "127.0.0.1" if self._one_host else socket.gethostname()
        if self._place == 0:
            where = "on this host's loopback interface" if self._one_host else "between hosts, without TLS"
            warnings.warn(
                f"some operations of this program are not the backend manyhands' own, and go through gloo, which listens {where}",
                stacklevel=5,
            )
        return gloo_of(self._store, self._place, self._members, self._timeout, host)

    def _new_nccl(self) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(PrefixStore("nccl", self._store), self._place, self._members, options)

    # -- what torch asks of a group ----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "manyhands"

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend(torch.device(device).type)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """torch's own asks a backend that is not there yet."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are compared by the groups themselves

    def _get_sequence_number_for_group(self) -> int:
        return 0

    @override
    def shutdown(self) -> None:
        """Give memory and connections back; idempotent."""
        with self._lock:
            self._group.close()
            for inner in self._inner.values():
                inner.shutdown()
            self._inner.clear()

    def abort(self) -> None:
        self.shutdown()


def _group_of(store: Store, rank: int, size: int, timeout_s: float) -> tuple[bool, Group]:
    """(whether all ranks are on one host, their group)."""
    meet = meet_at(PrefixStore("manyhands", store), rank, timeout_s)
    hosts, names = hosts_met(meet, size, host_identity())
    topology = Topology(
        rank=rank,
        hosts=hosts,
        names=names,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        connect_s=timeout_s,
    )
    if len(hosts) == 1:
        return True, make_group(topology, meet)
    from manyhands.engines.torchrun.server import network_of  # loads TLS, which one host does not need

    return False, make_group(topology, meet, network=network_of(topology, meet, _meeting_point(store)))


def _meeting_point(store: Store) -> tuple[str, int]:
    """(host, port) of the store, which all hosts reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host, store.port
    raise BadInput(
        f"process groups over several hosts meet at a TCPStore, and this one has a {type(store).__name__}: give "
        "init_method='env://' or 'tcp://HOST:PORT'"
    )


def _divide(tensor: Tensor, count: int) -> None:
    """In place; whole numbers are cut toward zero, as where a fraction is copied into them."""
    tensor.div_(count, rounding_mode=None if tensor.is_floating_point() else "trunc")


def _options_of(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _op_of(opts: Any) -> Any:
    """The reduction: of options, or given as it is."""
    return SUM if opts is None else getattr(opts, "reduceOp", opts)


def _device_in(arguments: Any) -> str:
    """The kind of device of the first tensor."""
    if isinstance(arguments, Tensor):
        return arguments.device.type
    if isinstance(arguments, list | tuple):
        return next(filter(None, map(_device_in, arguments)), "")
    return ""
