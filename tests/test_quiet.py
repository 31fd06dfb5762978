from __future__ import annotations

import atexit
import io
import sys

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


def test_others_print_and_save_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        quiet.quiet_other_ranks(1, 4)
    file = io.BytesIO()
    torch.save(1, file)
    print("unheard")
    sys.stdout.close()
    assert file.tell() == 0
    said = "manyhands: workers 1 to 3 of 4 print nothing to standard output, and torch.save writes nothing there\n"
    assert capsys.readouterr() == ("", said)


def test_one_rank_says_so_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    quiet.quiet_other_ranks(2, 4)
    sys.stdout.close()
    assert capsys.readouterr() == ("", "")
