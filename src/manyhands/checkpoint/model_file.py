"""The file of a model whose parts several workers hold: each writes its own ranges of it, and nobody holds the whole model.

It is a safetensors file, with the bytes that the library gives it. It is written under a temporary name, synced by
each worker, and renamed when all have written.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint.checkpoints import DTYPES, header_of, sync_folder
from manyhands.checkpoint.launch_lock import Claim, claim_in
from manyhands.checkpoint.paths import PARTIAL
from manyhands.comm.group import Group
from manyhands.errors import ManyhandsError
from manyhands.rank_files.folder import as_given
from manyhands.replica.shard import ParameterSlice

FINAL = "model.safetensors"
_ORDER = [
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "BOOL",
]
"""In which the library puts tensors of different types."""

Part = tuple[Tensor, ParameterSlice | None]
"""What a worker has of a tensor, and which part that is; None: all of it."""


def seen_by_all(claim: Claim | None, group: Group) -> bool:
    """Whether all of these workers have the driver's run directory on a disk, under its name. A collective."""
    own = claim is not None and isinstance(claim.directory, Path) and claim_in(claim.directory) == claim
    return all(group.all_gather_json(own))


@as_given()  # no file of the script's
def write_ranges(claim: Claim, group: Group, parts: Mapping[str, Part]) -> str:
    """Write the launch's model file, each worker its parts; its name. A collective.

    A number that several workers have is written by each of them. ManyhandsError on all workers where one cannot write,
    and where another launch has the directory by now; there is no file then, or the one before.
    """
    path = claim.directory / FINAL
    assert isinstance(path, Path)
    own = {name: [str(tensor.dtype)[6:], _shape(tensor, part)] for name, (tensor, part) in parts.items()}
    everyone = group.all_gather_json([secrets.token_hex(8), own])
    partial = path.with_name(f"{path.name}.{everyone[0][0]}{PARTIAL}")
    listed = {name: (getattr(torch, dtype), shape) for _, one in everyone for name, (dtype, shape) in one.items()}
    header, spans = header_of(
        {name: listed[name] for name in sorted(listed, key=lambda name: (_place(*listed[name]), name))}
    )

    def begin() -> None:
        with partial.open("xb") as file:
            file.write(header)
            file.truncate(max((span.stop for span in spans.values()), default=len(header)))

    def finish() -> None:
        claim.check()
        partial.replace(path)
        sync_folder(path.parent)

    first = group.rank == 0
    try:
        _together(path, group, begin if first else None)
        _together(path, group, lambda: _write(partial, parts, spans))
        _together(path, group, finish if first else None)
    finally:
        if first:
            partial.unlink(missing_ok=True)
    return FINAL


def _place(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Of tensors of this type among the others; -1: there are none such in a file."""
    return _ORDER.index(DTYPES[dtype]) if dtype in DTYPES else -1


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name; nothing else of it is read."""
    return {name: tuple(one["shape"]) for name, one in _header(path)[1].items()}


def tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file one after the other, each in memory of its own.

    The library maps the whole file as private memory, which a limit on a process's data counts.
    """
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    begin, header = _header(path)
    with path.open("rb") as file:
        for name, one in header.items():
            tensor = torch.empty(one["shape"], dtype=dtypes[one["dtype"]])
            file.seek(begin + one["data_offsets"][0])
            if file.readinto(_bytes(tensor)) != tensor.nbytes:
                raise ManyhandsError(f"{path} is shorter than its header says: {name} is not all there")
            yield name, tensor


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """(where the tensors' bytes begin, the header but for its metadata)"""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def _together(path: Path, group: Group, action: Callable[[], None] | None) -> None:
    """Each does its part; a collective. ManyhandsError on all, with who and why, where one cannot."""
    problem = ""
    try:
        if action is not None:
            action()
    except OSError as error:
        problem = error.strerror or str(error)
    for rank, why in enumerate(group.all_gather_json(problem)):
        if why:
            raise ManyhandsError(
                f"cannot write {path} (worker {rank}: {why}). Make room, then go on with resume=True (--resume), or give another run directory"
            )


def _write(file: Path, parts: Mapping[str, Part], spans: Mapping[str, range]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, (tensor, part) in parts.items():
            data, size = _bytes(tensor.detach().cpu().contiguous()), tensor.element_size()
            for whole, own, count in runs(_shape(tensor, part), part):
                at, piece = spans[name].start + whole * size, data[own * size : (own + count) * size]
                while piece:
                    written = os.pwrite(descriptor, piece, at)
                    at, piece = at + written, piece[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def runs(shape: Sequence[int], part: ParameterSlice | None) -> Iterator[tuple[int, int, int]]:
    """The numbers of a part that are neighbours in the whole tensor, too: (the first one's place in the whole, its place in
    the part, how many), in the part's order."""
    if part is None or part.whole:
        yield 0, 0, math.prod(shape)
        return
    lengths = [stop - start for start, stop in zip(part.start, part.stop, strict=True)]
    last = max(d for d, length in enumerate(lengths) if length != shape[d])  # behind it all dimensions are whole
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    count = lengths[last] * strides[last]
    outer = itertools.product(*(range(part.start[d], part.stop[d]) for d in range(last)))
    for i, index in enumerate(outer):
        place = sum(at * stride for at, stride in zip((*index, part.start[last]), strides, strict=False))
        yield place, i * count, count


def _shape(tensor: Tensor, part: ParameterSlice | None) -> list[int]:
    """Of the whole tensor."""
    return list(tensor.shape if part is None else part.shape)


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
