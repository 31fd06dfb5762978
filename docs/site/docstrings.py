"""Docstrings as the API pages show them: lines `name: what it is` become a list of parameters."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"^(\w+(?:, \w+)*): (.+)$")
_FURTHER = re.compile(r"(?<=[.;]) (?=(\w+(?:, \w+)*): )")  # on the same line, behind another's end


class ParameterLines(griffe.Extension):
    """`name, name: text` with indented lines below it, of a function's own parameters, as a Markdown list."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = _listed(func.docstring.value, {parameter.name for parameter in func.parameters})


def _listed(text: str, parameters: set[str]) -> str:
    lines: list[str] = []
    text = _FURTHER.sub(lambda found: "\n" if set(found[1].split(", ")) <= parameters else " ", text)
    for line in text.splitlines():
        match = _PARAMETERS.match(line)
        if match and set(match[1].split(", ")) & parameters:
            if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
                lines.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines.append(f"- **{names}**: {match[2]}")
        else:
            lines.append(line)
    return "\n".join(lines)
