"""Whatever is killed, everything ends, and soon."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_script import Script, wait_until

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
    """Neither in shared memory nor in the folder for temporary files, which is each test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = set(Path("/dev/shm").glob("*manyhands*"))
    yield
    assert set(Path("/dev/shm").glob("*manyhands*")) <= before
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [
        name for name in left if name.startswith(("manyhands", "pymp"))
    ] == []  # torch's compiler keeps a cache there


def running(script: Callable[..., Script], *arguments: str) -> tuple[Script, int, int]:
    """(the driver's script, a worker, the fork server), once both workers and their children are there."""
    run = script(WAITING, *arguments)
    pids = [int(pid) for _ in range(2) for pid in run.line().split()]
    wait_until(lambda: len(run.processes()) == (8 if "session" in arguments else 6))
    return run, pids[0], pids[2]


def ended(run: Script) -> tuple[int, str]:
    """(exit code, standard error), soon, and no process is left."""
    wait_until(lambda: len(run.processes()) == 0, timeout_s=3.0)
    code, _, err = run.end()
    return code, err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "hold"])
def test_driver_killed(script: Callable[..., Script], how: str) -> None:
    """CASE 28."""
    run, _, _ = running(script, how)
    run.process.kill()
    wait_until(lambda: not run.processes(), timeout_s=3.0)


@pytest.mark.slow
def test_driver_killed_while_the_server_loads(script: Callable[..., Script]) -> None:
    """CASE 28: a server that imports torch looks at nothing else."""
    run = script(WAITING)
    wait_until(lambda: len(run.processes()) == 2)
    run.process.kill()
    wait_until(lambda: not run.processes(), timeout_s=3.0)


@pytest.mark.slow
def test_what_loaders_leave_in_sessions_of_their_own_is_gone_when_the_driver_is_killed(
    script: Callable[..., Script],
) -> None:
    run, _, _ = running(script, "session")
    run.process.kill()
    wait_until(lambda: not run.processes(), timeout_s=3.0)


@pytest.mark.slow
def test_what_loaders_leave_in_sessions_of_their_own_is_gone_when_a_worker_is_killed(
    script: Callable[..., Script],
) -> None:
    run, worker, _ = running(script, "session")
    os.kill(worker, signal.SIGKILL)
    assert ended(run)[0] == 1


@pytest.mark.slow
def test_fork_server_killed(script: Callable[..., Script]) -> None:
    """CASE 28."""
    run, _, server = running(script)
    os.kill(server, signal.SIGKILL)
    code, err = ended(run)
    assert code == 1
    assert re.search(r"the process that starts the workers on \S+ was killed by signal 9 \(SIGKILL\)", err)


@pytest.mark.slow
def test_worker_killed(script: Callable[..., Script]) -> None:
    """CASES 21, 28."""
    run, worker, _ = running(script)
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    code, err = ended(run)
    assert code == 1
    assert "was killed by signal 9 (SIGKILL" in err
    assert "in phase compute at step 5" in err
    assert time.monotonic() - began < 2.0


@pytest.mark.slow
def test_ctrl_c(script: Callable[..., Script]) -> None:
    """CASES 22, 28: the signal goes to the driver's process group, as a terminal sends it; the workers print nothing."""
    run, _, _ = running(script)
    os.killpg(run.process.pid, signal.SIGINT)
    code, err = ended(run)
    assert code == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_sigterm_to_all_reaches_only_the_driver(script: Callable[..., Script]) -> None:
    """A scheduler's SIGTERM: the driver decides what becomes of the workers."""
    run, worker, server = running(script)
    for pid in (worker, server):
        os.kill(pid, signal.SIGTERM)
    assert len(run.processes()) == 6
    os.kill(run.process.pid, signal.SIGTERM)
    code, err = ended(run)
    assert (code, err) == (-signal.SIGTERM, "")


@pytest.mark.slow
def test_program_from_standard_input(script: Callable[..., Script]) -> None:
    program = """
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        class Mine:
            def __init__(self, rank): self.rank = rank
        values = Local().launch(lambda worker: Mine(worker.rank), LaunchSpec(workers=2))
        print([value.rank for value in values], [isinstance(value, Mine) for value in values])
    """
    assert script("", stdin=program).end() == (0, "[0, 1] [True, True]\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (0, 1)])
def test_with_closed_standard_descriptors(script: Callable[..., Script], closed: tuple[int, ...]) -> None:
    run = script(f"""
        import os, sys
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        for fd in {closed}:
            os.close(fd)
        values = Local().launch(lambda worker: print("a line") or worker.group.all_gather_json(worker.rank), LaunchSpec(workers=2))
        sys.stderr.write(str(values))
        os._exit(0)
    """)
    code, out, err = run.end()
    assert (code, err) == (0, "[[0, 1], [0, 1]]")
    assert out == ("" if 1 in closed else "a line\n" * 2)


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(script: Callable[..., Script]) -> None:
    """CASE 23."""
    text = """
        import sys
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        base = int(sys.argv[1])
        print(Local().launch(lambda worker: worker.group.all_gather_json(base + worker.rank), LaunchSpec(workers=2))[1])
    """
    first, second = script(text, "10"), script(text, "20")
    assert first.end() == (0, "[10, 11]\n", "")
    assert second.end() == (0, "[20, 21]\n", "")


@pytest.mark.slow
def test_loader_processes_of_a_worker(script: Callable[..., Script]) -> None:
    run = script("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        data = TensorDataset(torch.arange(40.0))
        def program(worker):
            loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
            return sum(float(x.sum()) for (x,) in loader) + len(list(loader))
        if 1:  # no guard
            print(Local().launch(program, LaunchSpec(workers=2)))
    """)
    assert run.end() == (0, "[790.0, 790.0]\n", "")
    assert run.processes() == []


@pytest.mark.slow
def test_torch_compile_counts_as_progress(script: Callable[..., Script]) -> None:
    run = script("""
        import sys, time
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        def program(worker):
            import torch
            def slow(graph, inputs):
                time.sleep(3.0)
                return graph.forward
            worker.driver.progress("user", 0)
            torch.compile(lambda x: x - 1, backend="eager")(torch.ones(1))  # imports what the compiler needs
            worker.driver.progress("compute", 1)
            return float(torch.compile(lambda x: x + 1, backend=slow)(torch.ones(1)))
        print(Local().launch(program, LaunchSpec(workers=2, timeout_s=1.5)))
    """)
    assert run.end() == (0, "[2.0, 2.0]\n", "")


@pytest.mark.slow
def test_a_worker_that_waits_to_share_memory_leaves_no_folder_when_it_is_ended(script: Callable[..., Script]) -> None:
    """Where it listens meanwhile is the run's own folder."""
    run = script("""
        import os, time
        from pathlib import Path
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local

        def program(worker):
            if worker.rank == 0:
                worker.make_group([0, 1])
            deadline = time.monotonic() + 20
            while not list(Path(os.environ["TMPDIR"]).glob("**/manyhands-*/line")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise ValueError("it listens")

        Local().launch(program, LaunchSpec(workers=2))
    """)
    code, _, err = run.end()
    assert code == 1
    assert "it listens" in err
