import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import BadInput


def through(value: Any, mapped: bool = False) -> Any:
    fd = serialize(value, "the program")
    try:
        return deserialize(fd, mapped)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mapped", [False, True])
def test_what_arrives(mapped: bool) -> None:
    """Tensors of any size and dtype; on one storage they stay so; parameters stay parameters, and tied; arrays can be written
    to, and leave the original; functions have their closure."""
    for n in (0, 5, 100_000):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            tensor = torch.arange(n).to(dtype)
            assert torch.equal(through(tensor, mapped), tensor), (n, dtype)

    whole = torch.arange(100_000.0)
    got_whole, got_part = through((whole, whole[10:20]), mapped)
    got_whole[10] = -1
    assert (got_part[0], whole[10]) == (-1, 10)

    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    got = through(model, mapped)
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, nn.Parameter)
    assert (got[0].weight.requires_grad, got[0].bias.requires_grad) == (True, False)
    assert torch.equal(got[1].weight, model[1].weight)

    array = np.arange(100_000.0)
    changed = through(array, mapped)
    changed[0] = 7
    assert array[0] == 0
    assert np.array_equal(changed[1:], array[1:])

    offset = torch.tensor(5)
    assert through(lambda x: x + offset, mapped)(1) == 6


def mapped_files(address: int) -> list[int]:
    """The inode of the file that is mapped where this address is."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, end = (int(word, 16) for word in span.split("-"))
        found += [int(inode)] if first <= address < end else []
    return found


def test_big_buffers_are_mapped_not_copied() -> None:
    fd = serialize((torch.ones(1 << 20, dtype=torch.uint8), np.ones(1 << 20, dtype=np.uint8)), "the program")
    tensor, array = deserialize(fd, mapped=True)
    assert mapped_files(tensor.data_ptr()) == mapped_files(array.ctypes.data) == [os.fstat(fd).st_ino]
    assert (tensor[-1], array[-1]) == (1, 1)
    tensor += 1  # its own pages from now on
    assert deserialize(fd, mapped=True)[0][0] == 1
    os.close(fd)


def test_small_tensors_can_be_resized() -> None:
    got = through(torch.ones(3), mapped=True)
    assert got.resize_(1000).shape == (1000,)


def test_copies_keep_no_descriptor_open() -> None:
    fd = serialize(torch.ones(100_000), "the program")
    inode = os.fstat(fd).st_ino
    got = deserialize(fd, mapped=False)
    os.close(fd)
    gc.collect()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            assert os.fstat(int(name)).st_ino != inode
    assert got.sum() == 100_000


def test_the_part_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    holder = nn.Linear(1, 1)
    holder.config = {"writers": [1, lock]}  # type: ignore[assignment]

    def program() -> Any:
        return holder

    words = r"the program holds func\.holder\.config\['writers'\]\[1\], a lock, which cannot be sent"
    with pytest.raises(BadInput, match=words):
        serialize(functools.partial(program), "the program")
    with pytest.raises(BadInput, match="the value is a lock, which cannot be sent"):
        serialize(threading.Lock(), "the value")


class OfTemporaries:
    """Pickled as values that exist only while they are pickled: what `__getstate__` makes, nobody else holds."""

    of: Any

    def __init__(self, make: Callable[[torch.Tensor], Any], bits: torch.Tensor) -> None:
        self.make, self.bits = make, bits

    def __getstate__(self) -> dict[str, Any]:
        return {"of": self.make(self.bits.clone())}


def _typed_storage(bits: torch.Tensor) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=bits.untyped_storage(), dtype=torch.uint8, _internal=True)


TEMPORARIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda bits: bits.float()[1:],
    "parameter": lambda bits: nn.Parameter(bits.double()),
    "sparse": lambda bits: bits.float().to_sparse(),
    "storage": lambda bits: bits.untyped_storage(),
    "typed storage": _typed_storage,
    "generator": lambda bits: torch.Generator().manual_seed(int(bits.to(torch.int64).sum())),
    "array": lambda bits: bits.numpy().astype(np.float64),
    "strided array": lambda bits: bits.numpy().repeat(2)[::2],
}


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    storage = getattr(value, "_untyped_storage", value)
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def test_what_exists_only_while_it_is_pickled_arrives_bit_by_bit() -> None:
    seeded, lengths = torch.Generator().manual_seed(0), [3, 16, 64, 255, 1024, 4097]
    for kind, make in TEMPORARIES.items():
        bits = [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=seeded) for length in lengths * 20]
        got = through([OfTemporaries(make, one) for one in bits])
        assert [_bytes(one.of) for one in got] == [_bytes(make(one)) for one in bits], kind


def test_a_function_knows_in_which_file_it_was() -> None:
    """Tracebacks show its lines by that. cloudpickle 3.1.3 leaves it out."""
    made: dict[str, Any] = {}
    exec(compile("def outer():\n    return lambda: 3", "somewhere/else.py", "exec"), made)
    again = deserialize(serialize(made["outer"], "a function"), mapped=False)
    assert [code.co_filename for code in (again.__code__, again().__code__)] == ["somewhere/else.py"] * 2
    assert again()() == 3
