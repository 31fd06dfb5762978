"""Who meets at which folder, what counts as a collective, and for whom functions are as they were given."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from manyhands.comm.solo import SoloGroup
from manyhands.errors import ManyhandsError
from manyhands.rank_files import rendezvous
from manyhands.rank_files.folder import CollectiveCounts, Folder, as_given, is_as_given, pause
from manyhands.rank_files.views import FirstView
from manyhands.testing.threads import together
from manyhands.worker import Worker


@pytest.mark.parametrize(
    ("hosts", "shared", "expected"),
    [
        ("aaa", False, [0, 0, 0]),
        ("aabb", False, [0, 0, 2, 2]),  # each host has a first rank of its own
        ("abcb", False, [0, 1, 2, 1]),
        ("aabb", True, [0, 0, 0, 0]),  # all hosts see the working folder
    ],
)
def test_ranks_meet_where_they_see_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, shared: bool, expected: list[int]
) -> None:
    work, temporary, this = tmp_path / "work", tmp_path / "tmp", threading.local()
    for folder in (work, temporary):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(temporary))
    makers: dict[str, int] = {}

    def offer(where: str, first: int) -> Folder:
        folder = Folder.make(where, first)
        makers[folder.root] = first
        return folder

    def sees(root: str) -> bool:
        on_work = shared and root.startswith(str(work))
        return os.path.isdir(root) and (on_work or hosts[makers[root]] == hosts[this.rank])

    monkeypatch.setattr(rendezvous, "_offer", offer)
    monkeypatch.setattr(rendezvous, "_sees", sees)

    def meet(worker: Worker) -> tuple[int, str]:
        this.rank = worker.rank
        folder = rendezvous._meet(worker.group)
        worker.group.barrier()
        return folder.first, folder.root

    met = together(len(hosts), meet)
    assert [first for first, _ in met] == expected
    assert len({root for _, root in met}) == len(set(expected))
    assert {str(path) for place in (work, temporary) for path in place.iterdir()} == {root for _, root in met}


def test_nowhere_to_meet_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_offer", lambda where, first: None)
    with pytest.raises(ManyhandsError, match="set TMPDIR"):
        rendezvous._meet(SoloGroup())


class Group(SoloGroup):
    """Its barrier consists of another collective."""

    def barrier(self) -> None:
        self.all_gather_json(None)


def test_a_collective_counts_once_as_it_begins(tmp_path: Path) -> None:
    folder, group = Folder.make(str(tmp_path), 0), Group()
    turns = CollectiveCounts(folder)
    view: Any = FirstView(folder, 0, turns)
    for _ in range(2):
        rendezvous._count(group, view)
    for expected in (1, 2):
        group.barrier()
        assert turns.first == expected
    view.close()


# -- functions as they were given ---------------------------------------------------------------------------------------


def test_it_is_this_threads_alone_and_nests() -> None:
    elsewhere: list[bool] = []
    with as_given(), as_given():
        thread = threading.Thread(target=lambda: elsewhere.append(is_as_given()))
        thread.start()
        thread.join()
        assert is_as_given()
    assert elsewhere == [False]
    assert not is_as_given()


def test_a_signal_handler_during_a_pause_is_the_scripts() -> None:
    seen: list[bool] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(is_as_given()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with as_given():
            while not seen:
                pause(0.01)
            assert is_as_given()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [False]
