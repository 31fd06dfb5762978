"""What a release consists of agrees: the version, the changelog, the citation, and the workflows that test and publish."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import manyhands as mh

ROOT = Path(__file__).resolve().parents[1]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOOLS["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
LINK = re.compile(r"^\[(.+?)\]: \S+$", re.MULTILINE)
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
RECORDS = "docs/results"  # of runs that were made: they name the version that made them


def steps(workflow: str) -> list[tuple[str, dict[str, Any]]]:
    """(the job's name, a step), for all jobs of a workflow."""
    return [(name, step) for name, job in WORKFLOWS[workflow]["jobs"].items() for step in job.get("steps", ())]


def test_one_file_holds_the_version() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    written = re.compile(rf"(?<![\d.]){re.escape(mh.__version__)}(?!\.?\d)".encode())
    paths = [path for path in listed.stdout.split("\0") if path and not path.startswith(RECORDS)]
    holding = {path for path in paths if (ROOT / path).is_file() and written.search((ROOT / path).read_bytes())}
    assert holding - {"CHANGELOG.md", "CITATION.cff"} == {"src/manyhands/__init__.py"}


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    """Version 1.1.0 of it: what is unreleased stands above all releases, newest first, each with its date."""
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)( \[YANKED\])?", one) for one in headings[1:]]
    assert all(releases), headings
    numbers = [tuple(int(number) for number in found.group(1, 2, 3)) for found in releases if found]
    dates = [found[4] for found in releases if found]
    assert numbers == sorted(set(numbers), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert headings[1:] == [] or headings[1].startswith(f"[{mh.__version__}] ")
    assert LINK.findall(CHANGELOG) == (
        re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE) if "urls" in PROJECT else []
    )
    for part in LINK.sub("", CHANGELOG).split("\n## ")[1:]:
        version, *sections = part.split("\n### ")
        names = [section.partition("\n")[0] for section in sections]
        assert names == [name for name in SECTIONS if name in names], version  # each once, in this order
        for section in sections:
            lines = section.partition("\n")[2].strip("\n").splitlines()
            assert lines, f"no entry in {section!r}"
            assert [line for line in lines if not line.startswith(("- ", "  "))] == []


def test_the_citation_has_what_version_1_2_0_of_its_format_requires() -> None:
    """Citation File Format, Druskat and others, 2021: the keys that its schema requires, here and of authors."""
    assert {"authors", "cff-version", "message", "title"} <= CITATION.keys()
    assert CITATION["cff-version"] == "1.2.0"
    assert all("name" in author or {"family-names", "given-names"} & author.keys() for author in CITATION["authors"])
    assert CITATION["version"] == mh.__version__
    assert (CITATION["title"], CITATION["license"]) == (PROJECT["name"], PROJECT["license"])


def test_python_versions_are_the_same_wherever_they_stand() -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = ["3." + one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    assert classified == WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={classified[0]}"
    assert TOOLS["tool"]["ruff"]["target-version"] == f"py{classified[0].replace('.', '')}"
    used = {
        step["with"]["python-version"] for name in WORKFLOWS for _, step in steps(name) if "setup-python" in str(step)
    }
    assert used == {classified[0], "${{ matrix.python }}"}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_runs_targets_that_exist_with_few_rights_and_within_a_time(workflow: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for _, step in steps(workflow):
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= set(targets)
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")), step
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    assert WORKFLOWS[workflow]["concurrency"]["group"]
    for name, job in WORKFLOWS[workflow]["jobs"].items():
        if "uses" in job:  # another workflow, whose jobs have their own
            assert (ROOT / job["uses"]).exists()
            continue
        assert job["timeout-minutes"] <= (300 if workflow == "nightly" else 60)
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})


def test_continuous_integration_lints_tests_documents_and_builds() -> None:
    run = [(job, step["run"]) for job, step in steps("ci") if "run" in step]
    made = {"lint": "lint", "test": "test", "slow": "test-slow", "docs": "docs", "wheel": "wheel"}
    assert run == [(job, f"make {target}") for job, target in made.items()]
    assert [step["run"] for _, step in steps("nightly") if "run" in step] == ["make test-nightly"]
