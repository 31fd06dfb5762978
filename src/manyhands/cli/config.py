"""`--config run.toml`: the options of a command from a file, and the file that says what a command was given."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from manyhands.errors import BadInput, is_number, is_whole, whole_of
from manyhands.spec import did_you_mean

_NOT_IN_FILES = ("help", "config", "print_config", "debug")
_WIDTH = 100


def read(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: the file's values become the defaults of the command's options, which override them.

    Raises BadInput, with file and line, for a key that the command does not have and for a value of another type.
    """
    if path is None:
        return None
    try:
        text = path.read_text()
        values = tomllib.loads(text)
    except OSError as problem:
        raise BadInput(f"cannot read --config {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise BadInput(f"{path} is not TOML: {problem}") from None
    hints = get_type_hints(inspect.unwrap(ctx.command.callback))  # type: ignore[arg-type]  # a command has one
    known = [parameter.name for parameter in _parameters(ctx)]
    defaults = {}
    for key, value in values.items():
        name, place = key.replace("-", "_"), f"{path}, line {_line_of(key, text)}"
        if name not in known:
            raise BadInput(f"{place}: no option {key!r}{did_you_mean(name, known)}: known are {', '.join(known)}")
        defaults[name] = _converted(name, hints[name], value, place)
    ctx.default_map = defaults
    return path


def text_of(ctx: typer.Context) -> str:
    """The file that gives a command what it was given: every option with its meaning, those without a value as comments."""
    lines = [f"# For `manyhands {ctx.info_name} --config FILE`. Options of the command line override these."]
    panel = ""
    for parameter in _parameters(ctx):
        own = getattr(parameter, "rich_help_panel", None) or ""
        if own and own != panel:
            lines += ["", f"# -- {own} --"]
            panel = own
        meaning = textwrap.wrap(getattr(parameter, "help", "") or "", _WIDTH)
        value = ctx.params[parameter.name]
        if parameter.name == "workers" and value is not None:  # a number, or MIN:MAX
            value = value if (number := whole_of(value)) is None else number
        given = f"# {parameter.name} =" if value is None else f"{parameter.name} = {_toml(value)}"
        lines += ["", *(f"# {line}" for line in meaning), given]
    return "\n".join(lines)


def _parameters(ctx: typer.Context) -> list[Any]:
    return [parameter for parameter in ctx.command.params if parameter.name not in _NOT_IN_FILES]


def _line_of(key: str, text: str) -> int:
    """The line of a key at the top level, from 1."""
    found = re.search(rf"""^[ \t\[]*["']?{re.escape(key)}["']?\s*(=|\.|\])""", text, re.MULTILINE)
    return 1 + text.count("\n", 0, found.start()) if found else 1


def _converted(name: str, kind: Any, value: Any, place: str) -> Any:
    """The value as the option's annotation wants it; BadInput for another type."""
    kinds = set(get_args(kind) or (kind,))
    if bool in kinds:
        wanted, right = "true or false", isinstance(value, bool)
    elif int in kinds:
        wanted, right = "a whole number", is_whole(value, -(1 << 63))
    elif float in kinds:
        wanted, right = "a number", is_number(value)
    else:
        wanted, right = "a text or a number", isinstance(value, str) or is_number(value)
    if not right:
        raise BadInput(f"{place}: {name} must be {wanted}, not {value!r}")
    return str(value) if wanted == "a text or a number" else value


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False)
