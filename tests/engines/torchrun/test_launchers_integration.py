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


def test_mpiruns_processes_are_one_run(tmp_path: Path) -> None:
    if not shutil.which("mpirun") or b"Open MPI" not in subprocess.check_output(["mpirun", "--version"]):
        pytest.skip("needs Open MPI's mpirun")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    place = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}"]
    done = subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", "2", *place, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src"), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert output == [["torchrun", 0, [0, 2, 0, 1.5]], ["torchrun", 1, [1, 2, 1, 1.5]]]
