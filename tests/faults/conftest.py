"""Trials on a warm fork server, simulated ones, and the run of one worker that all are held against."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_harness import Trial, reference

from manyhands.engines.local.engine import Local
from manyhands.recording.run import Run


@pytest.fixture
def trial(local: Local, tmp_path: Path) -> Trial:
    return Trial(tmp_path)


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[[], Trial]:
    """Another simulated trial each time."""
    return lambda: Trial(Path(tempfile.mkdtemp(dir=tmp_path)), simulated=True)


@pytest.fixture(scope="session")
def one_worker() -> Run:
    return reference()
