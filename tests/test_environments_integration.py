"""Where people run it: scripts, stdin, notebooks, containers, odd folders; and what is left when it ends, however it ends.

Every program here is a process of its own with a home, a temporary folder and a working folder of its own, and afterwards
no process of it lives. What the engine alone shows is in tests/engines; this is whole runs of `train` and of the command.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_script import MARK, MarkedProcess, wait_until

from control_groups import limited

SOURCE = Path(__file__).resolve().parents[1] / "src"
COMMAND = [sys.executable, "-c", "import manyhands.cli.commands; manyhands.cli.commands.main()"]
DEADLINE_S = 100.0

PROGRAM = """
    import os
    import torch
    import manyhands as mh

    run = mh.train(
        model=lambda: torch.nn.Linear({features}, {outputs}),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=torch.ones({rows}, {features}), batch_size={rows} // 4, epochs={epochs}, workers=2,
        callbacks=[{callbacks}],
    )
    print(run.steps, run.rows["workers"])
"""
SMALL = {"features": 4, "outputs": 1, "rows": 16, "epochs": 2, "callbacks": ""}
SCRIPT = PROGRAM.format(**SMALL)
SAYS = "8 [16, 16]\n"
BIG = PROGRAM.format(**SMALL | {"features": 4000, "outputs": 5000, "rows": 8, "epochs": 1})
KILL = "type('Kill', (mh.Callback,), {'on_step': lambda self, event: os.kill(os.getpid(), 9)})()"
ENDS = PROGRAM.format(**SMALL | {"epochs": 10**6, "callbacks": KILL})

TASK = """
    import torch
    import manyhands as mh

    def task(width: int = 1) -> mh.Task:
        return mh.Task(
            model=lambda: torch.nn.Linear(4, width),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            train_data=torch.arange(64.0).reshape(16, 4) / 64,
            batch_size=4,
            epochs=2,
        )
"""


class Place(MarkedProcess):
    """Folders of its own, and the processes started in them, found by a mark in their environment."""

    def __init__(self, root: Path) -> None:
        self.root, self.mark, self.started = root, uuid.uuid4().hex, list[subprocess.Popen[str]]()
        self.work, self.home, self.temporary = (root / name for name in ("work", "home", "temporary"))
        for folder in (self.work, self.home, self.temporary):
            folder.mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        own = {MARK: self.mark, "HOME": str(self.home), "TMPDIR": str(self.temporary), "PYTHONPATH": str(SOURCE)}
        return os.environ | own | {"PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, name: str, text: str) -> Path:
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *words: Any, stdin: Any = subprocess.DEVNULL, cwd: Path | None = None) -> subprocess.Popen[str]:
        """In a process group of its own, as a terminal starts a command."""
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.work,
            env=self.environment,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: Any, **options: Any) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        return end(self.start(*words, **options))

    def left(self) -> list[str]:
        """Files (torch makes an empty folder for its compiler) that a program left behind in its home, in its temporary folder and beside itself."""
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if not p.is_dir())


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Afterwards nothing that was started here lives."""
    made = Place(tmp_path / "place")
    yield made
    survivors = made.processes()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    for process in made.started:
        process.communicate(timeout=10)
    assert not survivors


# Scripts and notebooks


@pytest.mark.slow
def test_a_script_from_standard_input_without_a_guard(place: Place) -> None:
    path = place.write("script.py", SCRIPT)
    with path.open() as text:
        assert place.run(sys.executable, "-", stdin=text) == (0, SAYS, "")
    assert place.left() == ["work/script.py"]


CELL = """
{script}
print(open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read().split())
run
"""


@pytest.mark.slow
def test_a_notebook_trains_twice_and_keeps_no_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE 28: the functions are lambdas of the cell; its output ends with the run, shown as its summary."""
    nbformat = pytest.importorskip("nbformat")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    cell = CELL.format(script=textwrap.dedent(SCRIPT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for _ in range(2)])
    runner = preprocessors.ExecutePreprocessor(timeout=DEADLINE_S, kernel_name="python3")
    runner.preprocess(notebook, {"metadata": {"path": str(place.work)}})
    for done in notebook.cells:
        printed = "".join(output.text for output in done.outputs if output.output_type == "stream")
        shown = [output.data["text/html"] for output in done.outputs if output.output_type == "execute_result"]
        assert printed == f"{SAYS}[]\n"
        assert len(shown) == 1
        assert "allreduce on 2 workers" in shown[0]
        assert "Advice" in shown[0]


# Containers


def namespace(place: Place, mounts: list[str], command: str) -> tuple[int, str, str]:
    """Run a shell command after mounts that nothing outside sees; skips where they are not permitted."""
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare (util-linux)")
    private = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    setup = "set -e\n" + "\n".join(mounts)
    code, _, err = place.run(*private, "sh", "-c", setup)
    if code != 0:
        pytest.skip(f"private mounts are not permitted here: {err.strip()}")
    return place.run(*private, "sh", "-c", f"{setup}\n{command}")


@pytest.mark.slow
def test_nothing_is_written_where_nothing_can_be(place: Place) -> None:
    """run_dir=None needs no folder, and what two workers share, 320 MB, is not in the 64 MB of a container's /dev/shm.
    Torch will not start without a folder for temporary files, which stays empty but for torch's own."""
    path = place.write("script.py", BIG)
    folders = ["/tmp", "/dev/shm", place.work, place.home]
    readonly = [f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in folders]
    mounts = [*readonly, "mount -o remount,bind,ro /", f"mount -t tmpfs tmpfs {place.temporary}"]
    tried = "; ".join(f"touch {folder}/x 2>/dev/null && echo {folder}" for folder in folders)
    show = f"find {place.temporary} -mindepth 1 -not -name 'torchinductor_*'; {tried}; true"
    command = shlex.join([sys.executable, str(path)])
    assert namespace(place, mounts, f"{command}; {show}") == (0, "4 [4, 4]\n", "")


