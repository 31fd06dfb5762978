"""Parts of checkpoints that are written beside training: of their step, one at a time, and reported once."""

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.assembly import CheckpointAssembly
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.checkpoint.part_writer import PartWriter, WrittenPart
from manyhands.checkpoint.parts import Attempt
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.comm.solo import SoloGroup
from manyhands.errors import ManyhandsError
from manyhands.testing.threads import together
from manyhands.worker import Worker
from refusals import refused

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def test_the_library_reads_what_is_written_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_WRITTEN_BYTES", 7)
    shapes = ((3, 4), (), (0, 2), (5,))
    given = {f"{kind}{shape}": torch.randn(shape).to(kind) for kind in TYPES for shape in shapes}
    pieces = list(checkpoints.pieces_of(given))
    found = safetensors.torch.load(b"".join(pieces))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert len(b"".join(pieces)) == len(safetensors.torch.save(given))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In the place of `checkpoints.synced`: files are opened once the gate is open."""
    gate, synced = SimpleNamespace(opened=threading.Event(), reached=threading.Event()), checkpoints.synced

    @contextmanager
    def wait(path: Path) -> Iterator[io.BufferedWriter]:
        gate.reached.set()
        assert gate.opened.wait(20)
        with synced(path) as file:
            yield file

    monkeypatch.setattr(checkpoints, "synced", wait)
    return gate


class Writing:
    """A part of step 6 that is written beside training, and what it reports."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.partial = checkpoints.partial_of(folder, 6, checkpoints.begin(folder, 6, None, pytest.fail))
        self.writer, self.reports = PartWriter(), list[WrittenPart]()
        self.writer.copy(tensors)
        self.writer.start(self.partial, SoloGroup(), b"{}", self.reports.append)


def test_a_part_holds_no_newer_values_than_its_copy(tmp_path: Path, gate: SimpleNamespace) -> None:
    """pytorch#144657: training goes on, in the same memory, before a byte is written."""
    parameters = torch.arange(8.0)
    view, counts = parameters[2:6].view(2, 2), torch.tensor([3])
    part = Writing(tmp_path, {"view": view, "counts": counts})
    assert gate.reached.wait(20)
    parameters.add_(100)
    counts.add_(1)
    assert part.reports == []
    gate.opened.set()
    part.writer.wait()
    found = checkpoints.load_tensors(part.partial / "rank-00000.safetensors")
    assert torch.equal(found["view"], torch.arange(2.0, 6.0).view(2, 2))
    assert int(found["counts"]) == 3
    assert [len(one.files) for one in part.reports] == [2]


def test_the_next_part_waits_for_the_one_before_and_uses_its_memory(tmp_path: Path, gate: SimpleNamespace) -> None:
    part = Writing(tmp_path, {"w": torch.zeros(1000), "n": torch.zeros(3)})
    kept = part.writer._copies["w"].data_ptr()
    waiting = threading.Thread(target=part.writer.wait)
    waiting.start()
    assert waiting.is_alive()
    assert part.reports == []
    gate.opened.set()
    waiting.join(20)
    assert len(part.reports) == 1
    part.writer.wait()
    part.writer.copy({"w": torch.ones(1000), "n": torch.zeros(4)})
    assert part.writer._copies["w"].data_ptr() == kept
    assert float(part.writer._copies["w"].sum()) == 1000
    assert part.writer._copies["n"].shape == (4,)


def test_what_cannot_be_written_is_reported_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def full(path: Path) -> Iterator[Full]:
        path.touch()
        yield Full()

    monkeypatch.setattr(checkpoints, "synced", full)
    part = Writing(tmp_path, {"w": torch.zeros(3)})
    part.writer.wait()
    assert part.reports == [WrittenPart(error="No space left on device")]
    assert list(part.partial.iterdir()) == []


# -- all of it, with the driver's side ---------------------------------------------------------------------------------


class Driver:
    """What a recorder does with an assembly."""

    def __init__(self, where: AnyPath) -> None:
        self.warnings: list[str] = []
        self.written: list[int] = []
        self.flushed = 0
        self.assembly = CheckpointAssembly(where, self._flush, self.warnings.append, self._written)
        self._lock = threading.Lock()

    def _flush(self) -> None:
        assert not self.written or self.written[-1] != 6
        self.flushed += 1

    def _written(self, attempt: Attempt, path: AnyPath) -> None:
        assert self.flushed > len(self.written)
        self.written.append(attempt.tick)

    def report(self, worker_id: int, tick: int, part: WrittenPart) -> None:
        with self._lock:
            self.assembly.part(worker_id, tick, 0, part)


