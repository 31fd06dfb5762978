"""docs/containers.md as it stands: in namespaces that stand for containers, since no docker daemon is needed for them."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_script import wait_until
from two_hosts import ADDRESSES, TwoHosts, programs, two_hosts

from pages import CONTAINERS, FIRST_HOST, PAGES, ROOT, SECOND_HOST, snippets, write_scripts

STAND_IN = Path(__file__).with_name("docker_stand_in.py")
LIMITS = ["--rm", "--read-only", "--tmpfs", "/tmp"]
DEADLINE_S = 100.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which `docker` makes such containers, and the user is one without privileges; skips where it cannot make any."""
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("the containers have a /tmp of their own, and this Python lies in /tmp")
    path = programs(tmp_path / "bin", docker=f'exec {shlex.join([sys.executable, str(STAND_IN)])} "$@"', id="echo 1000")
    known = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
    tried = docker(known, tmp_path, "run", *LIMITS, "--cpus", "1", "--entrypoint", "python", "manyhands", "-c", "")
    if tried.wait(DEADLINE_S):
        pytest.skip(f"containers cannot be made here: {tried.communicate()[1].strip()}")
    tried.communicate()
    return known


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_lives_on() -> Iterator[None]:
    """Also where a test failed."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        process.wait(10)


def docker(environment: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    STARTED.append(subprocess.Popen(["docker", *words], env=environment, cwd=folder, start_new_session=True, **pipes))
    return STARTED[-1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder that the page's commands mount."""
    folder = tmp_path / "project"
    folder.mkdir()
    write_scripts(folder)
    (folder / "Dockerfile").write_bytes((ROOT / "Dockerfile").read_bytes())
    return folder


def blocks(how: str) -> list[str]:
    parts = [part for page in PAGES for part in snippets(page) if part.how == how]
    assert {part.page.name for part in parts} == {"containers.md"}
    return [part.text for part in parts]


@pytest.mark.nightly
def test_the_commands_of_one_host(environment: dict[str, str], project: Path) -> None:
    """Nothing is left in /dev/shm or /tmp: `docker` would end with an exit code of its own."""
    for block in blocks(CONTAINERS):
        done = subprocess.run(
            ["bash", "-ec", block], env=environment, cwd=project, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Advice: ") == block.count(" train ")
    results = [json.loads(path.read_text())["info"] for path in (project / "runs").glob("*/result.json")]
    assert [(one["workers"], one["threads"]) for one in results] == [(2, 1), (2, 1)]


@pytest.mark.nightly
def test_docker_stop(environment: dict[str, str], project: Path) -> None:
    """SIGTERM to process 1: a checkpoint and exit code 75; the same command goes on with --resume."""
    train = ["manyhands", "train", "digits", "--workers", "2", "--epochs", "10000", "--run-dir", "run"]
    words = ["run", *LIMITS, "--volume", f"{project}:/training", *train, "--checkpoint-every", "1000000"]
    process = docker(environment, project, *words)
    events = project / "run" / "events.jsonl"
    wait_until(lambda: process.poll() is not None or (events.exists() and '"step"' in events.read_text()), DEADLINE_S)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, err
    (saved,) = (project / "run" / "checkpoints").iterdir()
    tick = json.loads((saved / "manifest.json").read_text())["tick"]
    process = docker(environment, project, *words, "--resume", "--max-steps", str(tick + 2))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "Advice: " in out


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.mark.nightly
def test_containers_of_two_hosts_meet_at_published_ports(
    hosts: TwoHosts, environment: dict[str, str], project: Path, tmp_path: Path
) -> None:
    """The second host has no way to the first one's container but by its published ports."""
    (first,), (second,) = blocks(FIRST_HOST), blocks(SECOND_HOST)
    back = ["ip", "route", "add", "172.30.0.0/16", "via", ADDRESSES[1]]  # what NAT of outgoing connections does
    assert hosts.start(0, *back).communicate(timeout=10)[0] == ""
    assert "unreachable" in hosts.start(1, "ip", "route", "get", "172.30.0.2").communicate(timeout=10)[0]
    there = tmp_path / "there"
    there.mkdir()
    write_scripts(there)

    def begun(host: int, block: str, folder: Path) -> subprocess.Popen[str]:
        own = block.replace("10.0.0.1", ADDRESSES[0]).replace("10.0.0.2", ADDRESSES[1])
        STARTED.append(hosts.start(host, "bash", "-ec", own, env=environment, cwd=folder, start_new_session=True))
        return STARTED[-1]

    driver = begun(0, first, project)
    wait_until(lambda: driver.poll() is not None or (project / "run.pem").exists(), DEADLINE_S)
    joiner = begun(1, second, there)
    (there / "part").touch(0o600)
    (there / "part").write_bytes((project / "run.pem").read_bytes())
    (there / "part").rename(there / "run.pem")  # whole or not there
    output = driver.communicate(timeout=DEADLINE_S)[0]
    heard = joiner.communicate(timeout=DEADLINE_S)[0]
    assert (driver.returncode, joiner.returncode) == (0, 0), output + heard
    assert "workers that are here: 4 of 4" in output
    assert f"manyhands join {ADDRESSES[0]}:7000 --workers 2" in output
    assert "Advice: " in output
