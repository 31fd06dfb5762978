"""What README and docs show is true: their Python and shell snippets run as they stand, their links and tests exist.

The marks above fences that say otherwise are in pages.py. Python blocks of a page share one namespace. A ```diff block is a
script before and after: its sides are saved as train.py and prepared.py for the shell lines of its page. Commands that train get
`--max-steps`, so that all of this takes seconds.
"""

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import manyhands as mh
from manyhands import spec
from manyhands.cli.commands import app
from manyhands.comm.codecs import CODECS
from manyhands.server.rules import RULES
from manyhands.strategies import CATALOGUE
from pages import HERE, NIGHTLY, NOWHERE, PAGES, ROOT, SLOW, commands, of, script, snippets, title, write_scripts

SCRIPT_S = 60.0
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def pages_with(language: str) -> list[Path]:
    return list(dict.fromkeys(part.page for part in of(language)))


def run(words: list[str], folder: Path) -> str:
    """Standard output of a program that must end well."""
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=SCRIPT_S)
    assert done.returncode == 0, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def command(words: list[str]) -> Result:
    """The command `manyhands`, in this process, which has torch already."""
    assert words[0] == "manyhands"
    return CliRunner().invoke(app, words[1:], prog_name="manyhands")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's reader works: with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    write_scripts(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"), ids=title)
