"""`manyhands train --max-restarts`: a driver that was killed is started again; signals and exit codes pass through."""

import json
import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_script import Script, wait_until

import manyhands as mh
import plain
from manyhands.engines.driver import supervisor

slow = pytest.mark.slow
CHILD = """
    import json, os, signal, sys, time
    from manyhands.engines.driver import supervisor
    link = supervisor.link()
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Instead of the command, the program in the file `driver.py` runs, a light one."""
    path = tmp_path / "driver.py"
    begin, _ = supervisor._BOOTSTRAP.split("from manyhands")
    bootstrap = f"{begin}exec(open({str(path)!r}).read())"
    monkeypatch.setattr(supervisor, "_BOOTSTRAP", bootstrap)
    monkeypatch.setattr(supervisor, "command", ["manyhands", "train"])
    yield path
    assert not supervisor._link


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(CHILD) + textwrap.dedent(text))


def test_an_exit_code_is_passed_on_and_no_more_drivers_are_started_than_asked_for(
    drivers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for code in (0, 75):
        write(drivers, f"assert link.why == '' and sys.argv[1:] == ['train']; sys.exit({code})")
        assert supervisor.supervise(3, "runs/mine") == code
    # also where none lives long enough to report anything
    write(drivers, f"open({str(tmp_path / 'seen')!r}, 'a').write('x'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert supervisor.supervise(2, "runs/mine") == 1
    assert (tmp_path / "seen").read_text() == "xxx"
    assert "--resume --run-dir runs/mine" in capfd.readouterr().err


def test_a_driver_that_was_killed_is_started_again_with_what_it_reported(
    drivers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        drivers,
        f"""
        seen = open({str(tmp_path / "seen")!r}, "a")
        print(json.dumps([link.made, bool(link.why), link.port, sys.argv[1:]]), file=seen, flush=True)
        link.report(port=7000)
        if link.why:
            link.report(made=[*link.made, 8])
        if len(link.made) < 1 or not link.why:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert supervisor.supervise(3, "runs/mine") == 0
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    again = ["train", "--resume"]
    assert lines == [[[], False, None, ["train"]], [[], True, 7000, again], [[8], True, 7000, again]]
    assert "killed by signal 9 (SIGKILL)" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_whoever_asks_for_the_end_gets_it(number: signal.Signals, code: int, drivers: Path, tmp_path: Path) -> None:
    """Passed to the driver, and not started again, though the signal kills it."""
    write(
        drivers,
        f"""
        signal.signal({int(number)}, signal.SIG_DFL)
        open({str(tmp_path / "seen")!r}, "a").write("x")
        os.kill(os.getppid(), {int(number)})
        time.sleep(60)
        """,
    )
    assert supervisor.supervise(9, "runs/mine") == code
    assert (tmp_path / "seen").read_text() == "x"


def test_hosts_get_credentials_that_outlive_a_driver(
    drivers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    write(
        drivers,
        f"""
        path = os.environ["MANYHANDS_CREDENTIALS"]
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        open({str(tmp_path / "seen")!r}, "a").write(path + "\\n")
        if not link.why:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert supervisor.supervise(1, "runs/mine", hosts=True) == 0
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first == second
    assert not Path(first).parent.exists()


# -- the command itself ------------------------------------------------------------------------------------------------


COMMAND = "from manyhands.__main__ import main\nmain()"


def begun(script: Callable[..., Script], folder: Path, restarts: int, epochs: int) -> tuple[Script, int]:
    """`manyhands train` with a supervisor, of one worker, which is in the driver's process; and that process, once there is
    a checkpoint."""
    options = f"-n 1 --threads-per-worker 1 --epochs {epochs} --checkpoint-every 10 --max-restarts {restarts}"
    command = script(COMMAND, "train", "digits", "--run-dir", "run", *options.split())
    wait_until(lambda: any((folder / "run/checkpoints").glob("step-*[0-9]")), 90)
    pid = command.process.pid
    return command, int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@slow
def test_a_run_whose_driver_is_killed_goes_on_from_its_newest_checkpoint(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    command, driver = begun(script, tmp_path, restarts=1, epochs=3)
    assert "torch" not in Path(f"/proc/{command.process.pid}/maps").read_text()
    os.kill(driver, signal.SIGKILL)
    code, out, err = command.end(100)
    assert code == 0, err
    assert "restart 1 of 1" in err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [one["cause"] for one in result["restarts"]] == ["driver"]
    history = list(mh.read_history(tmp_path / "run"))
    assert [row["tick"] for row in history] == list(range(3 * 41))
    assert result["rows"]["total"] == 3 * 1297
    assert "restarts" in out
    wait_until(lambda: not command.processes(), 10)


@slow
def test_the_driver_ends_with_its_supervisor(script: Callable[..., Script], tmp_path: Path) -> None:
    """Nothing is started again, and no process is left."""
    command, _ = begun(script, tmp_path, restarts=3, epochs=1000)
    command.process.kill()
    command.end(100)
    wait_until(lambda: not command.processes(), 10)


# -- train() in a driver that was started again --------------------------------------------------------------------------


def train(tmp_path: Path, **options: Any) -> mh.Run:
    given = {"engine": "sim:faults=kill=1@step:9", "workers": 2, "run_dir": tmp_path / "run", **options}
    return mh.train(plain.task(epochs=4), **given)


def test_the_next_driver_knows_what_the_one_before_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two epochs of four are there. The fault does not happen again; the restart counts; the history is one."""
    with pytest.raises(mh.WorkerFailed):
        train(tmp_path)
    reports: list[dict[str, Any]] = []
    link = supervisor.DriverLink(made=[4], why="the driver was killed by signal 9 (SIGKILL)")
    monkeypatch.setattr(supervisor, "_link", link)
    monkeypatch.setattr(supervisor.DriverLink, "report", lambda self, **values: reports.append(values))
    run = train(tmp_path, survive="max_restarts=3", resume=True)
    assert reports == [{"made": [4, 8]}]
    assert [(one["step"], one["cause"]) for one in run.restarts] == [(8, "driver")]
    assert run.restarts[0]["message"].endswith("restart 2 of 3 from step 8")
    assert run.info["faults"] == {"kill=1@step:9": 1}
    assert run.generations == 2
    assert [row["tick"] for row in run.history] == list(range(16))
