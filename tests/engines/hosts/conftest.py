"""What tests of several hosts on one machine need: credentials of their own, and that nothing is left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm_servers
from driver_script import wait_until
from joined_run import EPOCHS

import manyhands as mh
import plain


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No worker of this process's launches lives on, whoever started it."""
    yield
    wait_until(lambda: not warm_servers.still_busy(), 10)


@pytest.fixture(scope="session")
def alone() -> torch.Tensor:
    """What one worker trains."""
    return mh.train(plain.task(epochs=EPOCHS), workers=1).parameters
