"""The command from its first moments on: signals while it imports and while its workers start, and readers that go away."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_script import wait_until

SOURCE = str(Path(__file__).resolve().parents[1] / "src")


def command(folder: Path, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """`manyhands …` as a process group of its own; modules in `folder` come before all others."""
    return subprocess.Popen(
        [sys.executable, "-m", "manyhands", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{SOURCE}"},
        start_new_session=True,
        **more,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_signal_while_it_imports_ends_it_with_a_line(number: int, code: int, module: str, tmp_path: Path) -> None:
    """A stand-in for the module says when it is being imported, and never is. It sleeps for short times: a signal that comes
    just before a sleep begins is handled when the sleep ends."""
    (tmp_path / f"{module}.py").write_text(
        "import time\nprint('importing', flush=True)\nfor _ in range(6000): time.sleep(0.01)\n"
    )
    with command(tmp_path, "train", "digits") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert err.startswith("manyhands: ")
    assert "Traceback" not in err


@pytest.mark.slow
def test_sigterm_while_the_workers_of_a_script_start_is_not_swallowed(tmp_path: Path) -> None:
    """As soon as workers are there, whether or not their script has begun: before, it is 75, then what `python` does with it."""
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)\n")
    with command(tmp_path, "run", "-n", "2", "script.py") as process:
        wait_until(lambda: len(_grandchildren(process.pid)) == 2, 60)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode in (75, 128 + signal.SIGTERM), err
    assert "Traceback" not in err


def _grandchildren(pid: int) -> list[str]:
    def children(of: str) -> list[str]:
        try:
            return [pid for path in Path(f"/proc/{of}/task").glob("*/children") for pid in path.read_text().split()]
        except FileNotFoundError:
            return []

    return [grandchild for child in children(str(pid)) for grandchild in children(child)]


@pytest.mark.slow
def test_a_reader_that_takes_one_line_of_json_does_not_end_the_run(tmp_path: Path) -> None:
    options = "--workers 1 --threads-per-worker 1 --epochs 1 --log json --run-dir run"
    with command(tmp_path, "train", "digits", *options.split()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert '"type":"start"' in process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0, err
    assert err.count("reader of standard output has closed it") == 1
    assert "Advice" in err
    assert '"type":"end"' in (tmp_path / "run/events.jsonl").read_text().splitlines()[-1]
