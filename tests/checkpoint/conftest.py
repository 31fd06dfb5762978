"""Hosts that do not see the folder of checkpoints."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool], None]:
    """Call it with True, and this thread sees nothing below tmp_path from then on."""
    seen = threading.local()
    is_dir, is_file = Path.is_dir, Path.is_file

    def visible(path: Path) -> bool:
        return not (getattr(seen, "far", False) and path.is_relative_to(tmp_path))

    monkeypatch.setattr(Path, "is_dir", lambda path: visible(path) and is_dir(path))
    monkeypatch.setattr(Path, "is_file", lambda path: visible(path) and is_file(path))
    return lambda far: setattr(seen, "far", far)
