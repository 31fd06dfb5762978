import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driver_script import wait_until

from manyhands.engines.local.engine import Local
from manyhands.engines.roles import Roles
from manyhands.errors import BadInput, UnknownName, WorkerFailed
from manyhands.own_loop.launch import launch, launched_strategy, run_script
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.worker import current


@pytest.fixture(autouse=True)
def no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_STRATEGY", raising=False)


def place() -> tuple[int, int]:
    worker = current()
    assert worker is not None
    return worker.rank, worker.size


@pytest.mark.parametrize(("workers", "strategy"), [(1, None), (2, LocalSGD(period=8))])
def test_launch_returns_every_ranks_value_and_says_the_strategy_inside(
    local: Local, workers: int, strategy: LocalSGD | None
) -> None:
    inside = lambda a, b: (place(), a + b, launched_strategy())  # noqa: E731
    values = launch(inside, 1, 2, workers=workers, strategy=strategy, engine=local)
    assert values == [((rank, workers), 3, strategy) for rank in range(workers)]
    assert launched_strategy() is None


def test_what_cannot_be_launched(local: Local) -> None:
    with pytest.raises(BadInput, match="workers must be a whole number of at least 1, not 0"):
        launch(place, workers=0, engine=local)
    with pytest.raises(UnknownName, match="no engine 'multiprocessing'.*is 'local' here"):
        launch(place, engine="multiprocessing")
    with pytest.raises(BadInput, match=r"no script 'missing\.py'"):
        run_script("missing.py", workers=2, engine=local)


SCRIPT = """
    import os, sys
    import torch
    from helper_beside_the_script import NAME
    from manyhands.worker import current
    rank = current().rank
    print(NAME, __name__, sys.argv[1:], os.environ["MANYHANDS_STRATEGY"], flush=True)
    torch.save(rank, f"saved{rank}")
    class InMain: pass
    current().group.barrier()  # who exits with an error ends the others
    sys.exit(eval(sys.argv[2]))
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper_beside_the_script.py").write_text("NAME = 'helper'\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "script.py"


@pytest.mark.parametrize(
    ("workers", "argument", "code"), [(1, "0", 0), (1, "'a text'", 1), (2, "'a text'", 1), (2, "7 * rank", 7)]
)
def test_a_script_runs_as_main_the_first_rank_alone_is_heard_and_exit_codes_come_through(
    local: Local, path: Path, workers: int, argument: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_script(path, ["a", argument], workers=workers, strategy="allreduce", engine=local) == code
    out, err = capfd.readouterr()
    assert out == f"helper __main__ {['a', argument]} allreduce\n"
    assert err.count("nothing to standard output") == workers - 1
    assert ("a text" in err) == ("text" in argument)
    assert sorted(name for name in os.listdir() if name.startswith("saved")) == ["saved0", "saved1"][:workers]


APART = """
import torch
m = torch.nn.Linear(3, 1)
o = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(5):
    m(torch.ones(4, 3)).sum().backward()
    o.step()
"""


def test_workers_that_train_all_rows_are_named(local: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once, on standard error; the same of a loader that was not given: test_first_step_checks.py."""
    (tmp_path / "apart.py").write_text(APART)
    assert run_script(tmp_path / "apart.py", workers=2, engine=local) == 0
    assert capfd.readouterr().err.count("without exchanging anything") == 1


OWN_HANDLER = """
import os, pathlib, signal, sys, time
import manyhands as mh

def save(number, frame):
    pathlib.Path(sys.argv[1], f"saved-{mh.worker().rank}").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
os.mkfifo(os.path.join(sys.argv[1], f"ready-{mh.worker().rank}"))
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_sigterm_reaches_the_script_on_every_worker(tmp_path: Path) -> None:
    """A script that saves its work on SIGTERM can do so, as under `python script.py`."""
    (tmp_path / "script.py").write_text(OWN_HANDLER)
    command = [sys.executable, "-m", "manyhands", "run", "-n", "2", "script.py", str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob("ready-*"))) == 2, 60.0)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 75, error
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.slow
def test_threads_and_exit_functions_of_a_script_finish(local: Local, tmp_path: Path) -> None:
    """As the interpreter ends them: a thread that still saves is waited for, then atexit runs; also after an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, pathlib, sys, threading, time\nimport manyhands as mh\n"
        "place = pathlib.Path(sys.argv[1])\nrank = mh.worker().rank\n"
        "def save():\n    time.sleep(0.2)\n    (place / f'thread-{rank}').touch()\n"
        "atexit.register(lambda: (place / f'exit-{rank}-{(place / f\"thread-{rank}\").exists()}').touch())\n"
        "threading.Thread(target=save).start()\n"
        "if len(sys.argv) > 2: sys.exit(3)\n"
    )
    assert run_script(script, [str(tmp_path)], workers=2, engine=local) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"thread-0", "thread-1", "exit-0-True", "exit-1-True"}
    for path in [*tmp_path.glob("thread-*"), *tmp_path.glob("exit-*")]:
        path.unlink()
    assert run_script(script, [str(tmp_path), "fail"], workers=1, engine=local) == 3
    assert run_script(script, [str(tmp_path), "fail"], workers=2, engine=local) == 3
    assert {path.name for path in tmp_path.iterdir()} >= {"thread-0", "exit-0-True"}


ENDLESS = """
import threading
threading.Thread(target=threading.Event().wait).start()
"""


def test_a_thread_without_end_hides_no_error_and_holds_up_no_value(local: Local, tmp_path: Path) -> None:
    """The interpreter would print the error before it waits for the thread."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS + "raise RuntimeError('to be read at once')\n")
    with pytest.raises(WorkerFailed, match="to be read at once"):
        run_script(script, workers=2, engine=local)
    assert launch(lambda: exec(ENDLESS, {}), workers=2, engine=local) == [None, None]


OF_A_CLUSTER = """
import json, os, sys, threading
place = json.loads(os.environ["TF_CONFIG"])["task"]
print(place["type"], place["index"], os.environ.get("RANK"), sys.argv[1:], flush=True)
if place["type"] == "ps":
    threading.Event().wait(100)
sys.exit(7 if sys.argv[1] == "fail" and place["index"] == 1 else 0)
"""


def test_a_script_with_roles_finds_its_cluster_and_all_are_heard(
    local: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(OF_A_CLUSTER)
    roles = Roles(workers=2, others={"ps": 1})
    for argument, code in (("well", 0), ("fail", 7)):
        assert run_script(tmp_path / "script.py", [argument], engine=local, roles=roles) == code
        result = set(capfd.readouterr().out.splitlines())
        assert result <= {f"worker 0 0 ['{argument}']", f"worker 1 1 ['{argument}']", f"ps 0 None ['{argument}']"}
        assert f"worker 1 1 ['{argument}']" in result
        assert code or len(result) >= 2
