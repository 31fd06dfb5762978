"""The commands that measure: what they hand to the library, and what they show of what it gives back."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import invoke, refused


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `compare` is asked for; its report is empty."""
    from manyhands.evidence.compare.comparison import Comparison
    from manyhands.evidence.compare.report import PAGE
    from manyhands.evidence.compare.report import save as real_save

    asked: dict[str, Any] = {}

    def compare(task: str, **options: Any) -> Any:
        asked.update(options, task=task)
        options["say"]("trial 1 of 1")
        return SimpleNamespace()

    monkeypatch.setattr("manyhands.evidence.compare.compare.compare", compare)

    def save(found: Any, folder: Path) -> Path:
        return real_save(found, folder) if isinstance(found, Comparison) else asked.setdefault("folder", folder) / PAGE

    monkeypatch.setattr("manyhands.evidence.compare.report.save", save)
    monkeypatch.setattr("manyhands.evidence.compare.text.text", lambda found: "the table")
    monkeypatch.setattr("manyhands.evidence.compare.text.markdown", lambda found: "| the | table |")
    return asked


def test_compare_has_defaults_that_do(compared: dict[str, Any]) -> None:
    from manyhands.evidence.compare.compare import DEFAULT

    done = invoke("compare", "digits")
    assert done.exit_code == 0, done.output
    assert (compared["strategies"], compared["workers"], compared["repeats"]) == (DEFAULT, [1, 2], 3)
    assert (compared["target"], compared["engine"], compared["time_margin"]) == (None, "auto", 0.05)
    assert compared["folder"].parent == Path("runs")
    assert compared["folder"].name.startswith("compare-digits-")
    assert done.stdout.splitlines() == ["the table", f"report: {(compared['folder'] / 'report.html').resolve()}"]
    assert "manyhands: trial 1 of 1" in done.stderr


def test_compare_takes_its_options(compared: dict[str, Any], tmp_path: Path) -> None:
    words = ["--strategies", "allreduce,easgd:period=4,alpha=.1", "--workers", "2,4", "--repeats", "5"]
    words += ["--validations", "7", "--target", "test_loss<=0.1", "--network", "lan", "--epochs", "2"]
    words += ["--output", str(tmp_path)]
    done = invoke("compare", "digits", *words, "--markdown", str(tmp_path / "table.md"))
    assert done.exit_code == 0, done.output
    assert compared["strategies"] == ["allreduce", "easgd:period=4,alpha=.1"]
    assert (compared["workers"], compared["repeats"], compared["validations"]) == ([2, 4], 5, 7)
    assert (compared["target"], compared["engine"]) == ("test_loss<=0.1", 'sim:network="lan"')
    assert (compared["epochs"], compared["folder"]) == (2, tmp_path)
    assert (tmp_path / "table.md").read_text() == "| the | table |\n"


def test_markdown_on_standard_output_is_alone_there(compared: dict[str, Any]) -> None:
    done = invoke("compare", "digits", "--markdown", "-")
    assert (done.exit_code, done.stdout) == (0, "| the | table |\n")
    assert "the table\n" in done.stderr
    assert "report: " in done.stderr


def test_without_the_report_extra_the_table_is_printed_and_the_page_can_be_made_later(
    compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from manyhands.evidence.compare import compare, report
    from manyhands.evidence.compare.comparison import Comparison

    numbers = {"parameters": 1, "repeats": 1, "time_margin": 0.05, "metric_margin": 0.01}
    named = {"task": "digits", "metric": "test_accuracy", "higher": True, "reference": "solo"}
    made = Comparison(variants=(), trials=(), target=None, **numbers, **named)
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "plotly" else object())
    monkeypatch.setattr(compare, "compare", lambda task, **_: made)
    done = invoke("compare", "digits", "--output", str(tmp_path / "out it's"), "--markdown", str(tmp_path / "table.md"))
    assert done.exit_code == 0, done.output
    assert "the table" in done.stdout
    assert (tmp_path / "table.md").exists()
    assert "plotly" in done.stderr
    assert "pip install 'manyhands[report]'" in done.stdout
    assert not list(tmp_path.glob("*/report.html"))
    monkeypatch.undo()
    code = shlex.split(done.stdout[done.stdout.index("python -c") :])[2]
    exec(code)  # what the line says to run
    assert list(tmp_path.glob("*/report.html"))


def test_workers_are_numbers_and_estimates_that_do_not_go_together(
    compared: dict[str, Any], tmp_path: Path, nothing_starts: None
) -> None:
    for name, more in (("compare", []), ("estimate", ["--profile", str(tmp_path)])):
        for workers in ("two", "2,0", "2,,4", ""):
            refused("--workers must be whole numbers of at least 1", name, "digits", "--workers", workers, *more)
    for words, reason in (
        (["--engine", "hosts"], "estimate knows --engine sim (the default: time, by a profile) and --engine spark"),
        (["--engine", "sim:network=lan", "--profile", "p.json"], "are --network and --compute here"),
        (["--engine", "spark", "--steps", "9"], "--steps is of estimates of time"),
        (["--engine", "spark", "--workers", "2,4"], "give one number of workers and one strategy"),
        (["--engine", "spark", "--strategies", "solo,diloco"], "give one number of workers and one strategy"),
        (["--workers-per-executor", "2"], "--workers-per-executor is of executors: give --engine spark"),
    ):
        refused(reason, "estimate", "digits", *words)


def noting(monkeypatch: pytest.MonkeyPatch, function: str, **gives: Any) -> dict[str, Any]:
    """What a function of the evidence is asked for; it gives an object with these attributes."""
    asked: dict[str, Any] = {}

    def noted(task: str, **options: Any) -> Any:
        asked.update(options, task=task)
        return SimpleNamespace(to_json=lambda: "{}", **gives)

    monkeypatch.setattr(f"manyhands.evidence.{function}", noted)
    return asked


def test_check_ends_with_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for passed, code in ((True, 0), (False, 1)):
        asked = noting(monkeypatch, "check.check.check", passed=passed, text=lambda: "the findings")
        done = invoke("check", "digits", "--workers", "3", "--batch-size", "8")
        assert (done.exit_code, done.stdout) == (code, "the findings\n")
        assert (asked["task"], asked["workers"], asked["steps"], asked["batch_size"]) == ("digits", 3, 8, 8)
        assert invoke("check", "digits", "--json").stdout == "{}\n"


def test_estimate_asks_for_a_profile_or_for_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = noting(monkeypatch, "estimate.estimate.estimate")
    assert invoke("estimate", "digits").exit_code == 2
    done = invoke("estimate", "digits", "--profile", str(tmp_path / "p.json"), "--workers", "8,64", "--json")
    assert (done.exit_code, done.stdout) == (0, "{}\n")
    assert (asked["profile"], asked["workers"]) == (tmp_path / "p.json", [8, 64])
    asked = noting(monkeypatch, "estimate.executor_memory.executor_memory")
    spark = ["estimate", "digits", "--engine", "spark:memory_mb=64", "--json"]
    assert invoke(*spark).stdout == "{}\n"
    assert (asked["workers"], asked["workers_per_executor"], asked["strategy"]) == (8, 4, "allreduce")
    done = invoke(*spark, "-n", "6", "--workers-per-executor", "2", "-s", "dynsgd", "--batch-size", "60")
    assert done.exit_code == 0, done.output
    assert (asked["workers"], asked["workers_per_executor"], asked["strategy"]) == (6, 2, "dynsgd")
    assert (asked["engine"], asked["batch_size"]) == ("spark:memory_mb=64", 60)
