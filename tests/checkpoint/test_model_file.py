"""A model's file that several workers write, each its ranges."""

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from manyhands.checkpoint import model_file
from manyhands.checkpoint.launch_lock import Claim, LaunchLock
from manyhands.checkpoint.model_file import Part, runs, seen_by_all, tensors_in, write_ranges
from manyhands.errors import ManyhandsError
from manyhands.replica.shard import ParameterSlice
from manyhands.testing.threads import together
from manyhands.worker import Worker

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
    *(torch.float16, torch.int8, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[Claim]:
    lock = LaunchLock(tmp_path)
    yield lock.claim(1)
    lock.close()


def written(claim: Claim, held: list[Mapping[str, Part]]) -> list[str]:
    """By each of so many workers; what each of them raised, or the file's name."""

    def program(worker: Worker) -> str:
        try:
            return write_ranges(claim, worker.group, held[worker.rank])
        except ManyhandsError as error:
            return str(error)

    return together(len(held), program)


def cut(tensor: Tensor, start: tuple[int, ...], stop: tuple[int, ...]) -> Part:
    place = ParameterSlice(shape=tuple(tensor.shape), start=start, stop=stop)
    return tensor[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))], place


def test_it_has_the_bytes_of_the_librarys_file(claim: Claim, tmp_path: Path) -> None:
    given = {f"{i}{dtype}": torch.randn(3, i).to(dtype) for dtype in DTYPES for i in (0, 2)}
    given |= {"scalar": torch.tensor(4.0), "moved": torch.randn(4, 6).t()}
    names = sorted(given)
    written(claim, [{name: (given[name], None) for name in names[rank::3]} for rank in range(3)])
    found = (tmp_path / "model.safetensors").read_bytes()
    assert found == safetensors.torch.save({name: tensor.contiguous() for name, tensor in given.items()})
    read = dict(tensors_in(tmp_path / "model.safetensors"))
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_slices_of_a_tensor_come_together(claim: Claim, tmp_path: Path) -> None:
    whole = torch.randn(4, 6, 5)
    for dimension in range(3):
        middle = [n // 2 if d == dimension else 0 for d, n in enumerate(whole.shape)]
        end = [n // 2 if d == dimension else n for d, n in enumerate(whole.shape)]
        halves = cut(whole, (0, 0, 0), tuple(end)), cut(whole, tuple(middle), tuple(whole.shape))
        written(claim, [{"w": half} for half in halves])
        assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["w"], whole), dimension


def test_runs_are_as_long_as_they_can_be() -> None:
    def of(start: tuple[int, ...], stop: tuple[int, ...]) -> list[tuple[int, int, int]]:
        return list(runs((4, 6, 5), ParameterSlice(shape=(4, 6, 5), start=start, stop=stop)))

    assert of((0, 0, 0), (4, 6, 5)) == list(runs((4, 6, 5), None)) == [(0, 0, 120)]
    assert of((1, 0, 0), (3, 6, 5)) == [(30, 0, 60)]
    assert of((1, 2, 0), (3, 4, 5)) == [(40, 0, 10), (70, 10, 10)]
    assert of((0, 4, 3), (1, 6, 5)) == [(23, 0, 2), (28, 2, 2)]


def test_a_worker_that_cannot_write_ends_all_and_leaves_the_file_before(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.zeros(3)
    assert written(claim, [{"a": (before, None)}, {}]) == ["model.safetensors"] * 2
    pwrite = os.pwrite

    def full(descriptor: int, data: Any, at: int) -> int:
        if len(data) == 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(model_file.os, "pwrite", full)
    found = written(claim, [{"a": (before + 1, None)}, {"b": (torch.zeros(10), None)}])
    assert len(set(found)) == 1
    assert "worker 1: No space left on device" in found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch.json", "model.safetensors"]
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["a"], before)


def test_a_short_write_goes_on(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(model_file.os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:7], at))
    tensor = torch.randn(30)
    written(claim, [{}, {"w": (tensor, None)}])
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["w"], tensor)


def test_a_type_that_the_format_has_not_is_named(claim: Claim) -> None:
    found = written(claim, [{"a": (torch.zeros(2), None)}, {"b": (torch.zeros(2, dtype=torch.complex128), None)}])
    assert len(set(found)) == 1
    assert "b is of torch.complex128" in found[0]


def test_a_launch_that_lost_its_directory_writes_no_file(claim: Claim, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"number": 2, "host": "other", "pid": 7}')
    with pytest.raises(ManyhandsError, match="launch 2, process 7 on other"):
        together(2, lambda worker: write_ranges(claim, worker.group, {}))
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


def test_whether_all_see_the_directory(claim: Claim, tmp_path: Path) -> None:
    elsewhere = Claim(directory=tmp_path / "other", number=claim.number, host=claim.host, pid=claim.pid)
    given = [(claim, claim), (claim, elsewhere), (None, claim)]
    found = [together(2, lambda worker, pair=pair: seen_by_all(pair[worker.rank], worker.group)) for pair in given]
    assert found == [[True, True], [False, False], [False, False]]
