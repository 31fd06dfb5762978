"""What the site adds to docs/: the pages outside of it, the examples' programs, and every command's options.

Links are written as they work in the repository. In the site these pages stand beside the others, a program of examples/
is a section of their page, and any other file that is no page (source, tests) is named without a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "start/examples.md",
}
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
COMMANDS = "<!-- every command and its options: the site adds them here -->"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text()
        if name == "examples/README.md":
            text += "".join(f"\n## {path.name}\n\n```python\n{path.read_text()}```\n" for path in EXAMPLES)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    origin = {page: name for name, page in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = origin.rpartition("/")[0]
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = normpath(f"{folder}/{target}" if folder else target)
        page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is not None and files.get_file_from_path(page) is not None:
            return f"[{text}]({up}{page}{anchor})"
        if ROOT / path in EXAMPLES:
            return f"[{text}]({up}start/examples.md#{slugify(case='lower')(Path(path).name, '-')})"
        return text if (ROOT / path).exists() else match[0]  # mkdocs names what is not there

    markdown = _outside_fences(markdown, lambda part: _LINK.sub(link, part))
    return markdown.replace(COMMANDS, _commands()) if COMMANDS in markdown else markdown


def _outside_fences(markdown: str, change: Any) -> str:
    """The page with its text changed and its code blocks as they are."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _commands() -> str:
    """Each command's help as Markdown, by typer, two headings down."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from manyhands.cli.commands import app

    command = get_command(app)
    with command.make_context("manyhands", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="manyhands")
    text = re.sub(r"(^\[bold\].*\[/bold\]\n)+", lambda lines: f"```console\n{lines[0]}```\n", text, flags=re.MULTILINE)
    return re.sub(r"^#", "##", re.sub(r"\[/?bold\]", "", text), flags=re.MULTILINE)
