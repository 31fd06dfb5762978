"""Commands in this process and in one of their own, and a train() that only notes what it was asked."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from manyhands.cli import commands

SCRIPT = "import manyhands.cli.commands; manyhands.cli.commands.main()"


def invoke(*words: str) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(commands.app, list(words), prog_name="manyhands", env=environment)


def refused(says: str, *words: str) -> None:
    """The command ends with 2 and one message, on standard error alone."""
    done = invoke(*words)
    assert (done.exit_code, done.stdout) == (2, ""), (words, done.output)
    assert says in done.stderr, (words, done.stderr)
    assert "Traceback" not in done.stderr


def command(*words: str, cwd: Path | None = None, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
    program = [sys.executable, *options, "-c", SCRIPT, *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment)


def faked_train(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> dict[str, Any]:
    """What train() is called with; it starts nothing, and raises the error."""
    seen: dict[str, Any] = {}

    def train(task: str, **options: Any) -> Any:
        seen.update(options, task=task)
        if error is not None:
            raise error
        return SimpleNamespace(summary=lambda: "the summary")

    monkeypatch.setattr("manyhands.training.train.train", train)
    monkeypatch.setattr(commands, "_started", lambda engine, workers: nullcontext(engine))
    return seen
