from __future__ import annotations

import atexit
import io
import pickle
import sys
from pathlib import Path

import pytest
import torch

from manyhands import quiet


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that quietness changes is put back after the test, and what it opened is closed."""
    monkeypatch.setattr(quiet, "_quiet", False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(torch.serialization, "save", torch.save)
    monkeypatch.setattr(atexit, "register", lambda close: opened.append(close))
    opened: list[object] = []


def test_the_first_rank_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    quiet.quiet_other_ranks(0, 4)
    file = io.BytesIO()
    torch.save(1, file)
    print("heard")
    assert file.tell() > 0
    assert capsys.readouterr() == ("heard\n", "")


def test_others_print_and_save_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):
        quiet.quiet_other_ranks(1, 4)
    torch.save(1, tmp_path / "path")
    torch.save(1, str(tmp_path / "text"))
    with (tmp_path / "open").open("wb") as file:
        torch.save(1, file)
        assert file.tell() == 0
    print("unheard")
    sys.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == ["open"]
    said = "manyhands: workers 1 to 3 of 4 print nothing to standard output, and torch.save writes no files there\n"
    assert capsys.readouterr() == ("", said)


def test_others_still_save_to_memory_and_pickle_tensors() -> None:
    """torch pickles a tensor's storage with torch.save."""
    quiet.quiet_other_ranks(1, 2)
    sys.stdout.close()
    buffer = io.BytesIO()
    torch.save(torch.arange(4), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), torch.arange(4))
    assert torch.equal(pickle.loads(pickle.dumps(torch.arange(4.0))), torch.arange(4.0))


def test_one_rank_says_so_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    quiet.quiet_other_ranks(2, 4)
    sys.stdout.close()
    assert capsys.readouterr() == ("", "")
