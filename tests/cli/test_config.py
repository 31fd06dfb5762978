"""`--config run.toml`, the file that `--print-config` writes, and what a shell completes."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import shellingham
from command_line import invoke, refused

from manyhands import tasks
from manyhands.cli import commands
from manyhands.cli.options import completing


def written(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


GOOD = """
task = "digits:width=3"   # a comment
workers = 2
max-seconds = 7
validate_every = 10
no_shuffle = true
tls = true
"""


def test_a_file_gives_options_and_the_command_line_overrides_them(tmp_path: Path, asked: dict[str, Any]) -> None:
    done = invoke("train", "--config", written(tmp_path, GOOD), "-n", "3")
    assert done.exit_code == 0, done.output
    assert asked["task"] == "digits:width=3"
    assert (asked["workers"], asked["max_seconds"], asked["validate_every"], asked["shuffle"]) == (3, 7.0, 10, False)
    assert invoke("train", "chars", "--config", written(tmp_path, GOOD)).exit_code == 0
    assert (asked["task"], asked["workers"]) == ("chars", 2)


def test_what_is_printed_is_read_as_the_same(tmp_path: Path, asked: dict[str, Any]) -> None:
    words = ["digits", "-n", "2", "--strategy", 'local-sgd:period="8"', "--epochs", "3", "--no-tls", "--run-dir", "a b"]
    printed = invoke("train", *words, "--print-config")
    assert printed.exit_code == 0
    assert not asked
    values = tomllib.loads(printed.stdout)
    assert (values["task"], values["workers"], values["tls"], values["epochs"]) == ("digits", 2, False, 3)
    invoke("train", *words)
    first = dict(asked)
    invoke("train", "--config", written(tmp_path, printed.stdout))
    for one in (first, asked):
        del one["callbacks"]
    assert asked == first


def test_every_option_is_in_the_file() -> None:
    printed, shown = invoke("train", "--print-config"), invoke("train", "--help").stdout
    names = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", shown)}
    names -= {"help", "config", "print_config", "debug", "no_tls", "network_latency"}
    found = set(re.findall(r"^#? ?([a-z_]+) =", printed.stdout, re.MULTILINE))
    assert {name for name in names if not any(name.startswith(one) or one.startswith(name) for one in found)} == set()


def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, asked: dict[str, Any]) -> None:
    unknown = r"line 2: no option 'worker' .did you mean 'workers'.*known are task, workers"
    for text, says in (
        ('task = "digits"\nworker = 2\n', unknown),
        ('task = "digits"\n\nepochs = "five"\n', "line 3: epochs must be a whole number, not 'five'"),
        ("epochs = 2.5\n", "line 1: epochs must be a whole number, not 2.5"),
        ("\nresume = 1\n", "line 2: resume must be true or false, not 1"),
        ("workers = [1, 2]\n", r"line 1: workers must be a text or a number, not \[1, 2\]"),
        ("[task]\nname = 1\n", "line 1: task must be a text"),
        ("task = digits\n", r"is not TOML: .*line 1"),
    ):
        done = invoke("train", "--config", written(tmp_path, text))
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        (line,) = done.stderr.splitlines()
        assert re.search(f"run.toml.*{says}", line), line
    refused("no.toml: No such file", "train", "--config", str(tmp_path / "no.toml"))
    assert not asked


def test_trackers_are_options(asked: dict[str, Any], tmp_path: Path) -> None:
    done = invoke("train", "digits", "--mlflow", "mine", "--wandb", "ours", "--tensorboard", str(tmp_path))
    if done.exit_code:
        assert "which is not installed: pip install" in done.stderr  # of the first that is not there
    else:
        kinds = [type(callback).__name__ for callback in asked["callbacks"]]
        assert kinds == ["Progress", "TensorBoard", "MLflow", "WandB"]


def test_shells_complete_strategies_tasks_and_engines_and_without_one_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completing("strategies")("lo") == ["local-sgd"]
    with_d = ["diloco", "downpour", "dynsgd", "distance"]
    assert completing("strategies")("allreduce,d") == [f"allreduce,{name}" for name in with_d]
    assert completing("tasks")("") == [*tasks.CATALOGUE]
    assert "hosts" in completing("engines")("h")

    def undetected() -> tuple[str, str]:
        raise shellingham.ShellDetectionFailure

    monkeypatch.setattr("sys.argv", ["manyhands", "--show-completion"])
    for detected in (undetected, lambda: ("dash", "/bin/dash")):
        monkeypatch.setattr(shellingham, "detect_shell", detected)
        with pytest.raises(SystemExit) as ended:
            commands.main()
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "one of bash, zsh, fish" in line
