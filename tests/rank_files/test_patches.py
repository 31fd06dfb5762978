"""The replaced functions, as another rank than the first has them, in this process."""

import io
import os
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyhands.rank_files.folder import CollectiveCounts, Folder, as_given
from manyhands.rank_files.patches import Patches, Private
from manyhands.rank_files.views import FirstView, OtherView, View


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(params=["first", "other"])
def view(request: pytest.FixtureRequest, tmp_path: Path, work: Path) -> Iterator[View]:
    folder = Folder.make(str(tmp_path), 0)
    private = Private(folder.root)
    made: View = FirstView(folder, 0, CollectiveCounts(folder))
    if request.param == "other":
        made = OtherView(folder, 1, 2, CollectiveCounts(folder), 1.0, private)
    patches = Patches(lambda: made, private)
    before = now()
    patches.install()
    try:
        yield made
    finally:
        patches.remove()
        made.close()
    assert now() == before


def now() -> list[object]:
    return [io.open, os.open, os.stat, torch.save, vars(tarfile)["bltn_open"]]


def real(work: Path) -> list[str]:
    with as_given():
        return sorted(os.listdir(work))


def test_every_way_to_write_and_read_a_file(view: View, work: Path) -> None:
    (work / "a").write_text("a")
    with open("b", "wb", buffering=0) as raw:
        raw.write(b"b")
    with open("c", "w", encoding="utf-16", newline="\r\n") as text:
        text.write("ü\n")
        assert (text.name, text.mode, text.encoding, text.writable()) == ("c", "w", "utf-16", True)
    torch.save(torch.ones(2), "d")
    torch.save(torch.ones(2), work / "e", _use_new_zipfile_serialization=False)
    with os.fdopen(os.open("f", os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b"f")
    shutil.copy2("a", "g")
    os.chmod("g", 0o600)
    os.utime("g", (1, 1))
    assert Path("a").read_text() == "a"
    assert Path("b").read_bytes() == b"b"
    assert Path("c").read_text(encoding="utf-16") == "ü\n"
    assert torch.equal(torch.load("d"), torch.load(work / "e"))
    assert os.path.getmtime("g") == 1
    assert os.access("f", os.R_OK)
    assert sorted(os.listdir()) == list("abcdefg") == sorted(entry.name for entry in os.scandir() if entry.is_file())
    assert os.listdir(b".")[0] in [name.encode() for name in "abcdefg"]
    view.journal.read()
    assert {path: (change.begun, change.closed) for path, change in view.journal.changes.items()} == {
        str(work / name): (1, 1) for name in "abcdefg"
    }
    assert real(work) == (list("abcdefg") if isinstance(view, FirstView) else [])


def test_a_folder_of_its_own(view: View, work: Path) -> None:
    """Made, looked at, its entries synced, left."""
    os.makedirs("out/deep", exist_ok=True)
    os.makedirs("out/deep", exist_ok=True)
    Path("out/deep/a").write_text("a")
    fd = os.open("out/deep", os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    assert [str(path) for path in Path("out").rglob("*")] == ["out/deep", "out/deep/a"]
    assert [len(files) for _, _, files in os.walk("out")] == [0, 1]
    os.replace("out/deep/a", "out/b")
    assert Path("out/b").is_file()
    assert not Path("out/deep/a").exists()
    os.rmdir("out/deep")
    shutil.rmtree("out")
    assert not Path("out").exists()
    assert real(work) == []


def test_a_file_counts_as_closed_when_its_last_reference_goes(view: View, work: Path) -> None:
    path = str(work / "a")
    file: object = open("a", "w")  # noqa: SIM115
    print("text", file=file)  # type: ignore[call-overload]
    view.journal.read()
    assert (view.journal.of(path).begun, view.journal.of(path).closed) == (1, 0)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del file
    view.journal.read()
    assert view.journal.of(path).closed == 1
    assert Path("a").read_text() == "text\n"


def test_what_fails_counts_for_nothing(view: View, work: Path) -> None:
    with as_given():
        Path("a").touch()
    for name, mode in (("a", "x"), ("b", "r+")):
        with pytest.raises(OSError, match=f"'{name}'|/{name}'"):
            open(name, mode)  # noqa: SIM115
    with pytest.raises(OSError, match="none"):
        os.mkdir("none/b")
    with pytest.raises(ValueError, match="mode"):
        open("a", "wx")  # noqa: SIM115
    view.journal.read()
    assert not view.journal.changes


def test_what_one_rank_alone_knows_is_where_it_says(view: View, work: Path) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "a").write_text("a")
        assert real(work) == [os.path.basename(folder)]
    with tempfile.NamedTemporaryFile(dir=".") as file:
        assert real(work) == [os.path.basename(file.name)]
    with tempfile.TemporaryFile(dir="."):
        pass
    with open(os.devnull, "w") as null:
        null.write("x")
    read, write = os.pipe()
    with open(write, "w") as pipe:
        pipe.write("x")
    assert os.read(read, 9) == b"x"
    os.close(read)
    os.mkfifo("fifo")
    os.close(os.open("fifo", os.O_RDWR))
    with as_given():
        Path("given").touch()
    view.journal.read()
    assert not view.journal.changes
    assert real(work) == ["fifo", "given"]


def test_who_gets_past_is_named_once(view: View, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        io.FileIO(name, "w").close()
    output = capfd.readouterr().err
    assert output.count("/a with code that") == (0 if isinstance(view, FirstView) else 1)
    assert "/b with" not in output


def test_pickle_and_help_know_them_by_their_names(view: View) -> None:
    for function in (open, os.open, os.stat, torch.load, shutil.rmtree):
        assert pickle.loads(pickle.dumps(function)) is function
    assert "weights_only" in (torch.load.__doc__ or "")
