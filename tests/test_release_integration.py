"""What `make wheel` builds: it holds what it should and nothing else, and trains where there is nothing but it."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

ROOT = Path(__file__).resolve().parents[1]
NAME = f"manyhands-{mh.__version__}"
DIRT = (
    ".venv/lib/module.py",
    "src/manyhands/__pycache__/module.cpython-311.pyc",
    ".mypy_cache/a.json",
    "runs/run/config.json",
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

pytestmark = pytest.mark.nightly


def run(*words: Any, cwd: Path) -> str:
    """Standard output of a program that ends well, and whose Python knows nothing of this tree."""
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    return run("git", "ls-files", "-z", cwd=ROOT).rstrip("\0").split("\0")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Gone in the end: an environment with torch is large."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def built(folder: Path, tracked: list[str]) -> Path:
    """The folder with the sdist, the wheel made of the sdist, and in `direct/` the wheel made of the tree."""
    tree = folder / "tree"
    for path in tracked:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    for path in DIRT:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text("left behind\n")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", tree, cwd=folder)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist/direct", tree, cwd=folder)
    shutil.rmtree(tree)
    return folder / "dist"


@pytest.mark.timeout(300)
def test_the_sdist_is_what_git_knows(built: Path, tracked: list[str]) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert names == {"PKG-INFO", *(path for path in tracked if not path.startswith(".ci/"))}


@pytest.mark.timeout(300)
def test_the_wheel_is_the_package_and_the_same_from_the_tree_as_from_the_sdist(built: Path, tracked: list[str]) -> None:
    wheels = [built / f"{NAME}-py3-none-any.whl", built / f"direct/{NAME}-py3-none-any.whl"]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        names = set(archive.namelist())
    about = {
        f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert names == about | {path.removeprefix("src/") for path in tracked if path.startswith("src/")}
    assert "manyhands/py.typed" in names


@pytest.mark.timeout(600)
def test_the_wheel_trains_in_an_environment_of_its_own(built: Path, folder: Path) -> None:
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, with_pip=True)
    python, command = environment / "bin/python", environment / "bin/manyhands"
    run(python, "-m", "pip", "install", "--quiet", built / f"{NAME}-py3-none-any.whl", cwd=elsewhere)
    run(python, "-m", "pip", "check", cwd=elsewhere)
    where = run(python, "-c", "import manyhands; print(manyhands.__file__)", cwd=elsewhere)
    assert Path(where).is_relative_to(environment)
    assert run(command, "--version", cwd=elsewhere).startswith(f"manyhands {mh.__version__}, ")
    trained = run(command, "train", "digits", "--workers", 2, "--max-steps", 4, cwd=elsewhere)
    assert "Advice:" in trained
