"""Shared by the tests of commands."""

from typing import Any

import pytest
from command_line import faked_train


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What train() was called with; nothing is started."""
    return faked_train(monkeypatch)
