"""Whatever is killed, everything ends, and soon; and what a driver's process may be."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_script import Script, wait_until

pytestmark = pytest.mark.slow

# in each launch two shards and two workers, each with a child that is not a daemon of anybody's, until something is killed
WAITING = """
    import ctypes, itertools, multiprocessing.util, os, subprocess, sys, threading
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.local.engine import Local
    from manyhands.errors import WorkerFailed
    from manyhands.server.base import ServerSpec

    class Print(Observer):
        def answer(self, event):
            print(event.values["pid"], event.values["parent"])
            return {}

    def load(session):  # as a loader's process may: files of multiprocessing, a process in a session of its own
        multiprocessing.util.get_temp_dir()
        if session:
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        threading.Event().wait(60)

    def program(worker, session):
        multiprocessing.get_context("fork").Process(target=load, args=(session,)).start()
        worker.driver.progress("compute", 5)
        worker.ask("there", pid=os.getpid(), parent=os.getppid())
        if "hold" in sys.argv:  # the interpreter's lock: no thread of this process can act
            ctypes.PyDLL(None).sleep(60)
        threading.Event().wait(60)

    plan = LaunchSpec(workers=2, server=ServerSpec(rule="add"), servers=2, observer=Print())
    with Local() as local:
        for number in itertools.count():
            try:
                local.launch(lambda worker: program(worker, session=number == 0), plan)
            except (KeyboardInterrupt, WorkerFailed) as error:
                print(repr(str(error)))
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Neither files nor folders of ours, or of multiprocessing's, in each test's own folder for temporary ones."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    yield
    left = [path.name for path in (tmp_path / "tmp").iterdir()]  # where torch's compiler keeps a cache, too
    assert [name for name in left if name.startswith(("manyhands", "pymp"))] == []


def workers_of(run: Script, processes: int = 8) -> tuple[int, int]:
    """(a worker, the fork server), once both workers, their children and the shards are there; of the first launch, two more."""
    (worker, server), _ = ([int(pid) for pid in run.line().split()] for _ in range(2))
    wait_until(lambda: len(run.processes()) == processes)
    return worker, server


def test_driver_killed(script: Callable[..., Script]) -> None:
    """CASE 28: also what loaders leave in sessions of their own, and workers of which no thread can act."""
    run = script(WAITING, "hold")
    workers_of(run, 10)
    run.process.kill()
    wait_until(lambda: not run.processes())


def test_driver_killed_while_the_server_loads(script: Callable[..., Script]) -> None:
    """CASE 28: a server that imports torch looks at nothing else."""
    run = script(WAITING)
    wait_until(lambda: len(run.processes()) == 2)
    run.process.kill()
    wait_until(lambda: not run.processes())


def test_whatever_else_is_killed_the_next_launch_works(script: Callable[..., Script]) -> None:
    """CASES 21, 22, 28: what loaders leave in sessions of their own is gone, too; the workers print nothing. The fork server holds
    no descriptor of a run: with one, the end of a connection would not mean the death of its owner."""
    run = script(WAITING)
    worker, server = workers_of(run, 10)
    held = len(os.listdir(f"/proc/{server}/fd"))
    os.kill(worker, signal.SIGKILL)
    told = run.line()
    assert "was killed by signal 9 (SIGKILL" in told
    assert "in phase compute at step 5" in told
    _, server = workers_of(run)
    assert len(os.listdir(f"/proc/{server}/fd")) == held
    os.kill(server, signal.SIGKILL)
    assert re.search(r"the process that starts the workers on \S+ was killed by signal 9 \(SIGKILL\)", run.line())
    workers_of(run)
    os.killpg(run.process.pid, signal.SIGINT)  # to the driver's process group, as a terminal sends it
    assert run.line() == "''"
    worker, server = workers_of(run)
    for pid in (worker, server):  # a scheduler's SIGTERM: the driver decides what becomes of the workers
        os.kill(pid, signal.SIGTERM)
    assert len(run.processes()) == 8
    os.kill(run.process.pid, signal.SIGTERM)
    wait_until(lambda: not run.processes())
    assert run.end() == (-signal.SIGTERM, "", "")


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


def test_many_workers_with_closed_standard_descriptors_at_a_low_limit(script: Callable[..., Script]) -> None:
    run = script("""
        import os, resource, sys
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        for fd in (0, 1):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        values = Local().launch(lambda worker: print("a line") or worker.group.all_gather_json(1), LaunchSpec(workers=16))
        sys.stderr.write(f"{sum(map(sum, values))} {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}")
        os._exit(0)
    """)
    assert run.end() == (0, "", "256 64")