@pytest.fixture
def one_core() -> Iterator[Path]:
    """A control group that may use one core."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only: a quota of one changes nothing")
    try:
        with limited(1) as group:
            yield group
    except OSError as error:
        pytest.skip(f"no CPU quota can be set here: {error}")


@pytest.mark.slow
def test_a_cpu_quota_is_the_number_of_cores(place: Place, one_core: Path) -> None:
    command = shlex.join([*COMMAND, "train", "digits", "--workers", "1", "--max-steps", "1", "--run-dir", "run"])
    ended, _, err = place.run("sh", "-c", f"echo $$ > {one_core}/cgroup.procs && exec {command}")
    assert ended == 0, err
    assert json.loads((place.work / "run" / "result.json").read_text())["info"]["threads"] == 1
    wait_until(lambda: not (one_core / "cgroup.procs").read_text(), timeout_s=5)


# The command


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["type"] == kind]


@pytest.mark.slow
def test_two_commands_at_once_do_not_meet(place: Place) -> None:
    """CASE 23: started in the same second in the same folder, each has its own directory, events and result."""
    place.write("my_module.py", TASK)
    same_second = f"import time; time.strftime = lambda *_: 'now'; {COMMAND[-1]}"
    words = [sys.executable, "-c", same_second, "train", "my_module.py:task", "--workers", "1", "--seed"]
    both = [place.start(*words, seed) for seed in (1, 2)]
    for process in both:
        code, _, err = end(process)
        assert (code, err) == (0, "")
    folders = sorted((place.work / "runs").iterdir())
    assert len(folders) == 2
    assert [len(events(folder, "step")) for folder in folders] == [8, 8]
    first, second = ([event["values"]["loss"] for event in events(folder, "step")] for folder in folders)
    assert sorted(first) != sorted(second)


# However it ends


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_driver(place: Place) -> None:
    """CASES 22, 28; other ends are in the tests around."""
    path = place.write("ends.py", ENDS)
    before = shared_memory()
    assert place.run(sys.executable, path)[:2] == (-signal.SIGKILL, "")
    wait_until(lambda: not place.processes(), timeout_s=2)
    assert place.left() == ["work/ends.py"]
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    """Names in /dev/shm that could be ours or torch's."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("manyhands", "torch", "psm", "sem"))}


def started(place: Place, words: list[Any], folder: Path) -> subprocess.Popen[str]:
    """The command, training until it is stopped; returns once it has made a step."""
    process = place.start(*words)
    wait_until(lambda: events(folder, "step") or process.poll() is not None, DEADLINE_S)
    assert process.poll() is None, process.communicate(timeout=10)
    return process


@pytest.mark.slow
def test_ctrl_c(place: Place) -> None:
    """CASES 22, 28: the signal reaches the whole process group, as a terminal sends it."""
    words = [*COMMAND, "train", "digits", "--workers", "2", "--epochs", "10000", "--validate-every", "1000000"]
    process = started(place, [*words, "--run-dir", "run"], place.work / "run")
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = end(process)
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert err.startswith("manyhands: interrupted; there is no checkpoint in ")
    wait_until(lambda: not place.processes(), timeout_s=began + 5 - time.monotonic())
    assert {name.split("/")[1] for name in place.left()} == {"run"}


@pytest.mark.slow
def test_sigterm_and_resume_of_a_users_file_in_a_folder_of_many_odd_characters(place: Place) -> None:
    """CASE 19's way of being interrupted: a checkpoint is written, and `--resume` goes on with the step after it."""
    folder = place.work / "läufe und 実行" / ("a long name " * 12).strip() / ("viele Hände " * 8).strip()
    assert len(str(folder)) > 200
    place.write("my_module.py", TASK)
    words = [*COMMAND, "train", "my_module.py:task:width=3", "--workers", "2", "--epochs", "10000", "--run-dir", folder]
    process = started(place, [*words, "--checkpoint-every", "1000000"], folder)
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, out) == (75, "")
    assert err.startswith("manyhands: stopped at step")
    assert "--resume" in err
    assert not place.processes()
    (saved,) = (folder / "checkpoints").iterdir()
    tick = json.loads((saved / "manifest.json").read_text())["tick"]
    code, out, err = place.run(*words, "--max-steps", str(tick + 2), "--resume")
    assert code == 0
    assert re.fullmatch(r"resume: the run in .* goes on from step \d+\n", err), err
    assert " ".join(str(folder.relative_to(place.work)).split()) in " ".join(out.split())
    steps = sorted((event["tick"], event["rank"]) for event in events(folder, "step"))
    assert steps == [(number, rank) for number in range(tick + 2) for rank in (0, 1)]
    assert json.loads((folder / "result.json").read_text())["steps"] == tick + 2
