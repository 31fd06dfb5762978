"""Driver and joined host in processes of their own, which may be killed: who is named, and that nothing is left on either side."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_script import Script, wait_until
from joined_run import ADDRESS, JOINER

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials")]

DRIVER = """
    import time
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.hosts.engine import Hosts

    class Hear(Observer):
        def event(self, event):
            print(event.type, event.rank, flush=True)

    def program(worker):
        worker.emit("here")
        while True:
            worker.group.barrier()
            time.sleep(0.01)  # leaves cores to the others

    engine = Hosts(local_workers=1)
    engine.announcer.say = lambda text: print(text.replace("\\n", " "), flush=True)
    engine.launch(program, LaunchSpec(workers=3, timeout_s=20, observer=Hear()))
"""

Start = Callable[..., Script]
Both = tuple[Script, Script]


@pytest.fixture
def both(script: Start) -> Both:
    """Driver and joiner in processes of their own, once all workers run."""
    driver = script(DRIVER)
    found = ADDRESS.search(driver.line())
    assert found
    joiner = script(JOINER, found[1], "2")
    here: set[str] = set()
    while not {"here 0", "here 1", "here 2"} <= here:
        here.add(line := driver.line())
        assert line, driver.end()
    return driver, joiner


def test_a_killed_host_is_named_and_nothing_is_left(both: Both) -> None:
    driver, joiner = both
    os.kill(joiner.process.pid, signal.SIGKILL)
    code, _, err = driver.end()
    assert code == 1
    assert re.search(
        r"WorkerFailed: the driver lost worker 1 on \S+ \(2\) in phase \w+ at step 0: its host is gone", err
    )
    wait_until(lambda: not joiner.processes() and not driver.processes(), 10)


def test_when_the_driver_is_killed_the_joined_host_ends(both: Both) -> None:
    driver, joiner = both
    os.kill(driver.process.pid, signal.SIGKILL)
    code, _, err = joiner.end()
    assert code == 1
    assert "the driver at 127.0.0.1:" in err
    assert "is gone" in err
    wait_until(lambda: not joiner.processes() and not driver.processes(), 10)


COMMAND = "from manyhands.cli.commands import main; main()"


def test_sigterm_on_a_joined_host_leaves_a_checkpoint_of_all_ranks_and_both_end_with_75(
    script: Start, tmp_path: Path
) -> None:
    """The commands themselves, each in a folder of its own: the joined host does not see the run directory."""
    options = "-n 3 --local-workers 2 --epochs 100000 --threads-per-worker 1 --log json --run-dir mine --engine hosts"
    driver = script(f"import os\nos.makedirs('a')\nos.chdir('a')\n{COMMAND}", "train", "digits", *options.split())
    assert driver.process.stderr is not None
    while not (found := ADDRESS.search(line := driver.process.stderr.readline())):
        assert line
    joiner = script(f"import os\nos.makedirs('b')\nos.chdir('b')\n{COMMAND}", "join", found[1], "--workers", found[2])
    while '"type":"step"' not in (line := driver.line()):
        assert line
    os.kill(joiner.process.pid, signal.SIGTERM)
    code, _, err = driver.end()
    assert code == 75, err
    code, _, err = joiner.end()
    assert code == 75
    assert "asked to end (SIGTERM)" in err
    (saved,) = (tmp_path / "a/mine/checkpoints").glob("step-*")
    assert len(list(saved.glob("rank-*.safetensors"))) == 3
    assert list((tmp_path / "b").iterdir()) == []
    wait_until(lambda: not joiner.processes() and not driver.processes(), 10)
