"""README and docs, as tests read them: fenced blocks, what each needs to run, and the commands in them.

A mark above a fence says how its block is run: without one, by test_readme.py, in `make test`.

- `<!-- not run: why -->`: nowhere.
- `<!-- run with spark, tensorflow -->`: by test_readme_frameworks_integration.py, where these are installed, in `make test-nightly`.
- `<!-- run in make test-slow: why -->`, and test-nightly: by test_readme.py, among the slow or the nightly tests.
- `<!-- run on two hosts -->`: by test_hosts_network_integration.py, where network namespaces are allowed.
- `<!-- run in containers -->`, and on the first or second of two hosts: by test_containers_integration.py, where namespaces are.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HERE, NOWHERE, SLOW, TWO_HOSTS = "", "not run", "run in make test-slow", "run on two hosts"
NIGHTLY = "run in make test-nightly"
CONTAINERS = "run in containers"
FIRST_HOST, SECOND_HOST = (f"{CONTAINERS} on the {place} of two hosts" for place in ("first", "second"))
FRAMEWORKS = "run with "
_MARK = re.compile(
    r"<!-- (not run|run with [^:]+|run in make test-slow|run in make test-nightly|run on two hosts|"
    r"run in containers(?: on the (?:first|second) of two hosts)?)(?:: (.+))? -->"
)

TASK = """
import torch
from torch import nn

import manyhands as mh

x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
task = mh.Task.supervised(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    train_data=(x[:400], y[:400]),
    validation_data=(x[400:500], y[400:500]),
    test_data=(x[500:], y[500:]),
    batch_size=128,
)
"""
"""What pages call my.py: a task of the user's own."""

DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(1.0)
dist.all_reduce(total)
assert total == dist.get_world_size(), total
print("ranks:", int(total))
dist.destroy_process_group()
"""
"""What pages call ddp.py: a script that knows torch.distributed alone."""

ROLE = """
import json, os

print("role:", json.loads(os.environ["TF_CONFIG"])["task"]["type"])
"""
"""What stands for tf.py where there is no TensorFlow: the script finds its place as one of TensorFlow would."""


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of content, from 1
    language: str
    text: str
    how: str  # it is run: HERE, NOWHERE, SLOW, TWO_HOSTS, CONTAINERS, …, or "run with LIBRARY, LIBRARY"
    why: str  # it is not run here; "" where the mark does not say

    @property
    def where(self) -> str:
        return f"{title(self.page)}:{self.line}"

    @property
    def libraries(self) -> list[str]:
        """That it is run with; none where it is run otherwise."""
        named = self.how.startswith(FRAMEWORKS) and self.how not in (SLOW, NIGHTLY)
        return self.how.removeprefix(FRAMEWORKS).split(", ") if named else []


def title(page: Path) -> str:
    """A page's path from the root: names alone are not unique."""
    return page.relative_to(ROOT).as_posix()


@cache
def snippets(page: Path) -> tuple[Snippet, ...]:
    """All fenced blocks of a page, in order."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Snippet]:
    fence: tuple[str, int, str, str] | None = None
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith("```") and fence is None:
            mark = _MARK.fullmatch(lines[i - 1])
            assert mark or not lines[i - 1].startswith(("<!-- run", "<!-- not")), (
                f"{title(page)}:{i}: no such mark: {lines[i - 1]}"
            )
            how, why = (mark[1], mark[2] or "") if mark else (HERE, "")
            fence = line.removeprefix("```"), i + 1, how, why
        elif line == "```" and fence is not None:
            language, start, how, why = fence
            yield Snippet(page, start + 1, language, "\n".join(lines[start:i]) + "\n", how, why)
            fence = None
    assert fence is None, f"{title(page)}: the block from line {fence and fence[1]} is never closed"


def of(language: str, *how: str) -> list[Snippet]:
    """The blocks of all pages in one language that are run so (default: HERE)."""
    ways = how or (HERE,)
    return [part for page in PAGES for part in snippets(page) if part.language == language and part.how in ways]


def commands(page: Path, *how: str) -> list[list[str]]:
    """The words of every shell line of a page's blocks that are run so (default: HERE), comments left out."""
    lines = [
        line for part in of("bash", *how) if part.page == page for line in part.text.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def script(new: bool) -> str:
    """The script of docs/start/pytorch.md, before or after its diff."""
    (diff,) = of("diff")
    lines = [line for line in diff.text.splitlines() if line[:1] != ("-" if new else "+")]
    return "\n".join(line[1:] for line in lines) + "\n"


def rule() -> str:
    """The server rule of docs/strategies/server.md, half.py."""
    return next(part.text for part in of("python") if part.page.name == "server.md")


def write_scripts(folder: Path) -> None:
    """The files that pages name."""
    texts = {
        "my.py": TASK,
        "ddp.py": DDP,
        "tf.py": ROLE,
        "train.py": script(new=False),
        "prepared.py": script(new=True),
        "half.py": rule(),
        "rows.csv": "x,y\n" + "".join(f"{i / 8},{i % 3}\n" for i in range(4000)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
