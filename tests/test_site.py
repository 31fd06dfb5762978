"""The documentation as a site: it builds without a dead link, and its pages hold what people look for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from pages import ROOT

pytestmark = pytest.mark.slow  # building it takes 15 s


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, dict[str, Any]]:
    """{address: section} of the site's search."""
    return {part["location"]: part for part in json.loads((site / "search" / "search_index.json").read_text())["docs"]}


def test_every_public_name_has_its_place(found: dict[str, Any]) -> None:
    described = {location.rpartition("#")[2] for location in found if location.startswith("api/")}
    described |= {where.replace("own_loop.prepare.", "") for where in described}  # mh.worker is also a module's name
    missing = {name for name in mh.__all__ if not name.startswith("_") and f"manyhands.{name}" not in described}
    assert missing <= {"callbacks", "keras", "kernels", "spark"}  # modules, whose names have places of their own


LISTED = r"<li>(?:\s*<p>)?<strong><code>{}</code></strong>"
HOLDS = (
    ("api/training", LISTED.format("timeout_s")),
    ("api/measuring", LISTED.format("profile") + ": of "),  # where several share a line
    *(("command-line", f"<code>manyhands {command}</code>") for command in ("train", "compare", "join", "estimate")),
    ("contributing", 'href="../strategies/"'),
    ("start/examples", 'href="#custom_strategypy"'),
)


def test_pages_hold_parameters_commands_and_what_lies_outside_of_docs(found: dict[str, Any], site: Path) -> None:
    for page, words in HOLDS:
        assert re.search(words, (site / page / "index.html").read_text()), (page, words)
    assert "[bold]" not in (site / "command-line" / "index.html").read_text()
    assert {"contributing/", "changelog/", "security-policy/", "start/examples/"} <= found.keys()
    assert "class SlowMo" in found["start/examples/#custom_strategypy"]["text"]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture of another server."""
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="https?://[^"]+"', page.read_text()), page