def test_python_snippets_run(page: Path, folder: Path) -> None:
    """Functions of a snippet belong to `__main__`, as those of a script or a notebook do."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for part in of("python"):
        if part.page == page:
            padded = "\n" * (part.line - 1) + part.text  # a traceback then points into the page
            exec(compile(padded, str(page), "exec", dont_inherit=True), namespace)


def run_once() -> Iterator[tuple[Path, str, Any, list[list[str]]]]:
    """(page, mark in it, mark here, commands): of the commands that several pages show, the first page's alone."""
    seen: list[list[str]] = []
    for page in PAGES:
        for how, mark in ((HERE, pytest.mark.slow), (SLOW, pytest.mark.slow), (NIGHTLY, pytest.mark.nightly)):
            if new := [words for words in commands(page, how) if words not in seen]:
                yield page, how, mark, new
            seen += new


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "lines"),
    [
        pytest.param(page, lines, marks=mark, id=title(page) + how.removeprefix("run in make test"))
        for page, how, mark, lines in run_once()
    ],
)
def test_commands_run(page: Path, lines: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of README's own script have a test of their own.

    Simulated workers are enough for a strategy's page, and for checks but README's.
    """
    simulated = page.parent.name == "strategies" and "hogwild" not in page.name
    if page.name != "README.md":
        monkeypatch.setitem(mh.check.__kwdefaults__, "engine", "sim")
    for i, words in enumerate(lines):
        if not {"train.py", "prepared.py"} & set(words):
            follow([*words, *(["--engine", "sim"] if simulated and "--workers" in words else [])], folder / str(i))


def follow(words: list[str], folder: Path) -> None:
    """Do what a shell line says, in few steps."""
    if words[0] != "manyhands":
        run(words, folder.parent)
        return
    done = command([*words, *limits(words, folder)])
    assert done.exit_code == 0, f"{shlex.join(words)} ended with {done.exit_code}:\n{done.output}"
    assert words[1] != "train" or "Advice: " in done.output or "--help" in words


def limits(words: list[str], folder: Path) -> list[str]:
    """What makes a command short: few steps, once, and a directory of its own where a run says none."""
    if words[1] == "compare":
        simulated = [] if any("hogwild" in word for word in words) else ["--engine", "sim"]  # it needs processes
        return [*simulated, "--max-steps", "6", "--repeats", "1", "--validations", "1"]
    if words[1] == "calibrate":
        return ["--quick", "--strategies", "none"]
    if words[1] != "train" or "--help" in words:
        return []
    return ["--max-steps", "2", *([] if "--run-dir" in words else ["--run-dir", str(folder)])]


def test_the_diff_changes_nothing_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CASE 1: through the user's own loop."""
    printed = []
    for name, new in (("train.py", False), ("prepared.py", True)):
        (tmp_path / name).write_text(script(new))
        runpy.run_path(str(tmp_path / name), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert script(True) != script(False)
    assert printed[0] == printed[1]
    assert printed[0].count("epoch") == 3


@pytest.mark.slow
def test_commands_of_the_script_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first rank prints, the others are quiet; two are enough to see it."""
    scripts = ("train.py", "prepared.py")
    ran = [words for words in commands(ROOT / "README.md") if words[-1] in scripts and words[0] != "python"]
    assert [words[0] for words in ran] == ["manyhands"] * 4 + ["torchrun"]
    for words in ([{"4": "2"}.get(word, word) for word in line] for line in ran):
        output = run(words, folder) if words[0] == "torchrun" else ran_here(words, capfd)
        assert output.count("epoch") == 3


def ran_here(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What a command printed, that of its workers too."""
    assert command(words).exit_code == 0
    return capfd.readouterr().out


def test_what_is_not_run_says_why() -> None:
    """In more than a word or two, so that a reader can tell whether it still holds."""
    marked = [part for page in PAGES for part in snippets(page) if part.how in (NOWHERE, SLOW, NIGHTLY)]
    assert [part.where for part in marked if len(part.why.split()) < 4] == []


def test_only_known_programs_are_shown() -> None:
    """A block that names another one is marked, and run elsewhere or not at all."""
    shown = {words[0] for page in PAGES for words in commands(page, HERE, SLOW, NIGHTLY)}
    assert shown <= {"manyhands", "python", "torchrun"}
    parts = [part for page in PAGES for part in snippets(page)]
    assert {part.language for part in parts} <= {"python", "bash", "diff", "json", "text"}
    assert {library for part in parts for library in part.libraries} <= {"spark", "tensorflow", "jax"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith("http"):
                continue
            file = (page.parent / path) if path else page
            assert file.exists(), f"{title(page)} links to {target}, which is not there"
            assert not anchor or anchor in anchors(file), f"{title(page)}: {file.name} has no heading {anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as its links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_page_can_be_found() -> None:
    """From docs/strategies.md those in docs/strategies/; others from there, the index or mkdocs' table of contents."""
    docs, contents = ROOT / "docs", ROOT / "mkdocs.yml"
    of_strategies = linked(docs / "strategies.md")
    found = of_strategies | linked(docs / "index.md") | {docs / "index.md", ROOT / "README.md"}
    if contents.exists():
        found |= {docs / name for name in re.findall(r"[\w./-]+\.md", contents.read_text())}
    places = {docs / "strategies": of_strategies}
    assert [title(page) for page in PAGES if page not in places.get(page.parent, found)] == []


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if not target.startswith("http")}


def test_the_tests_that_pages_name_exist() -> None:
    there = {
        (path.stem.removeprefix("test_"), name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)\(", path.read_text(), re.MULTILINE)
    }
    pages = {"guarantees": 30, "faults": 60, "mistakes": 50, "survive": 30, "../SECURITY": 15}
    for page, least in pages.items():
        named = re.findall(r"`(\w+)::(\w+)`", (ROOT / "docs" / f"{page}.md").read_text())
        assert len(named) > least, page
        assert [one for one in named if one not in there and one != ("file", "test")] == [], page


STRATEGIES = ROOT / "docs" / "strategies.md"


def test_the_table_of_strategies_is_the_catalogue() -> None:
    rows = table(STRATEGIES, "| strategy | exchanges |")
    shown = [(named(row[0])[0], row[2], row[-1]) for row in rows]
    assert shown == [(name, maker.consistency, maker.source) for name, maker in makers().items()]


def pages_of_strategies() -> dict[Path, list[str]]:
    """{page: the strategies that it is of}, by the links of the catalogue's table."""
    pages: dict[Path, list[str]] = {}
    for row in table(STRATEGIES, "| strategy | exchanges |"):
        (target,) = re.findall(r"\]\((.+)\)", row[0])
        pages.setdefault(STRATEGIES.parent / target, []).extend(named(row[0]))
    return pages


def test_the_options_on_each_page_are_what_its_strategies_have() -> None:
    """In their order; what two of a page have alike is said once."""
    for page, names in pages_of_strategies().items():
        fields = [field for name in names for field in spec.option_fields(makers()[name])]
        shown = [(row[0].strip("`"), row[2].strip("`")) for row in table(page, "| option |")] if fields else []
        assert shown == list(dict.fromkeys((field.name, _text(field.default)) for field in fields)), title(page)


def _text(default: object) -> str:
    """As a spec string says it."""
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def test_the_tables_of_codecs_and_rules_are_what_there_is() -> None:
    codecs = table(ROOT / "docs" / "strategies" / "compression.md", "| codec | bytes |")
    assert [(row[0].strip("`"), row[-1]) for row in codecs] == [(kind.form, kind.source) for kind in CODECS.values()]
    rules = table(ROOT / "docs" / "strategies" / "server.md", "| rule |")
    assert {row[0].strip("`") for row in rules} == RULES.keys()


def test_the_deviations_that_docstrings_list_have_rows() -> None:
    """Each module that lists some has one, and no other."""
    package = Path(spec.__file__).parent
    shown = {module_of(name) for row in table(ROOT / "docs" / "deviations.md", "| of |") for name in named(row[0])}
    listed = {path for path in package.rglob("*.py") if re.search(r"\bDeviations?:", path.read_text())}
    assert shown == listed


def module_of(name: str) -> Path:
    """Where a strategy or a codec is; else the module of this path."""
    kind = makers().get(name) or CODECS.get(name)
    return Path(inspect.getfile(kind)) if kind else Path(spec.__file__).parent / name


def named(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def makers() -> dict[str, Any]:
    """{name: class} of all strategies."""
    return {name: spec.find(name, CATALOGUE, "strategy") for name in CATALOGUE}


def table(page: Path, begins: str) -> list[list[str]]:
    """The cells of a table's rows, below its header, which begins so."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(begins))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
