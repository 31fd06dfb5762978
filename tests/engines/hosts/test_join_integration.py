"""Driver and joined host in processes of their own, which may be killed: who is named, and that nothing is left on either side."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_script import wait_until
from host_process import HostProcess, Say, agent, command
from joined_run import ADDRESS

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.hosts.engine import Hosts
from manyhands.errors import WorkerFailed
from manyhands.events import Event

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials")]
Process = Callable[..., HostProcess]
Both = tuple[HostProcess, HostProcess]


def meets(worker: Any) -> None:
    worker.group.barrier()
    worker.emit("all met")
    while True:
        worker.group.barrier()
        time.sleep(0.01)  # leaves cores to the others


def driver(say: Say) -> None:
    """Of a run that does not end by itself, with one worker here and two that join."""

    class Hear(Observer):
        def event(self, event: Event) -> None:
            say(f"event {event.type}")

    engine = Hosts(local_workers=1)
    engine.announcer.say = say
    try:
        engine.launch(meets, LaunchSpec(workers=3, timeout_s=20, observer=Hear()))
    except WorkerFailed as error:
        say(str(error))
        raise SystemExit(error.exit_code) from None


@pytest.fixture
def both(process: Process) -> Both:
    """Once all workers run."""
    first = process(driver)
    found = ADDRESS.search(first.until("manyhands join"))
    assert found
    second = process(agent, found[1], 2)
    first.until("event all met")
    return first, second


def test_a_killed_host_is_named_and_nothing_is_left(both: Both) -> None:
    first, second = both
    os.kill(second.pid, signal.SIGKILL)
    code, said = first.end()
    assert code == 1
    assert re.search(r"the driver lost worker 1 on \S+ \(2\) in phase \w+ at step 0: its host is gone", said)
    wait_until(lambda: not first.processes() and not second.processes(), 10)


def test_when_the_driver_is_killed_the_joined_host_ends(both: Both) -> None:
    first, second = both
    os.kill(first.pid, signal.SIGKILL)
    code, said = second.end()
    assert code == 1
    assert "the driver at 127.0.0.1:" in said
    assert "is gone" in said
    wait_until(lambda: not first.processes() and not second.processes(), 10)


def test_sigterm_on_a_joined_host_leaves_a_checkpoint_of_all_ranks_and_both_end_with_75(
    process: Process, tmp_path: Path
) -> None:
    """The commands themselves, each in a folder of its own: the joined host does not see the run directory."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    options = "-n 3 --local-workers 2 --epochs 100000 --threads-per-worker 1 --log json --run-dir mine --engine hosts"
    first = process(command, here, "train", "digits", *options.split())
    found = ADDRESS.search(first.until("manyhands join"))
    assert found
    second = process(command, there, "join", found[1], "--workers", found[2])
    first.until('"type":"step"')
    os.kill(second.pid, signal.SIGTERM)
    code, said = first.end()
    assert code == 75, said
    code, said = second.end()
    assert code == 75
    assert "asked to end (SIGTERM)" in said
    (saved,) = (here / "mine/checkpoints").glob("step-*")
    assert len(list(saved.glob("rank-*.safetensors"))) == 3
    assert list(there.iterdir()) == []
    wait_until(lambda: not first.processes() and not second.processes(), 10)
