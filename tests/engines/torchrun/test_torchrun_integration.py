from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import json, os, sys
    import torch
    from manyhands.engines import engine_of
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.worker import current

    class Record(Observer):
        def __init__(self):
            self.seen = []
        def event(self, event):
            self.seen.append((event.rank, event.step))

    def program(worker):
        assert current() is worker
        tensor = torch.full((5,), float(worker.rank))
        total = worker.group.mean_(tensor, weight=2.0)
        worker.emit("step", step=10 + worker.rank)
        worker.driver.collect(worker.group)
        further = worker.make_group([0, 1])
        assert further is not worker.group and further.all_gather_json(worker.rank) == [0, 1]
        further.close()
        return [type(worker.group).__name__, worker.rank, worker.size, tensor.tolist(), total.weight, worker.threads]

    if len(sys.argv) > 1:
        torch.distributed.init_process_group("gloo")
    record = Record()
    engine = engine_of("auto")
    values = engine.launch(program, LaunchSpec(workers=engine.default_workers(), observer=record, threads_per_worker=1))
    rank = int(os.environ["RANK"])
    with open(f"rank{rank}.json", "w") as file:
        json.dump([values, sorted(record.seen), torch.distributed.is_initialized()], file)
    if len(sys.argv) > 1:
        torch.distributed.destroy_process_group()
"""


def torchrun(folder: Path, text: str, *arguments: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(textwrap.dedent(text))
    source = Path(__file__).resolve().parents[3] / "src"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--standalone"]
    return subprocess.run(
        [sys.executable, *launcher, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.parametrize("own_process_group", [False, True])
def test_workers_of_one_host_share_memory(tmp_path: Path, own_process_group: bool) -> None:
    import json

    done = torchrun(tmp_path, PROGRAM, *(["own"] if own_process_group else []))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        values, seen, initialized = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert values[rank] == ["SharedMemoryGroup", rank, 2, [0.5] * 5, 4.0, 1]
        assert values[1 - rank] is None
        assert seen == ([[0, 10], [1, 11]] if rank == 0 else [])
        assert initialized == own_process_group
    assert not list(tmp_path.glob("manyhands*"))


@pytest.mark.slow
def test_an_error_ends_all_ranks_and_is_shown(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.torchrun.engine import Torchrun

        def program(worker):
            if worker.rank == 1:
                raise KeyError("weights")
            worker.group.barrier()

        Torchrun().launch(program, LaunchSpec(workers=2, timeout_s=20))
        """,
    )
    assert done.returncode != 0
    assert "failed in phase start at step 0: KeyError: 'weights'" in done.stderr
    assert "PeerLost: worker 1 on" in done.stderr
