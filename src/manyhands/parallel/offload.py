"""An optimizer's state outside of memory: in a file that is mapped, of which one parameter's part is there at a time."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import torch
from torch import Tensor

from manyhands.errors import ManyhandsError

_LEAST = 1 << 16  # bytes of a tensor that is worth a place in the file


class StateOnDisk:
    """Steps an optimizer parameter by parameter, and puts each one's state away after its step.

    The file has no name, lies in the folder for temporary files (TMPDIR), and goes with the process. What the system has
    not written out yet is in its page cache, which it empties where memory is short.

    The optimizer's step of a parameter must not depend on other parameters, as in all of torch's but LBFGS.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._file, path = tempfile.mkstemp(prefix="manyhands-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self._places: dict[tuple[int, str], tuple[mmap.mmap, Tensor]] = {}  # by parameter and name

    def step(self) -> None:
        groups = self._optimizer.param_groups
        params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for group, own in zip(groups, params, strict=True):
                for p in own:
                    if p.grad is not None:
                        group["params"] = [p]
                        self._optimizer.step()
                        self._put_away(p)
                group["params"] = []
        finally:
            for group, own in zip(groups, params, strict=True):
                group["params"] = own

    def _put_away(self, p: Tensor) -> None:
        state = self._optimizer.state[p]
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.nbytes < _LEAST:
                continue
            memory, there = self._places.get((id(p), name)) or self._place(id(p), name, value)
            if value is not there:  # its first step, or it was loaded from a checkpoint
                there.copy_(value)
                state[name] = there
            memory.madvise(mmap.MADV_DONTNEED)  # of a shared mapping: what was written stays in the file

    def _place(self, p: int, name: str, value: Tensor) -> tuple[mmap.mmap, Tensor]:
        start = os.fstat(self._file).st_size
        length = -(-value.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file, start, length)
        except OSError as error:
            raise ManyhandsError(
                f"offload=disk: {tempfile.gettempdir()} has no room for the optimizer's state ({error.strerror}): name a folder on a larger disk by TMPDIR"
            ) from error
        memory = mmap.mmap(self._file, length, offset=start)
        there = torch.frombuffer(memory, dtype=value.dtype, count=value.numel()).view(value.shape)
        self._places[p, name] = memory, there
        return memory, there
