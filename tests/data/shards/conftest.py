"""Tests of shards keep nothing in the user's own cache folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