def save(driver: Driver, where: AnyPath, size: int, far: Callable[[bool], None] = lambda far: None) -> None:
    """By so many workers; `far`: rank 0, which is on another host by now, and rank 3 do not see the folder."""
    token = driver.assembly.begin(6, 0, tuple(range(size)))

    def write(worker: Worker) -> None:
        far(worker.rank in (0, 3))
        writer, rank = PartWriter(), worker.rank
        writer.copy({"w": torch.tensor([rank])})
        partial = checkpoints.partial_of(where, 6, token)
        values = b'{"rank": %d}' % rank
        writer.start(partial, worker.group, values, lambda part: driver.report(rank, 6, part))
        writer.wait()

    together(size, write)


def whole(where: AnyPath) -> Checkpoint:
    found = checkpoints.newest(where, pytest.fail)
    assert found is not None
    assert [int(found.tensors(rank)["w"]) for rank in range(found.ranks)] == list(range(found.ranks))
    assert [found.values(rank)["rank"] for rank in range(found.ranks)] == list(range(found.ranks))
    return found


def test_parts_of_all_make_a_checkpoint(tmp_path: Path, far: Callable[[bool], None]) -> None:
    """Also those of ranks that do not see the folder, which send them."""
    elsewhere = RemotePath(f"local://{tmp_path}/elsewhere")
    for where, size, seen in [(tmp_path / "disk", 3, True), (elsewhere, 3, True), (tmp_path / "far", 4, False)]:
        driver = Driver(where)
        save(driver, where, size, *([] if seen else [far]))
        assert driver.written == [6]
        assert whole(where).ranks == size
        assert driver.assembly.settle(6)
        assert driver.warnings == []


def test_a_full_disk_for_the_parts_of_others(
    tmp_path: Path, far: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what comes all the same: nobody waits for it."""
    synced = checkpoints.synced

    @contextmanager
    def full(path: Path) -> Iterator[io.BufferedWriter]:
        with synced(path) as file:
            if path.name == "rank-00003.safetensors":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    monkeypatch.setattr(checkpoints, "synced", full)
    driver = Driver(tmp_path)
    driver.assembly.parts.newest = 3
    save(driver, tmp_path, 4, far)
    assert driver.written == []
    (warning,) = driver.warnings
    assert "worker 1: No space left on device" in warning
    driver.assembly.close()  # another may have written while the folder was removed
    assert list(tmp_path.glob("step-*")) == []


def test_nobody_sees_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path)
    token = driver.assembly.begin(6, 0, (0,))
    partial = checkpoints.partial_of(tmp_path, 6, token)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    reports = list[WrittenPart]()
    PartWriter().start(partial, SoloGroup(), b"{}", reports.append)
    assert "all hosts share" in reports[0].error
    refused("there is no older one", driver.assembly.part, 0, 6, 0, reports[0], kind=ManyhandsError)


def test_a_dropped_checkpoint_leaves_nothing(tmp_path: Path, gate: SimpleNamespace) -> None:
    """Whoever still writes when a member is lost is not waited for; what it leaves is gone at the end."""
    driver, writer = Driver(tmp_path), PartWriter()
    token = driver.assembly.begin(6, 0, (0, 1))
    partial = checkpoints.partial_of(tmp_path, 6, token)
    writer.copy({"w": torch.zeros(3)})
    writer.start(partial, SoloGroup(), b"{}", lambda part: driver.report(0, 6, part))
    assert gate.reached.wait(20)
    driver.assembly.lost(1)
    assert not partial.exists()
    partial.mkdir()  # as if the removal had missed a file
    gate.opened.set()
    writer.wait()
    assert len(list(partial.iterdir())) == 2
    driver.assembly.close()
    assert list(tmp_path.iterdir()) == []
    assert len(driver.warnings) == 1
    assert driver.written == []


def test_what_the_driver_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    driver = Driver(tmp_path / "file")
    driver.assembly.parts.newest = 3
    assert driver.assembly.begin(6, 0, (0, 1)) == ""  # the folder cannot be made
    assert "the driver: File exists" in driver.warnings[0]
    assert not driver.assembly.parts.settle(6)
    driver = Driver(tmp_path)
    driver.assembly.parts.newest = 3

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "_write_manifest", full)
    save(driver, tmp_path, 2)
    assert driver.written == []
    assert "the driver: No space left on device" in driver.warnings[0]
    assert list(tmp_path.glob("step-*")) == []
    refused("the run's last one", driver.assembly.settle, 6, kind=ManyhandsError)
