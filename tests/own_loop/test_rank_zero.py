import atexit
import os
import sys

import pytest
import tqdm

from manyhands.own_loop import rank_zero
from manyhands.worker import Worker


@pytest.fixture(autouse=True)
def kept_apart(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the ranks' files are left to, see rank_files; everything that quietness changes is put back after the test."""
    kept_apart: list[object] = []
    monkeypatch.setattr(rank_zero, "_quiet", False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(rank_zero, "keep_apart", lambda group, timeout_s: kept_apart.append((group, timeout_s)))
    monkeypatch.setattr(atexit, "register", lambda close: None)
    monkeypatch.setattr(tqdm.tqdm, "__init__", tqdm.tqdm.__init__)
    for name in ("WANDB_MODE", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "")  # else it would not be put back
        monkeypatch.delenv(name)
    return kept_apart


def test_the_first_rank_is_as_it_was(capsys: pytest.CaptureFixture[str], kept_apart: list[object]) -> None:
    rank_zero.mute_nonzero_ranks(Worker(), 7.0)
    assert not kept_apart  # of one worker
    worker = Worker(rank=0, size=4)
    rank_zero.mute_nonzero_ranks(worker, 7.0)
    print("heard")
    assert capsys.readouterr() == ("heard\n", "")
    assert kept_apart == [(worker.group, 7.0)]


@pytest.mark.parametrize("rank", [1, 2])
def test_others_print_nothing_and_one_rank_says_so_for_all(
    rank: int, capsys: pytest.CaptureFixture[str], kept_apart: list[object]
) -> None:
    for _ in range(2):
        rank_zero.mute_nonzero_ranks(Worker(rank=rank, size=4), 7.0)
    print("unheard")
    sys.stdout.close()
    said = "manyhands: workers 1 to 3 of 4 print nothing to standard output\n" if rank == 1 else ""
    assert capsys.readouterr() == ("", said)
    assert len(kept_apart) == 2  # each group's collectives count


def test_bars_and_trackers_are_off_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, bars in ((0, 1), (2, 0)):
        rank_zero.mute_nonzero_ranks(Worker(rank=rank, size=3), 7.0)
        assert list(tqdm.tqdm(range(2), desc="bar")) == [0, 1]
        assert ("bar" in capsys.readouterr().err) is bool(bars)
        assert ("WANDB_MODE" in os.environ) is not bool(bars)
    assert list(tqdm.tqdm(range(2), desc="bar", disable=False)) == [0, 1]
    assert "bar" in capsys.readouterr().err
    sys.stdout.close()
