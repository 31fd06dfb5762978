"""What tests of several hosts on one machine need: credentials of their own, and that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from open_files import open_files


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No child process, no descriptor."""
    before, there = open_files(), children()
    yield
    assert children() <= there  # other tests of this process may keep a fork server warm
    assert len(open_files()) <= len(before)


def children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
