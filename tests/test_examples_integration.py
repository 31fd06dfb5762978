"""The programs in examples/ run as they stand and learn; plain.py and gan.py are in own_loop/test_prepare_integration.py."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Hand, hands, slope
from sessions import need_spark

from manyhands.engines.local.engine import Local
from manyhands.own_loop.launch import run_script
from manyhands.strategies import strategy_of
from manyhands.testing.strategy_suite import checks_for

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOK = EXAMPLES / "notebook.ipynb"
TIMEOUT_S = 300.0
STARTERS = {
    "python": [sys.executable],
    "manyhands": [sys.executable, "-m", "manyhands", "run", "-n", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
}


@pytest.fixture(autouse=True)
def own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a file that a spec names is on sys.path from then on, and examples/plain.py is not tests/plain.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def printed(tmp_path: Path) -> Callable[..., str]:
    """`printed(starter, name, *arguments)`: standard output of an example in processes of its own, which must end well."""

    def run(starter: str, name: str, *arguments: str) -> str:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
        environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(tmp_path)}
        environment |= {"JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={tmp_path}"}
        done = subprocess.run(
            [*STARTERS[starter], str(EXAMPLES / name), *arguments],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{starter} {name} ended with {done.returncode}:\n{done.stderr[-12000:]}"
        return done.stdout

    return run


@pytest.fixture
def printed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`printed_here(name, *arguments)`: the same of an example in this process, which has torch already."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern: str, text: str) -> list[float]:
    """What the one group of the pattern matches, wherever it does."""
    return [float(found) for found in re.findall(pattern, text)]


# -- what is written about them ----------------------------------------------------------------------------------------


def test_the_page_of_the_examples_lists_all() -> None:
    """With a command that starts the one of its row, as each program says itself."""
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|.*\| `(.+?)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted([*(path.name for path in PROGRAMS), NOTEBOOK.name])
    for name, target, command in rows:
        assert (name, command.split()[-1]) == (target, f"examples/{name}")
    for path in PROGRAMS:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        said = " ".join(re.findall(r"^(?:python|torchrun|manyhands) .+", text, re.MULTILINE))
        assert f"python examples/{path.name}" in said or f"-n 2 examples/{path.name}" in said
        assert set(re.findall(r"examples/\w+\.py", said)) == {f"examples/{path.name}"}


# -- hugging_face.py ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("pretrained", "workers"),
    [pytest.param(True, 2, marks=pytest.mark.nightly), pytest.param(False, 1, marks=pytest.mark.slow)],
)
def test_hugging_face_knows_words_from_pretraining(
    pretrained: bool, workers: int, local: Local, capfd: pytest.CaptureFixture[str]
) -> None:
    """A guess is right in half of the sentences."""
    pytest.importorskip("transformers")
    arguments = [] if pretrained else ["--pretrain-epochs", "0"]
    script = EXAMPLES / "hugging_face.py"
    assert run_script(script, arguments, workers=workers, engine=local, threads_per_worker=1) == 0
    (labelled, others) = numbers(r": (\d+\.\d)%", capfd.readouterr().out)
    assert labelled > 80
    assert others > 95 if pretrained else others < 75


# -- custom_strategy.py ------------------------------------------------------------------------------------------------


def slowmo(options: str) -> Any:
    return strategy_of(f"{EXAMPLES / 'custom_strategy.py'}:SlowMo:{options}")


def test_the_strategy_of_ones_own_passes_the_suite() -> None:
    for check in checks_for(slowmo("period=3")).values():
        check(slowmo("period=3"))


def test_slow_momentum_by_hand() -> None:
    """Two workers whose parameter falls by 1 and by 3 in each step, so that the mean of two steps is 4 away."""

    def program(hand: Hand) -> list[float]:
        path = []
        for _ in range(6):
            hand.tick()
            path.append(float(hand.center))
        hand.finish()
        return path

    for path in hands(slowmo("period=2,rate=0.5,momentum=0.5"), [slope(1.0), slope(3.0)], program, rate=1.0):
        assert path == [0, -2, -2, -5, -5, -8.5]  # u: 4, 6, 7


@pytest.mark.slow
def test_custom_strategy_beside_others(printed_here: Callable[..., str]) -> None:
    lines = printed_here("custom_strategy.py", "--epochs", "1").splitlines()
    assert [line.split()[:2] for line in lines] == [["allreduce", "41"], ["local-sgd:period=16", "3"], ["slowmo", "3"]]
    assert min(numbers(r"(\d+\.\d)%", "\n".join(lines))) > 50  # a guess is right in a tenth


# -- several_gpus.py ---------------------------------------------------------------------------------------------------

GPUS = torch.cuda.device_count()


@pytest.mark.parametrize("gpus", [0, 1])
def test_too_few_gpus_are_said(gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["several_gpus.py"])
    assert run_script(EXAMPLES / "several_gpus.py", workers=1) == 2
    assert f"torch sees {gpus} here" in capsys.readouterr().err


@pytest.mark.slow
def test_several_gpus_without_gpus(local: Local, capfd: pytest.CaptureFixture[str]) -> None:
    """In float32, without autocast: two workers take one's steps."""
    arguments = ["--cpu", "--rows", "48", "--batch-size", "16", "--epochs", "2"]
    losses = []
    for workers in (1, 2):
        assert run_script(EXAMPLES / "several_gpus.py", arguments, workers=workers, engine=local) == 0
        losses.append(numbers(r"(\d\.\d\d) nats", capfd.readouterr().out))
    assert losses[0] == pytest.approx(losses[1], abs=0.011)
    assert losses[0][1] < losses[0][0]
    assert len(losses[0]) == 3


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("starter", ["manyhands", "torchrun"])
def test_several_gpus(starter: str, printed: Callable[..., str]) -> None:
    text = printed(starter, "several_gpus.py")
    assert text.count("on 2 workers, cuda") == 5
    assert numbers(r"test loss: (\d\.\d\d)", text)[0] < 3.0  # after none of its steps it is above 4.8


