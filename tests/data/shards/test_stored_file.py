"""data/shards/stored_file.py: exact ranges, tries, and files that are not what they were."""

import io
import os
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards import stored_file as module
from manyhands.data.shards.source import shards
from manyhands.data.shards.stored_file import TRIES, StoredFile
from manyhands.errors import ManyhandsError
from refusals import refused
from shard_files import BYTES_OF, numbers, small_blocks


class FailingStore(MemoryFileSystem):  # type: ignore[misc]
    """Storage that fails each `every`-th call, with an error of its own kind."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = True
    every = 0
    calls = failures = 0
    errors: tuple[type[Exception], ...] = (OSError, TimeoutError, RuntimeError, KeyError)

    def _maybe_fail(self) -> None:
        cls = type(self)
        cls.calls += 1
        if cls.every and cls.calls % cls.every == 0:
            cls.failures += 1
            raise cls.errors[cls.failures % len(cls.errors)]("the store is tired")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._maybe_fail()
        return dict(super().info(path, **options))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        self._maybe_fail()
        return bytes(super().cat_file(path, start=start, end=end, **options))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of a store that does not fail yet."""
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    for name, value in (("every", 0), ("calls", 0), ("failures", 0), ("store", {})):
        monkeypatch.setattr(FailingStore, name, value)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    yield f"failing://{uuid.uuid4().hex}"
    FailingStore.clear_instance_cache()


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(data)


def test_ranges_and_streams(tmp_path: Path, store: str) -> None:
    data = bytes(range(256)) * 3
    for url in (str(tmp_path / "a"), f"{store}/a"):
        put(url, data)
        file = StoredFile(url)
        assert file.size == len(data)
        assert (file.local is not None) == (url == str(tmp_path / "a"))
        for start, stop in [(0, 10), (5, 5), (700, 768), (0, 768)]:
            assert file.read(start, stop) == data[start:stop]
        assert (file.counters.bytes, file.counters.reads) == (10 + 0 + 68 + 768, 4)
        refused("changed while it was read .it ends at byte 768", file.read, 700, 800)
        with file.stream(100, 300, 16) as stream:
            assert stream.read(50) == data[100:150]
            assert stream.seek(-10, io.SEEK_END) == 190
            assert stream.read() == data[290:300]
            assert stream.seek(20) == 20
            assert stream.seek(5, io.SEEK_CUR) == 25
            assert stream.read(3) == data[125:128]
            assert stream.tell() == 28
            stream.seek(1000)
            assert stream.read(1) == b""


def test_each_read_is_of_the_file_that_was_opened(tmp_path: Path) -> None:
    for change, (happens, _) in CHANGES.items():
        (tmp_path / "a").write_bytes(bytes(100))
        file = StoredFile(str(tmp_path / "a"))
        assert file.read(0, 10) == bytes(10)
        happens(tmp_path / "a")
        refused("a (changed while it was read|does not exist)", file.read, 10, 20, case=change)


def test_a_read_in_several_parts_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than was asked for: 2 GB a call, at most."""
    (tmp_path / "a").write_bytes(bytes(range(200)))
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, many, at: whole(file, min(many, 7), at))
    assert StoredFile(str(tmp_path / "a")).read(10, 60) == bytes(range(10, 60))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream.arrow", "tfrecord", "tar", "csv", "jsonl", "txt"])
def test_a_store_that_fails_every_fifth_or_each_read(store: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row comes once, and what was tried again is counted; then an error names the tries."""
    for i, numbers_of in enumerate((range(30), range(0), range(30, 61), range(61, 62))):
        put(f"{store}/{i}.{suffix}", BYTES_OF[suffix](numbers_of))
    for shuffle, counted in [("blocks:3", True), ("blocks:3", False), (True, True)]:
        with monkeypatch.context() as patch:
            small_blocks(patch)
            patch.setattr(FailingStore, "calls", 0)
            patch.setattr(FailingStore, "every", 10)
            source = open_source(shards(f"{store}/*.{suffix}", shuffle=shuffle, counted=counted))
            patch.setattr(FailingStore, "every", 5)
            seen = [row for part in Feed(source, batch_size=8).epoch(0) for row in numbers(part.batch)]
        assert sorted(seen) == list(range(62)), (shuffle, counted)
        assert source.counters.retries > 0, (shuffle, counted)
    source = open_source(shards(f"{store}/0.{suffix}"))
    calls = FailingStore.calls
    monkeypatch.setattr(FailingStore, "every", 1)
    words = rf"0\.{suffix} could not be read, in {TRIES} tries: .*tired.*resume the run"
    error = refused(words, lambda: list(Feed(source).epoch(0)), kind=ManyhandsError)
    assert error.exit_code == 1  # not the input's fault
    assert (FailingStore.calls - calls) % TRIES == 0  # of each of the reads under way


