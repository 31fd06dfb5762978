"""Whatever is killed, everything ends, and soon; and what a driver's process may be."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_script import Script, wait_until

pytestmark = pytest.mark.slow

# two workers, each with a child that is not a daemon of anybody's, until something is killed
WAITING = """
    import ctypes, multiprocessing.util, os, subprocess, sys, threading
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.local.engine import Local

    class Print(Observer):
        def answer(self, event):
            print(event.values["pid"], os.getpid(), event.values["parent"])
            return {}

    def load(session):  # as a loader's process may: files of multiprocessing, a process in a session of its own
        multiprocessing.util.get_temp_dir()
        if session:
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        threading.Event().wait(60)

    def program(worker):
        multiprocessing.get_context("fork").Process(target=load, args=("session" in sys.argv,)).start()
        worker.driver.progress("compute", 5)
        worker.ask("there", pid=os.getpid(), parent=os.getppid())
        if "hold" in sys.argv:  # the interpreter's lock: no thread of this process can act
            ctypes.PyDLL(None).sleep(60)
        threading.Event().wait(60)

    Local().launch(program, LaunchSpec(workers=2, observer=Print()))
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Neither files nor folders of ours, or of multiprocessing's, in each test's own folder for temporary ones."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    yield
    left = [path.name for path in (tmp_path / "tmp").iterdir()]  # where torch's compiler keeps a cache, too
    assert [name for name in left if name.startswith(("manyhands", "pymp"))] == []


def running(script: Callable[..., Script], *arguments: str) -> tuple[Script, int, int]:
    """(the driver's script, a worker, the fork server), once both workers and their children are there."""
    run = script(WAITING, *arguments)
    pids = [int(pid) for _ in range(2) for pid in run.line().split()]
    wait_until(lambda: len(run.processes()) == (8 if "session" in arguments else 6))
    return run, pids[0], pids[2]


def ended(run: Script) -> tuple[int, str]:
    """(exit code, standard error), once no process is left."""
    wait_until(lambda: len(run.processes()) == 0)
    code, _, err = run.end()
    return code, err


def test_driver_killed(script: Callable[..., Script]) -> None:
    """CASE 28: also what loaders leave in sessions of their own, and workers of which no thread can act."""
    run, _, _ = running(script, "hold", "session")
    run.process.kill()
    wait_until(lambda: not run.processes())


def test_driver_killed_while_the_server_loads(script: Callable[..., Script]) -> None:
    """CASE 28: a server that imports torch looks at nothing else."""
    run = script(WAITING)
    wait_until(lambda: len(run.processes()) == 2)
    run.process.kill()
    wait_until(lambda: not run.processes())


def test_fork_server_killed(script: Callable[..., Script]) -> None:
    """CASE 28."""
    run, _, server = running(script)
    os.kill(server, signal.SIGKILL)
    code, err = ended(run)
    assert code == 1
    assert re.search(r"the process that starts the workers on \S+ was killed by signal 9 \(SIGKILL\)", err)


def test_worker_killed(script: Callable[..., Script]) -> None:
    """CASES 21, 28: what its loaders leave in sessions of their own is gone, too."""
    run, worker, _ = running(script, "session")
    os.kill(worker, signal.SIGKILL)
    code, err = ended(run)
    assert code == 1
    assert "was killed by signal 9 (SIGKILL" in err
    assert "in phase compute at step 5" in err


def test_ctrl_c(script: Callable[..., Script]) -> None:
    """CASES 22, 28: the signal goes to the driver's process group, as a terminal sends it; the workers print nothing."""
    run, _, _ = running(script)
    os.killpg(run.process.pid, signal.SIGINT)
    code, err = ended(run)
    assert code == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_sigterm_to_all_reaches_only_the_driver(script: Callable[..., Script]) -> None:
    """A scheduler's SIGTERM: the driver decides what becomes of the workers."""
    run, worker, server = running(script)
    for pid in (worker, server):
        os.kill(pid, signal.SIGTERM)
    assert len(run.processes()) == 6
    os.kill(run.process.pid, signal.SIGTERM)
    code, err = ended(run)
    assert (code, err) == (-signal.SIGTERM, "")


def test_a_program_from_standard_input(script: Callable[..., Script]) -> None:
    """Without a guard: values of its own classes, loaders in workers, time that torch.compile takes (it is progress), and a
    worker that waits to share memory when it is ended: where it listens meanwhile is the run's own folder."""
    program = """
        import os, time
        from pathlib import Path
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        from manyhands.errors import WorkerFailed

        class Mine:
            def __init__(self, rank): self.rank = rank

        data = TensorDataset(torch.arange(40.0))

        def loads(worker):
            loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
            return sum(float(x.sum()) for (x,) in loader) + len(list(loader))

        def compiles(worker):
            def slow(graph, inputs):
                time.sleep(3.0)
                return graph.forward
            worker.driver.progress("user", 0)
            torch.compile(lambda x: x - 1, backend="eager")(torch.ones(1))  # imports what the compiler needs
            worker.driver.progress("compute", 1)
            return float(torch.compile(lambda x: x + 1, backend=slow)(torch.ones(1)))

        def waits(worker):
            if worker.rank == 0:
                worker.make_group([0, 1])
            deadline = time.monotonic() + 20
            while not list(Path(os.environ["TMPDIR"]).glob("**/manyhands-*/line")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise ValueError("it listens")

        with Local() as local:
            values = local.launch(lambda worker: Mine(worker.rank), LaunchSpec(workers=2))
            print([value.rank for value in values], [isinstance(value, Mine) for value in values])
            print(local.launch(loads, LaunchSpec(workers=2)))
            print(local.launch(compiles, LaunchSpec(workers=2, timeout_s=1.5)))
            try:
                local.launch(waits, LaunchSpec(workers=2))
            except WorkerFailed as error:
                print("it listens" in str(error))
    """
    run = script("", stdin=program)
    assert run.end() == (0, "[0, 1] [True, True]\n[790.0, 790.0]\n[2.0, 2.0]\nTrue\n", "")
    assert run.processes() == []


def test_with_closed_standard_descriptors(script: Callable[..., Script]) -> None:
    run = script("""
        import os, sys
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        for fd in (0, 1):
            os.close(fd)
        values = Local().launch(lambda worker: print("a line") or worker.group.all_gather_json(worker.rank), LaunchSpec(workers=2))
        sys.stderr.write(str(values))
        os._exit(0)
    """)
    assert run.end() == (0, "", "[[0, 1], [0, 1]]")
