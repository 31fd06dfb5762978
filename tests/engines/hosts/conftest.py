"""What tests of several hosts on one machine need: credentials of their own, and that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from joined_run import no_process_is_left


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    with no_process_is_left():
        yield
