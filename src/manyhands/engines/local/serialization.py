"""A Python object, functions included, as one anonymous file: pickle protocol 5 with its big buffers beside the stream.

`serialize` writes it, `deserialize` reads it in another process of the same host. The memory of tensors and arrays
travels out of band: a worker maps it privately, copy on write. N workers thus share one copy of the training data in
memory, and a worker that writes to a tensor gets pages of its own. Tensors on one storage stay on one storage.

The file has no name and goes over inherited sockets only, between a driver and the workers that it started itself.
That is why pickle is allowed here. One thing only arrives from a network: the program, on a host that joined a run,
from a driver that proved to hold the run's credentials (hosts/join.py). What comes from such a host is not unpickled.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle

from manyhands.errors import BadInput

_ALIGNMENT = 128
_MAPPED_FROM = 1 << 16  # smaller storages are copied: a few bytes need not pin a mapping, and may be resized
_COUNT = struct.Struct("<Q")


def serialize(value: Any, what: str) -> int:
    """A descriptor of an anonymous file that holds `value`; the caller closes it.

    `what` names it in the error: `BadInput` where a part cannot be pickled, with the path to that part.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        Pickler(stream, buffers).dump(value)
    except Exception as error:  # user classes raise what they like from __reduce__
        path, part = _culprit(value, "")
        kind = type(part).__qualname__
        where = f"{what} holds {path.lstrip('.')}, a {kind}" if path else f"{what} is a {kind}"
        raise BadInput(
            f"{where}, which cannot be sent to another process "
            f"({type(error).__name__}: {error}). Make it inside the function that runs on the workers, or leave it out."
        ) from error
    return _write([memoryview(stream.getbuffer()), *(buffer.raw() for buffer in buffers)])


def deserialize(fd: int, mapped: bool) -> Any:
    """What `serialize` wrote. `mapped`: big buffers are private mappings of the file, else copies; `fd` stays open.

    Raises whatever importing and rebuilding the object raises.
    """
    whole = memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)) if mapped else None
    (count,) = _COUNT.unpack(os.pread(fd, _COUNT.size, 0))
    table = struct.unpack(f"<{2 * count}Q", os.pread(fd, 16 * count, _COUNT.size))
    stream, *buffers = [
        whole[start : start + size] if whole is not None else memoryview(_copy(fd, start, size))
        for start, size in zip(table[::2], table[1::2], strict=True)
    ]
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - from our own process over an inherited socket, see above


class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """cloudpickle, with the storages of CPU tensors out of band (numpy's arrays do that by themselves).

    A storage is one Python object however many tensors view it, so the pickler's own memo keeps them together.
    """

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.storage.TypedStorage):
            return _typed, (obj._untyped_storage, obj.dtype)
        if torch is not None and isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            if obj.nbytes() == 0:
                return _storage, (b"",)
            # The buffer's array keeps the storage alive until the bytes are written, which is after the pickler let go
            # of all objects: one that `__getstate__` made would be freed, and what takes its place would be sent.
            view: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj).numpy()
            return _storage, (pickle.PickleBuffer(view),)
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 forgets in which file it was: tracebacks name it
            return _code, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        return super().reducer_override(obj)


def _code(file: str, make: Any, fields: tuple[Any, ...]) -> types.CodeType:
    code: types.CodeType = make(*fields)
    return code.replace(co_filename=file)


def _typed(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _storage(memory: Any) -> Any:
    import torch

    if len(memory) == 0:
        return torch.UntypedStorage(0)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return (flat.clone() if len(flat) < _MAPPED_FROM else flat).untyped_storage()


def _write(sections: list[memoryview]) -> int:
    """[count, (start, size) per section, then the sections, aligned] in a new sealed memfd."""
    starts, end = [], _COUNT.size * (1 + 2 * len(sections))
    for section in sections:
        starts.append(start := -(-end // _ALIGNMENT) * _ALIGNMENT)
        end = start + section.nbytes
    fd = os.memfd_create("manyhands-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, end)
        header = [
            len(sections),
            *(n for start, section in zip(starts, sections, strict=True) for n in (start, section.nbytes)),
        ]
        _put(fd, memoryview(struct.pack(f"<{len(header)}Q", *header)), 0)
        for start, section in zip(starts, sections, strict=True):
            _put(fd, section, start)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _put(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < data.nbytes:  # one call writes 2 GB at most
        done += os.pwrite(fd, data[done:], at + done)


def _copy(fd: int, start: int, size: int) -> bytearray:
    data, done = bytearray(size), 0
    while done < size:
        done += os.preadv(fd, [memoryview(data)[done:]], start + done)
    return data


def _culprit(value: Any, path: str, depth: int = 8) -> tuple[str, Any]:
    """The deepest part that cannot be pickled, by trying the parts one after another."""
    for name, part in _parts(value) if depth else ():
        if not _picklable(part):
            return _culprit(part, path + name, depth - 1)
    return path, value


def _picklable(value: Any) -> bool:
    try:
        Pickler(io.BytesIO(), []).dump(value)
    except Exception:  # noqa: BLE001 - the question is whether it raises, whatever it is
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif hasattr(value, "__code__"):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f".{name}", cell.cell_contents) for name, cell in cells)
        yield from (
            (f".{name}", value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__
        )
    elif hasattr(value, "func") and hasattr(value, "args"):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif hasattr(value, "__self__"):
        yield ".__self__", value.__self__
    if not isinstance(value, type):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
