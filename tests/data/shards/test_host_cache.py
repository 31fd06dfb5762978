"""data/shards/host_cache.py: each block once on a host, whole or not at all, within the limit."""

import contextlib
import errno
import fcntl
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from manyhands.data.open_source import open_source
from manyhands.data.shards import host_cache as module
from manyhands.data.shards.host_cache import HostCache, default_folder, key_of
from manyhands.data.shards.source import shards
from manyhands.errors import BadInput, ManyhandsError
from refusals import refused
from shard_files import write

SIZE = 2_600  # of such a block's file, about


def batches(number: int, rows: int = 100) -> list[pa.RecordBatch]:
    return [pa.record_batch({"x": pa.array([number] * rows, pa.int64())}) for _ in range(2)]


def numbers(found: list[pa.RecordBatch]) -> set[int]:
    return {value for batch in found for value in batch.column("x").to_pylist()}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".arrow")


def there() -> Any:
    pytest.fail("it is there, and was made again")


def test_threads_that_ask_for_the_same_block_wait_for_one_and_take_over_what_it_left(tmp_path: Path) -> None:
    cache, made, go = HostCache(tmp_path / "a" / "b"), [], threading.Barrier(8)

    def make() -> Iterator[pa.RecordBatch]:
        made.append(threading.current_thread().name)
        yield from batches(len(made) - 1)
        if len(made) == 1:
            raise BadInput("the first one fails half-way")

    found: list[Any] = []

    def ask() -> None:
        go.wait(10)
        with contextlib.suppress(BadInput):
            found.append(cache.block("k", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 2
    assert [numbers(one) for one, _ in found] == [{1}] * 7
    assert sorted(was_there for _, was_there in found) == [False] + [True] * 6
    assert left(tmp_path / "a" / "b") == []
    assert (len(found[0][0]), cache.has("k"), cache.has("l")) == (2, True, False)
    found, was_there = HostCache(tmp_path / "a" / "b").block("k", there)
    assert (numbers(found), was_there) == ({1}, True)


def test_the_oldest_go_and_the_newest_stays(tmp_path: Path) -> None:
    cache, mapped = HostCache(tmp_path, 3 * SIZE), {}
    for i in range(3):
        mapped[i], _ = cache.block(f"k{i}", lambda i=i: batches(i))
        os.utime(tmp_path / f"k{i}.arrow", (i, i))
    cache.block("k0", there)  # is used now, so k1 is the oldest
    cache.block("k3", lambda: batches(3))
    assert sorted(path.stem for path in tmp_path.glob("*.arrow")) == ["k0", "k2", "k3"]
    assert not cache.has("k1")
    assert numbers(mapped[1]) == {1}  # who has mapped a block keeps it
    cache.block("k4", lambda: batches(4, 10_000))  # larger than all that may be held: it stays, alone
    assert [path.stem for path in tmp_path.glob("*.arrow")] == ["k4"]


def test_a_block_that_others_remove_at_once_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two workers write more than the limit holds, each removes the other's block."""
    replace, made = Path.replace, []

    def replaced(self: Path, target: Path) -> Path:
        replace(self, target)
        Path(target).unlink()
        return target

    monkeypatch.setattr(Path, "replace", replaced)
    found, was_there = HostCache(tmp_path).block("k", lambda: made.append(1) or batches(5))
    assert (numbers(found), was_there, made) == ({5}, False, [1])


def test_who_comes_late_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked for the block before, and makes an unfinished file after another's was renamed."""
    cache, other, opened = HostCache(tmp_path), HostCache(tmp_path), os.open

    def late(path: Any, *options: Any, **named: Any) -> int:
        monkeypatch.setattr(os, "open", opened)
        other.block("k", lambda: batches(5))
        return opened(path, *options, **named)

    monkeypatch.setattr(os, "open", late)
    found, was_there = cache.block("k", there)
    assert (numbers(found), was_there) == ({5}, True)
    assert left(tmp_path) == []


def test_what_a_crash_left_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "k.arrow"
    HostCache(tmp_path).block("k", lambda: batches(5))
    for damaged in (b"", path.read_bytes()[:-20], b"x" * 5000):
        path.write_bytes(damaged)
        found, was_there = HostCache(tmp_path).block("k", lambda: batches(6))
        assert (numbers(found), was_there) == ({6}, False), damaged[:10]
    (tmp_path / "l.part").write_bytes(b"half" * 1000)  # an unfinished file of nobody is taken over
    assert numbers(HostCache(tmp_path).block("l", lambda: batches(6))[0]) == {6}
    assert left(tmp_path) == []


def test_unfinished_files_of_nobody_go_first_and_those_that_are_written_stay(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, SIZE)
    for name in ("dead", "alive"):
        (tmp_path / f"{name}.part").write_bytes(b"x" * 10_000)
        os.utime(tmp_path / f"{name}.part", (1, 1))
    with (tmp_path / "alive.part").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.block("k", lambda: batches(5))
    assert left(tmp_path) == ["alive.part"]
    assert cache.has("k")


def test_an_error_leaves_nothing_and_others_may_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HostCache(tmp_path)

    def fails() -> Iterator[pa.RecordBatch]:
        yield batches(1)[0]
        raise BadInput("a.csv is damaged")

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 500:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data) or 0

    for _ in range(2):
        refused("a.csv is damaged", cache.block, "k", fails)
        assert left(tmp_path) == []
        assert not cache.has("k")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda file, mode: Full(file, mode))
        words = r"cache folder .* cannot be used \(No space left on device\): give a smaller cache="
        refused(words, cache.block, "k", lambda: batches(1), kind=ManyhandsError)
    assert left(tmp_path) == []
    assert not cache.has("k")
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert numbers(cache.block("k", lambda: batches(2))[0]) == {2}


