"""Workers and hosts that fall silent (SIGSTOP), in phases where all workers meet: who is blamed, and how soon."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import Script, wait_until
from joined_run import ADDRESS, JOINER

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import WorkerFailed
from manyhands.worker import current


def stop_on_1() -> None:
    if current().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


class Stopping(torch.optim.lr_scheduler.ConstantLR):
    """Its state is asked for in a checkpoint, after the first step."""

    def state_dict(self) -> dict[str, Any]:
        if self.last_epoch > 0:
            stop_on_1()
        return super().state_dict()


def model() -> torch.nn.Module:
    stop_on_1()
    return plain.mlp()


def evaluate(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    stop_on_1()
    return {"loss": plain.cross_entropy(model, batch)}


STOPS: dict[str, dict[str, Any]] = {
    "start": {"model": model},
    "validation": {"validation_data": plain.rows(12), "evaluate": evaluate},
    "checkpoint": {"schedule": lambda optimizer, total: Stopping(optimizer)},
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", STOPS)
def test_the_stopped_worker_is_blamed_in_phases_where_all_meet(phase: str, local: Local, tmp_path: Path) -> None:
    task = {
        "model": plain.mlp,
        "loss": plain.cross_entropy,
        "optimizer": plain.OPTIMIZERS["sgd"],
        "train_data": plain.rows(24),
        "batch_size": 12,
        **STOPS[phase],
    }
    with pytest.raises(WorkerFailed, match="worker 1 .* sent no heartbeat") as raised:
        mh.train(engine=local, workers=3, threads_per_worker=1, timeout_s=5.0, run_dir=tmp_path / "run", **task)
    assert (raised.value.rank, raised.value.phase) == (1, phase)


DRIVER = """
    import os
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.hosts.engine import Hosts

    class Hear(Observer):
        def event(self, event):
            print(event.type, event.rank, flush=True)

    def program(worker):
        worker.driver.progress("exchange", 3)
        worker.emit("here")
        while True:
            worker.group.barrier()

    engine = Hosts(local_workers=1)
    engine.announcer.say = lambda text: print(text.replace("\\n", " "), flush=True)
    engine.launch(program, LaunchSpec(workers=2, timeout_s=5, observer=Hear()))
"""


@pytest.mark.slow
def test_a_silent_host_is_called_silent_and_its_stacks_are_not_awaited(
    script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    driver = script(DRIVER)
    found = ADDRESS.search(driver.line())
    assert found
    joiner = script(JOINER, found[1], found[2])
    came: set[str] = set()
    while not {"here 0", "here 1"} <= came:
        came.add(line := driver.line())
        assert line, driver.end()
    for pid in joiner.processes():
        os.kill(pid, signal.SIGSTOP)
    code, _, err = driver.end(timeout_s=20)  # of which 5 are `timeout_s`; an answer was awaited for 23
    assert code == 1
    assert re.search(r"WorkerFailed: nothing came from host \S+ \(2\) for \d\.\d s", err)
    for pid in joiner.processes():  # a host that wakes up finds its driver gone, and leaves nothing
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not joiner.processes() and not driver.processes(), 10)
