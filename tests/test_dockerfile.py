"""The Dockerfile says what the repository has: its sources, extras, command and Python; a daemon builds it where one is."""

import re
import shlex
import shutil
import subprocess
import tomllib
import uuid
from fnmatch import fnmatch

import pytest

from dockerfile import ROOT, instructions, last, pairs

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOOLS["project"]


def copied() -> list[str]:
    """What comes from the repository, not from another stage."""
    copies = [shlex.split(rest) for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    return [source for *sources, _ in copies for source in sources]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*"
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert sorted(copied()) == sorted(kept)
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_the_wheel_is_made_of_what_it_copies() -> None:
    build = TOOLS["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", *build["only-include"]]
    assert [name for name in needed if not any(fnmatch(name, f"{one}*") for one in copied())] == []


def test_extras_and_torch_are_those_of_the_project() -> None:
    assert set(pairs("ARG")["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    torch = next(one for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert f"'{torch}'" in next(rest for name, rest in instructions() if "TORCH_INDEX" in rest and name == "RUN")
    versions = re.findall(r"python:(\d+)\.(\d+)", " ".join(rest for name, rest in instructions() if name == "FROM"))
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert least is not None
    assert [tuple(map(int, one)) >= tuple(map(int, least.groups())) for one in versions] == [True, True]


def test_its_command_is_the_projects() -> None:
    assert last("ENTRYPOINT") == f'["{next(iter(PROJECT["scripts"]))}"]'
    assert last("USER") not in ("root", "0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_builds_and_trains() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("no docker daemon answers")
    image = f"manyhands-test-{uuid.uuid4().hex[:8]}"
    build = subprocess.run(["docker", "build", "--tag", image, str(ROOT)], capture_output=True, text=True, timeout=1500)
    assert build.returncode == 0, build.stderr
    try:
        command = ["docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/training:mode=1777", image]
        train = [*command, "train", "digits", "--workers", "2", "--max-steps", "2", "--run-dir", "run"]
        done = subprocess.run(train, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert "Advice: " in done.stdout
    finally:
        subprocess.run(["docker", "image", "rm", image], capture_output=True, timeout=60)