def test_a_writer_that_writes_nothing_for_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HostCache(tmp_path)
    now = iter(range(0, 100_000, 50))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    (tmp_path / "k.part").write_bytes(b"")
    with (tmp_path / "k.part").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ManyhandsError, match=r"another process has held .*k\.part for 300 s without writing to it"):
            cache.block("k", lambda: batches(1))
        assert (tmp_path / "k.part").exists()  # it is another's


def test_a_lock_ends_with_the_writing_also_where_a_forked_process_has_it(tmp_path: Path) -> None:
    """A process that forks while a thread writes gives its child the descriptor."""
    cache, kept = HostCache(tmp_path), []

    def make() -> Iterator[pa.RecordBatch]:
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}").endswith("k.part"):
                    kept.append(os.dup(int(name)))  # as fork would
            except FileNotFoundError:
                continue
        yield from batches(1)

    cache.block("k", make)
    assert kept
    (tmp_path / "k.arrow").rename(tmp_path / "k.part")  # what is locked, if it is
    try:
        assert numbers(cache.block("k", lambda: batches(2))[0]) == {2}
    finally:
        for file in kept:
            os.close(file)


def test_values_are_made_once_as_json_where_they_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made = HostCache(tmp_path), []

    def make() -> Any:
        made.append(1)
        return {"a": [1, None]}

    assert [cache.json("k", make) for _ in range(2)] == [{"a": [1, None]}] * 2
    assert made == [1]
    (tmp_path / "k.json").write_text('{"a":')  # a crash
    assert cache.json("k", make) == {"a": [1, None]}
    assert len(made) == 2
    assert left(tmp_path) == ["k.json"]

    def full(self: Path, text: str) -> int:
        self.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert [cache.json("l", make) for _ in range(2)] == [{"a": [1, None]}] * 2
    assert len(made) == 4
    assert left(tmp_path) == ["k.json"]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, "parquet", [9])
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        words = "cache folder .* cannot be written to .*: name another one with cache_folder= .*MANYHANDS_CACHE"
        refused(words, open_source, shards(paths, cache="1MB", cache_folder=folder))
        refused("cannot be written to", open_source, shards(paths, shuffle=True, cache_folder=folder))
    monkeypatch.setenv("MANYHANDS_CACHE", "/proc/none")  # there no index is kept
    for _ in range(2):
        source = open_source(shards(write(tmp_path, "tar", [9])))
        assert (source.rows, source.counters.bytes > 0) == (9, True)

    def locked(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", locked)
    refused(r"cannot be written to \(No locks available\)", HostCache, tmp_path / "nfs")
    assert left(tmp_path / "nfs") == []


def test_a_disk_or_limit_that_is_too_small_is_refused_before_training(tmp_path: Path) -> None:
    paths = write(tmp_path, "parquet", [900])
    words = "a cache of .* was asked for, and the disk of .* has .* free: give a smaller one"
    refused(words, open_source, shards(paths, cache="900TB"))
    words = 'the rows are about .* when decoded, and the cache in .* may hold 1.0 KB: .*shuffle="blocks:16"'
    refused(words, open_source, shards(paths, shuffle=True, cache="1KB"))


def test_the_default_folder_limit_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", "/a/b")
    assert default_folder() == Path("/a/b")
    monkeypatch.delenv("MANYHANDS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_folder() == Path("/c/manyhands")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "manyhands"
    disk = os.statvfs(tmp_path)
    assert 0 < HostCache(tmp_path).limit < disk.f_blocks * disk.f_frsize
    assert key_of("a", 1) == key_of("a", 1)
    assert len({key_of("a", 1), key_of("a", 2), key_of("a1"), key_of("a", [1])}) == 4
