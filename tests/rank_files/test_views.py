"""Both views in one process, without patches: who is ahead is the test's to say; and who owns a file."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.rank_files.file_owner import caches, is_shared
from manyhands.rank_files.folder import CollectiveCounts, Folder
from manyhands.rank_files.merge import settle
from manyhands.rank_files.views import FirstView, OtherView, View


def test_shared_paths() -> None:
    private = {"/tmp/x", *caches({"HOME": "/home/u", "HF_HOME": "/models"}, "/tmp", "u")}
    for path in ("/tmp/x/y", "/home/u/.cache/a", "/models/b", "/tmp/torchinductor_u/c", "/dev/null", "/proc/self/fd/1"):
        assert not is_shared(path, private), path
    assert not is_shared("/home/u/__pycache__/a.pyc", private)
    for path in ("/tmp/xy", "/home/u/model.pt", "/device/a"):
        assert is_shared(path, private), path


class Ranks:
    """Ranks 0, 1 and 2 at one folder; rank 0 is alive."""

    def __init__(self, place: Path) -> None:
        self.place = place / "work"
        self.place.mkdir()
        self.folder = Folder.make(str(place), 0)
        self.alive = self.folder.lock("alive", fcntl.LOCK_EX)
        self.first = FirstView(self.folder, 0, CollectiveCounts(self.folder))
        self.others = [
            OtherView(self.folder, rank, 3, CollectiveCounts(self.folder), 0.05, lambda path: "private" in path)
            for rank in (1, 2)
        ]

    def path(self, name: str) -> str:
        return str(self.place / name)

    def write(self, view: View, name: str, text: str, fresh: bool = True) -> None:
        with open(view.begin(self.path(name), fresh=fresh), "w" if fresh else "a") as file:
            file.write(text)
        view.end(self.path(name))

    def read(self, view: View, name: str) -> str:
        return Path(view.source(self.path(name))).read_text()

    def turn(self) -> None:
        for view in (self.first, *self.others):
            view.turn()

    def end(self, well: bool = True) -> dict[str, str]:
        """Everything settled; the files by name."""
        for view in (self.first, *self.others):
            view.leave(well)
            view.close()
        if self.alive is not None:
            os.close(self.alive)
            self.alive = None
        assert settle(self.folder)
        assert not os.path.exists(self.folder.root)
        return {str(path.relative_to(self.place)): path.read_text() for path in self.place.rglob("*") if path.is_file()}


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    if made.alive is not None:
        made.end()


def test_the_ks_write_is_read_from_the_first_once_it_is_closed(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    other = ranks.others[0]
    ranks.write(ranks.first, "a", "first 1")
    ranks.write(other, "a", "other 1")
    assert ranks.read(other, "a") == "first 1"
    ranks.write(ranks.first, "a", "first 2")
    assert ranks.read(other, "a") == "other 1"  # not the second before this rank wrote it
    ranks.write(other, "a", "other 2")
    assert ranks.read(other, "a") == "first 2"
    ranks.write(other, "a", "other 3")
    assert ranks.read(other, "a") == "other 3"  # waited, and said so
    assert "waited 0.05 s for worker 0" in capfd.readouterr().err
    assert ranks.end() == {"a": "first 2"}


@pytest.mark.parametrize("dead", [False, True])
def test_nobody_waits_for_a_write_that_the_first_has_passed_by_nor_for_a_dead_first(
    ranks: Ranks, dead: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.write(ranks.others[0], "a", "own")
    if dead:
        assert ranks.alive is not None
        os.close(ranks.alive)
        ranks.alive = None
    else:
        ranks.first.turn()
    assert ranks.read(ranks.others[0], "a") == "own"
    assert "waited" not in capfd.readouterr().err
    ranks.others[0].turn()
    ranks.end()


def test_what_is_own_goes_to_its_place_at_the_next_collective(ranks: Ranks) -> None:
    first, second = ranks.others
    ranks.write(first, "own", "1")
    ranks.write(second, "own", "2")
    ranks.write(first, "shared", "other")
    ranks.write(ranks.first, "shared", "first")
    still = open(first.begin(ranks.path("open")), "w")  # noqa: SIM115
    assert first.source(ranks.path("open")) == still.name
    ranks.turn()
    assert Path(ranks.path("own")).read_text() == "1" == ranks.read(first, "own")
    assert Path(ranks.path("own.rank-2")).read_text() == "2"
    assert Path(ranks.path("shared")).read_text() == "first"
    assert not os.path.exists(ranks.path("open"))
    still.write("closed later")
    still.close()
    first.end(ranks.path("open"))
    ranks.turn()
    assert Path(ranks.path("open")).read_text() == "closed later"


def test_a_trackers_file_is_the_firsts_alone(ranks: Ranks) -> None:
    for view, number in ((ranks.first, 7), (ranks.others[0], 8)):
        ranks.write(view, f"events.out.tfevents.1.host.{number}", "x")
    ranks.turn()
    assert ranks.end() == {"events.out.tfevents.1.host.7": "x"}


@pytest.mark.parametrize("well", [False, True])
def test_what_stood_there_is_replaced_only_after_a_good_end(ranks: Ranks, well: bool) -> None:
    Path(ranks.path("old")).write_text("old")
    ranks.write(ranks.others[0], "old", " and more", fresh=False)
    assert ranks.end(well) == ({"old": "old and more"} if well else {"old": "old", "old.rank-1": "old and more"})


def test_exclusive_creation(ranks: Ranks) -> None:
    """What the first rank made in this run is no obstacle, what was there before is one."""
    Path(ranks.path("before")).touch()
    ranks.write(ranks.first, "a", "first")
    ranks.first.mkdir(ranks.path("out"))
    ranks.others[0].begin(ranks.path("a"), new=True)
    ranks.others[0].mkdir(ranks.path("out"))
    for again in ("before", "out"):
        with pytest.raises(FileExistsError):
            ranks.others[0].mkdir(ranks.path(again))


@pytest.mark.parametrize("first_is_ahead", [True, False])
def test_removing_and_moving(ranks: Ranks, first_is_ahead: bool) -> None:
    """What the first rank has removed or moved already, and what it still will."""
    for name in ("removed", "moved"):
        Path(ranks.path(name)).write_text(name)
    for view in (ranks.first, *ranks.others) if first_is_ahead else (*ranks.others, ranks.first):
        view.unlink(ranks.path("removed"))
        view.rename(ranks.path("moved"), ranks.path("new"))
        if isinstance(view, OtherView) and not first_is_ahead:
            assert Path(ranks.path("removed")).exists()
            assert not os.path.lexists(view._seen(ranks.path("removed")))
            assert Path(view._seen(ranks.path("new"))).read_text() == "moved"
    assert ranks.read(ranks.others[0], "new") == "moved"
    with pytest.raises(FileNotFoundError):
        ranks.others[0].unlink(ranks.path("never there"))
    assert ranks.end() == {"new": "moved"}


def test_what_a_rank_alone_removes(ranks: Ranks) -> None:
    """A file that it named, what it put into a folder itself, and nothing of others."""
    other = ranks.others[0]
    for name in ("old", "kept/a", "full/a"):
        Path(ranks.path(name)).parent.mkdir(exist_ok=True)
        Path(ranks.path(name)).write_text("before")
    with pytest.raises(OSError, match="not empty"):
        other.rmdir(ranks.path("full"))
    other.mkdir(ranks.path("mine"))
    for name in ("mine/a", "kept/b"):
        ranks.write(other, name, "own")
    ranks.turn()
    assert Path(ranks.path("mine/a")).exists()
    other.unlink(ranks.path("old"))
    for name in ("mine", "kept"):
        other.rmtree(ranks.path(name))
    ranks.turn()
    assert ranks.end() == {"kept/a": "before", "full/a": "before"}
    assert not os.path.exists(ranks.path("mine"))


def test_a_folder_is_empty_for_who_has_emptied_it(ranks: Ranks) -> None:
    for view in (ranks.first, ranks.others[0]):
        view.mkdir(ranks.path("out"))
        ranks.write(view, "out/a", "x")
    for view in (ranks.others[0], ranks.first):
        view.unlink(ranks.path("out/a"))
        view.rmdir(ranks.path("out"))
    assert not os.path.exists(ranks.path("out"))
    assert ranks.end() == {}


def test_a_folder_that_is_made_anew_hides_what_was_in_it(ranks: Ranks) -> None:
    other, out = ranks.others[0], ranks.path("out")
    for view in (ranks.first, other):
        view.mkdir(out)
        ranks.write(view, "out/a", "1")
    other.rmtree(out)
    other.mkdir(out)
    ranks.first.turn()
    assert os.path.exists(f"{out}/a")
    assert other.listdir(out) == []
    assert not os.path.lexists(other.source(f"{out}/a"))
    ranks.write(other, "out/b", "2")
    ranks.first.rmtree(out)
    ranks.first.mkdir(out)
    assert other.listdir(out) == ["b"]


def test_a_link_and_a_length(ranks: Ranks) -> None:
    for view in (ranks.others[0], ranks.first):
        ranks.write(view, "a", "0123")
        view.truncate(ranks.path("a"), 2)
        view.symlink("a", ranks.path("latest"))
        view.link(ranks.path("a"), ranks.path("same"))
    assert ranks.read(ranks.others[0], "latest") == "01"
    assert ranks.end() == {"a": "01", "latest": "01", "same": "01"}


def test_what_only_this_rank_knows_is_moved_to_its_copy(ranks: Ranks) -> None:
    other = ranks.others[0]
    Path(ranks.path("private")).write_text("x")
    other.rename(ranks.path("private"), ranks.path("whole"))
    assert not os.path.exists(ranks.path("whole"))
    assert ranks.end() == {"whole": "x"}
