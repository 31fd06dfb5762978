"""A real mpirun, where there is one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

SCRIPT = """
import json
import torch
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec

def agree(worker):
    vector = torch.full((1000,), worker.rank + 1.0)
    worker.group.mean_(vector)
    return [worker.rank, worker.size, worker.local_rank, vector[0].item()]

engine = engine_of("auto")
values = engine.launch(agree, LaunchSpec(workers=engine.default_workers(), timeout_s=60))
print(json.dumps([engine.name, engine.own_rank(), values[engine.own_rank()]]), flush=True)
"""


def mpirun(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).resolve().parents[3] / "src")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", "2", *options, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    if not shutil.which("mpirun") or b"Open MPI" not in subprocess.check_output(["mpirun", "--version"]):
        pytest.skip("needs Open MPI's mpirun")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_mpiruns_processes_are_one_run(script: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = mpirun(script, "-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}")
    assert done.returncode == 0, done.stderr
    output = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert output == [["torchrun", 0, [0, 2, 0, 1.5]], ["torchrun", 1, [1, 2, 1, 1.5]]]


def test_without_a_place_to_meet_the_error_says_how(script: Path) -> None:
    done = mpirun(script)
    assert done.returncode != 0
    assert "engine torchrun needs the variable MASTER_ADDR: start with mpirun -x MASTER_ADDR=HOST" in done.stderr
