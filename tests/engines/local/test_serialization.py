from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import BadInput
from open_files import open_files


def through(value: Any, mapped: bool = False) -> Any:
    fd = serialize(value, "the program")
    try:
        return deserialize(fd, mapped)
    finally:
        os.close(fd)


@pytest.fixture(params=[False, True], ids=["copied", "mapped"])
def mapped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("n", [0, 5, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_size_and_dtype(n: int, dtype: torch.dtype, mapped: bool) -> None:
    tensor = torch.arange(n).to(dtype)
    assert torch.equal(through(tensor, mapped), tensor)


def test_tensors_on_one_storage_stay_so(mapped: bool) -> None:
    whole = torch.arange(100_000.0)
    got_whole, got_part = through((whole, whole[10:20]), mapped)
    got_whole[10] = -1
    assert got_part[0] == -1
    assert whole[10] == 10


def test_parameters_stay_parameters_and_tied(mapped: bool) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    got = through(model, mapped)
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, nn.Parameter)
    assert got[0].weight.requires_grad
    assert not got[0].bias.requires_grad
    assert torch.equal(got[1].weight, model[1].weight)


def test_arrays_can_be_written_to_and_leave_the_original(mapped: bool) -> None:
    array = np.arange(100_000.0)
    got = through(array, mapped)
    got[0] = 7
    assert array[0] == 0
    assert np.array_equal(got[1:], array[1:])


def test_big_buffers_are_mapped_not_copied() -> None:
    size = 64 << 20
    fd = serialize((torch.ones(size // 2, dtype=torch.uint8), np.ones(size // 2, dtype=np.uint8)), "the program")
    before = _private_bytes()
    tensor, array = deserialize(fd, mapped=True)
    assert _private_bytes() - before < size // 8
    assert tensor[-1] == 1
    assert array[-1] == 1
    tensor += 1  # its own pages from now on
    assert deserialize(fd, mapped=True)[0][0] == 1
    os.close(fd)


def _private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def test_small_tensors_can_be_resized() -> None:
    got = through(torch.ones(3), mapped=True)
    assert got.resize_(1000).shape == (1000,)


def test_functions_with_their_closure(mapped: bool) -> None:
    offset = torch.tensor(5)
    assert through(lambda x: x + offset, mapped)(1) == 6


def test_copies_keep_no_descriptor_open() -> None:
    before = open_files()
    got = through(torch.ones(100_000))
    assert open_files() <= before
    assert got.sum() == 100_000


def test_the_part_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    holder = nn.Linear(1, 1)
    holder.config = {"writers": [1, lock]}  # type: ignore[assignment]

    def program() -> Any:
        return holder

    with pytest.raises(
        BadInput, match=r"the program holds func\.holder\.config\['writers'\]\[1\], a lock, which cannot be sent"
    ):
        serialize(functools.partial(program), "the program")


def test_a_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(BadInput, match="the value is a lock, which cannot be sent"):
        serialize(threading.Lock(), "the value")


class OfTemporaries:
    """Pickled as values that exist only while they are pickled: what `__getstate__` makes, nobody else holds."""

    def __init__(self, make: Callable[[torch.Tensor], Any], bits: torch.Tensor) -> None:
        self.make, self.bits = make, bits

    def __getstate__(self) -> dict[str, Any]:
        return {"of": self.make(self.bits.clone()), "length": len(self.bits)}


def _generator_of(bits: torch.Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(bits.to(torch.int64).sum()))


def _typed_storage(bits: torch.Tensor) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=bits.untyped_storage(), dtype=torch.uint8, _internal=True)


TEMPORARIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "float tensor": lambda bits: bits.float(),
    "view": lambda bits: bits[1:],
    "parameter": lambda bits: nn.Parameter(bits.double()),
    "sparse": lambda bits: bits.float().to_sparse(),
    "storage": lambda bits: bits.untyped_storage(),
    "typed storage": _typed_storage,
    "generator": _generator_of,
    "array": lambda bits: bits.numpy().astype(np.float64),
    "strided array": lambda bits: bits.numpy().repeat(2)[::2],
    "nested": lambda bits: [OfTemporaries(lambda own: own + 1, bits), {"again": bits.half()}],
}


def _bytes(value: Any) -> list[bytes]:
    if isinstance(value, list | tuple):
        return [part for one in value for part in _bytes(one)]
    if isinstance(value, dict):
        return _bytes(list(value.values()))
    if isinstance(value, OfTemporaries):
        return _bytes(vars(value)["of"] if "of" in vars(value) else value.make(value.bits))
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor):
        return [value.detach().to_dense().contiguous().numpy().tobytes()]
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    storage = getattr(value, "_untyped_storage", value)
    return [torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()]


@pytest.mark.parametrize("kind", TEMPORARIES)
def test_what_exists_only_while_it_is_pickled_arrives_bit_by_bit(kind: str) -> None:
    seeded, lengths = torch.Generator().manual_seed(0), [3, 16, 64, 255, 1024, 4097]
    sent = [
        OfTemporaries(TEMPORARIES[kind], torch.randint(0, 256, (length,), dtype=torch.uint8, generator=seeded))
        for length in lengths * 50
    ]
    for value, got in zip(sent, through(sent), strict=True):
        assert _bytes(got) == _bytes(value)


def test_a_function_knows_in_which_file_it_was() -> None:
    """Tracebacks show its lines by that. cloudpickle 3.1.3 leaves it out."""
    made: dict[str, Any] = {}
    exec(compile("def outer():\n    return lambda: 3", "somewhere/else.py", "exec"), made)
    again = deserialize(serialize(made["outer"], "a function"), mapped=False)
    assert [code.co_filename for code in (again.__code__, again().__code__)] == ["somewhere/else.py"] * 2
    assert again()() == 3
