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


@pytest.fixture(autouse=True)
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.pem"
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(path))
    return path


DRIVER = """
    import os, sys, time, threading
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.hosts.engine import Hosts

    class Hear(Observer):
        def event(self, event):
            print(event.type, event.rank, event.values["pid"], flush=True)

    def program(worker):
        worker.emit("pid", pid=os.getpid())
        while True:
            worker.group.barrier()
            time.sleep(0.01)  # leaves cores to the others

    engine = Hosts(local_workers=1)
    engine.announcer.say = lambda text: print(text.replace("\\n", " "), flush=True)
    engine.launch(program, LaunchSpec(workers=3, timeout_s=20, observer=Hear()))
"""

Start = Callable[..., Script]


@pytest.fixture
def both(script: Start) -> tuple[Script, Script, dict[int, int]]:
    """Driver and joiner in processes of their own, and the pids of the running workers."""
    driver = script(DRIVER)
    found = ADDRESS.search(driver.line())
    assert found
    joiner = script(JOINER, found[1], "2")
    pids: dict[int, int] = {}
    while len(pids) < 3:
        line = driver.line()
        assert line, driver.end()
        words = line.split()
        if words[:1] == ["pid"]:
            pids[int(words[1])] = int(words[2])
    return driver, joiner, pids


@pytest.mark.slow
def test_a_killed_host_is_named_and_nothing_is_left(both: tuple[Script, Script, dict[int, int]]) -> None:
    driver, joiner, _ = both
    os.kill(joiner.process.pid, signal.SIGKILL)
    code, _, err = driver.end(timeout_s=10)
    assert code == 1
    assert re.search(
        r"WorkerFailed: the driver lost worker 1 on \S+ \(2\) in phase \w+ at step 0: its host is gone", err
    )
    wait_until(lambda: not joiner.processes() and not driver.processes(), 5)


@pytest.mark.slow
def test_when_the_driver_is_killed_the_joined_host_ends(both: tuple[Script, Script, dict[int, int]]) -> None:
    driver, joiner, _ = both
    os.kill(driver.process.pid, signal.SIGKILL)
    code, _, err = joiner.end(timeout_s=10)
    assert code == 1
    assert "the driver at 127.0.0.1:" in err
    assert "is gone" in err
    wait_until(lambda: not joiner.processes() and not driver.processes(), 5)


@pytest.mark.slow
def test_a_killed_worker_there_is_named(both: tuple[Script, Script, dict[int, int]]) -> None:
    driver, joiner, pids = both
    os.kill(pids[2], signal.SIGKILL)
    code, _, err = driver.end(timeout_s=10)
    assert code == 1
    assert re.search(r"worker 2 on \S+ \(2\) was killed by signal 9", err)
    code, _, err = joiner.end(timeout_s=10)
    assert code == 1
    assert "failed: worker 2 on" in err
    wait_until(lambda: not joiner.processes() and not driver.processes(), 5)


COMMAND = "from manyhands.cli.commands import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["joined host", "driver"])
def test_sigterm_on_either_host_leaves_a_checkpoint_of_all_ranks_and_both_end_with_75(
    asked: str, script: Start, tmp_path: Path
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
    os.kill((driver if asked == "driver" else joiner).process.pid, signal.SIGTERM)
    code, _, err = driver.end(timeout_s=30)
    assert code == 75, err
    code, _, err = joiner.end(timeout_s=10)
    assert code == 75
    assert "asked to end (SIGTERM)" in err
    (saved,) = (tmp_path / "a/mine/checkpoints").glob("step-*")
    assert len(list(saved.glob("rank-*.safetensors"))) == 3
    assert list((tmp_path / "b").iterdir()) == []
    wait_until(lambda: not joiner.processes() and not driver.processes(), 5)