def test_the_pauses_between_tries_double(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"{store}/a.txt", b"x\n")
    file, pauses = StoredFile(f"{store}/a.txt"), list[float]()
    assert file.size == 2
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.25)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    monkeypatch.setattr(FailingStore, "every", 1)
    refused("6 tries", file.read, 0, 1, kind=ManyhandsError)
    assert pauses == [0.25, 0.5, 1, 2, 4]


def test_what_stays_away_is_tried_once(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("it was tried again"))
    refused("gone.txt does not exist on .*, and all hosts must see it", lambda: StoredFile(f"{store}/gone.txt").size)
    put(f"{store}/a.txt", b"x\n")
    monkeypatch.setattr(FailingStore, "errors", (PermissionError,))
    monkeypatch.setattr(FailingStore, "every", 1)
    refused("a.txt cannot be read: the store is tired", lambda: StoredFile(f"{store}/a.txt").size)
    (tmp_path / "a").write_bytes(b"x")
    file = StoredFile(str(tmp_path / "a"))
    assert file.size == 1

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        refused("in 1 tries: .*Too many open files", file.read, 0, 1, kind=ManyhandsError)


def collect(slices: Iterator[Any], seen: list[int]) -> None:
    for part in slices:
        seen += numbers(part.batch)


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)


CHANGES: dict[str, tuple[Any, str]] = {  # what happens, and what is said of it
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 4), "bytes now, and had"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes now, and had"),
    "emptied": (lambda path: os.truncate(path, 0), "0 bytes now"),
    "replaced": (replace, "it was written again"),
    "written again": (lambda path: os.utime(path, ns=(1, 1)), "it was written again"),
    "deleted": (Path.unlink, "does not exist"),
}


@pytest.mark.parametrize(
    "suffix", ["parquet", "arrow", "stream.arrow", "tfrecord", "tar", "tar.gz", "csv", "jsonl", "txt"]
)
def test_a_file_that_changes_between_two_batches(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names it and what happened; what came before came once."""
    small_blocks(monkeypatch)
    monkeypatch.setattr("manyhands.data.shards.source.GROUP_ROWS", 8)
    path, data = tmp_path / f"a.{suffix}", BYTES_OF[suffix](range(60))
    for number, (change, (happens, said)) in enumerate(CHANGES.items()):
        path.write_bytes(data)
        source = open_source(shards(path, shuffle="blocks:2" if number % 2 else False))
        slices = Feed(source, batch_size=8, threads=False).epoch(0)
        seen = [row for part in islice(slices, 3) for row in numbers(part.batch)]
        happens(path)
        words = rf"a\.{suffix} (changed while it was read \(|does not exist on )"
        error = refused(words, collect, slices, seen, case=change)
        assert error.exit_code == 2
        assert len(seen) == len(set(seen)) < 60, change
        assert said in str(error), change


def test_a_file_of_a_store_that_is_written_again(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size or by what its store says of its version."""
    small_blocks(monkeypatch)
    for counted in (True, False):
        put(f"{store}/a.tar", BYTES_OF["tar"](range(60)))
        feed = Feed(open_source(shards(f"{store}/a.tar", shuffle=False, counted=counted)), batch_size=8, threads=False)
        slices = feed.epoch(0)
        next(slices)
        put(f"{store}/a.tar", BYTES_OF["tar"](range(60, 120)))
        refused(r"a\.tar changed while it was read", list, slices, case=counted)
