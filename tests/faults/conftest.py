"""A warm engine, the run of one worker that all are held against, and a look at what is left after each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_harness import Trial, nothing_left, reference

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.recording.run import Run


@pytest.fixture(scope="session")
def own_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """Engine `local` whose files lie in a folder that nobody else writes to; warm, so that a first launch opens nothing."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("scratch"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        with Local() as engine:
            mh.train(plain.task(epochs=1), engine=engine, workers=2, survive="max_losses=1")
            yield engine


@pytest.fixture
def trial(own_local: Local, tmp_path: Path) -> Iterator[Trial]:
    """Afterwards no process, descriptor or file of it is left."""
    with nothing_left():
        yield Trial(own_local, tmp_path)


@pytest.fixture(scope="session")
def one_worker() -> Run:
    return reference()