# -- the others --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keras_digits(printed_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    accuracy = numbers(r"accuracy: (\d\.\d+)", printed_here("keras_digits.py", "--epochs", "3", "--workers", "1"))
    assert accuracy[-1] > 0.8


@pytest.mark.slow
def test_word_vectors(printed_here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    random = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for topic in "abcd":  # each file has words of one topic alone
        lines = [" ".join(f"{topic}{i}" for i in random.integers(0, 12, 10)) for _ in range(400)]
        (folder / f"{topic}.txt").write_text("\n".join(lines))
    text = printed_here("word_vectors.py", "--text", str(folder), "--words", "a1,c2", "--epochs", "30")
    for word in ("a1", "c2"):
        neighbours = re.findall(r"([a-d])\d+ \d\.\d\d", text.split(f"\n{word}: ")[1].split("\n")[0])
        assert neighbours == [word[0]] * 5
    assert (tmp_path / "word_vectors.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "word_vectors.bin").read_bytes().startswith(b"48 100\n")

    for module in ("logging/__init__.py", "socket.py", "string.py", "threading.py"):  # of Python's own texts, a few
        (tmp_path / "stdlib" / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(sysconfig.get_path("stdlib")) / module, tmp_path / "stdlib" / module)
    places = sysconfig.get_path
    here = str(tmp_path / "stdlib")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *rest: here if name == "stdlib" else places(name, *rest))
    assert "hogwild on 2 workers" in printed_here("word_vectors.py", "--epochs", "1")


@pytest.mark.slow
def test_tars(printed_here: Callable[..., str]) -> None:
    text = printed_here("tars.py", "--epochs", "2")
    assert numbers(r"validation_accuracy (\d\.\d+)", text)[-1] > 0.8
    assert "2,594 rows" in text  # 1,297 digits in each of 2 epochs


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_spark_digits(printed: Callable[..., str]) -> None:
    need_spark()
    text = printed("python", "spark_digits.py")
    assert numbers(r"test accuracy: (\d+\.\d)%", text)[0] > 90
    assert "allreduce on 2 workers" in text


def test_the_notebook_is_stored_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    assert 6 <= len(cells) <= 10


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)
    runner = preprocessors.ExecutePreprocessor(timeout=TIMEOUT_S, kernel_name="python3")
    runner.preprocess(notebook, {"metadata": {"path": str(tmp_path)}})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    shown = [kind for output in outputs if "data" in output for kind in output.data]
    assert shown.count("image/png") == 2
    assert shown.count("text/html") == 3  # a run's summary, and two tables
    assert numbers(r"parameter: (\S+)", texts)[0] < 1e-3
    assert min(numbers(r"(0\.\d+|1\.0)", texts.split("largest")[0].split("test accuracy")[1])) > 0.9
