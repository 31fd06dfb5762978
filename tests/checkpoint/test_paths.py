"""Paths elsewhere, and what a user may name a run directory by."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from manyhands.checkpoint.paths import RemotePath, path_of
from manyhands.errors import BadInput, ManyhandsError
from refusals import refused


class ArrowDisk(ArrowFSWrapper):
    """What hdfs:// goes through, over this machine's disk."""

    protocol = "arrowdisk"

    def __init__(self, **options: Any) -> None:
        super().__init__(pyarrow.fs.LocalFileSystem(), **options)


class Broken(MemoryFileSystem):
    """Answers with an error of a type of its own, as the clients of most stores do."""

    protocol = "broken"

    def isdir(self, path: str, *more: Any, **options: Any) -> bool:
        raise RuntimeError("no credentials\nand much more")

    exists = pipe_file = cat_file = isdir


fsspec.register_implementation("arrowdisk", ArrowDisk, clobber=True)
fsspec.register_implementation("broken", Broken, clobber=True)


@pytest.fixture(params=["memory", "local", "arrowdisk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    """A folder elsewhere, empty."""
    found = path_of(f"{request.param}://{tmp_path}/run")
    assert isinstance(found, RemotePath)
    found.mkdir()
    yield found
    found.remove()


def test_what_names_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, found in [
        ("runs/mine", Path("runs/mine")),
        (Path("/runs/mine"), Path("/runs/mine")),
        ("file:///runs/my%20own", Path("/runs/my own")),
        ("file://localhost/runs", Path("/runs")),
        ("memory://runs/mine", RemotePath("memory://runs/mine")),
        ("memory://runs/mine//", RemotePath("memory://runs/mine")),
        (RemotePath("memory://a"), RemotePath("memory://a")),
    ]:
        assert path_of(given) == found
    absent = {"class": "absentfs.AbsentFileSystem", "err": "Get absent for absent"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    for given, words in [
        ("nosuch://a/b", "nosuch:// is not a known file system.*hdfs.*memory.*s3"),
        ("absent://a/b", "needs a package that is not installed: Get absent for absent; pip install absentfs"),
        (Path("memory://a/b"), "pathlib.Path cannot hold a URL and has turned it into 'memory:/a/b'"),
        ("file://runs/mine", "names the host runs, .*: write file:///runs/mine"),
        ("memory://a/*", r"contains \* \? \[ or \]"),
    ]:
        refused(words, path_of, given)


def test_a_folder_and_its_files(folder: RemotePath) -> None:
    inner = folder / "checkpoints" / "step-1"
    inner.mkdir()
    inner.mkdir()
    (inner / "a").write_bytes(b"one\ntwo\n")
    (inner / "b").write_bytes(b"")
    assert inner.sizes() == {"a": 8, "b": 0}
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-1"]
    assert sorted(map(str, inner.iterdir())) == [f"{inner}/a", f"{inner}/b"]
    assert (inner / "a").read_text() == "one\ntwo\n"
    with (inner / "a").open("rb") as file:
        assert list(file) == [b"one\n", b"two\n"]
    assert inner.is_dir()
    assert (inner / "a").exists()
    assert not (inner / "a").is_dir()
    (inner / "a").remove()
    assert inner.sizes() == {"b": 0}
    (folder / "checkpoints").remove()
    assert not inner.exists()
    assert list(inner.iterdir()) == []
    inner.remove()
    with pytest.raises(FileNotFoundError):
        (folder / "none").read_bytes()
    with pytest.raises(FileNotFoundError), (folder / "none").open():
        pass


def test_a_file_is_replaced_whole_or_stays_the_old_one(folder: RemotePath) -> None:
    class Torn(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(2)
            return data or (_ for _ in ()).throw(OSError("torn"))

    path = folder / "file"
    for data in (b"old", b"new and longer"):
        path.write_whole(io.BytesIO(data))
        assert path.read_bytes() == data
        assert folder.sizes() == {"file": len(data)}
    refused(r"cannot write .*/file.partial: OSError: torn", path.write_whole, Torn(b"newer"), kind=ManyhandsError)
    assert path.read_bytes() == data


def test_what_a_file_system_says_otherwise_is_our_error(tmp_path: Path) -> None:
    path = RemotePath(f"local://{tmp_path}/none/file")
    refused("cannot write .*FileNotFoundError", path.write_bytes, b"", kind=ManyhandsError)
    path = path_of("broken://a")
    assert isinstance(path, RemotePath)
    for call in (path.exists, path.is_dir, path.sizes, path.read_bytes, path.remove, lambda: path.write_bytes(b"")):
        with pytest.raises(
            ManyhandsError, match=r"cannot \w+ broken://a: RuntimeError: no credentials\. Check the address"
        ) as caught:
            call()
        assert not isinstance(caught.value, BadInput | OSError)  # else it would pass for a wrong value, or for damage
