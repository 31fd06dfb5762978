"""Spec strings `name:option=value,…` and `path.py:Name:option=value,…`, and a dataclass's spec string."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from manyhands.errors import BadInput, UnknownName

T = TypeVar("T")
_OPENING, _CLOSING = "[({", "])}"


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets and quotes; quotes are kept."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth or quote:
        raise BadInput(
            f"a {'quote' if quote else 'bracket'} in {text!r} is not closed, or not opened: add the other one"
        )
    return [*parts, text[start:]]


def split_list(text: str) -> list[str]:
    """A list of specs: `solo,local-sgd:period=8,warmup=3` is two; `=` before any `:` continues the one before."""
    specs: list[str] = []
    for item in split_commas(text):
        before_colon = item.split(":", 1)[0]
        if "=" in before_colon and specs:
            specs[-1] += ("," if ":" in specs[-1] else ":") + item
        else:
            specs.append(item)
    return [spec.strip() for spec in specs if spec.strip()]


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """(name, {option: text}); for `path.py:Name:…` the name is `path.py:Name`."""
    name, _, rest = spec.strip().partition(":")
    if name.endswith(".py"):
        inner, _, rest = rest.partition(":")
        if not inner:
            raise BadInput(f"{spec!r} names a file but nothing in it: write {name}:NAME")
        name = f"{name}:{inner}"
    options: dict[str, str] = {}
    for item in split_commas(rest) if rest else []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"cannot read {item!r} in {spec!r}: expected option=value")
        options[key.strip().replace("-", "_")] = value.strip().strip("\"'")
    return name, options


def convert(name: str, text: Any, hint: Any) -> Any:
    """`text` as the type that an option's annotation says; a value that is no string passes as it is."""
    if not isinstance(text, str):
        return text
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(name, text, get_args(hint))
    if origin is Literal:
        if text in (allowed := [str(value) for value in get_args(hint)]):
            return get_args(hint)[allowed.index(text)]
        raise BadInput(f"{name} must be one of {', '.join(allowed)}, not {text!r}")
    if hint is bool:
        return _convert_bool(name, text)
    if hint in (int, float):
        return _convert_number(name, text, hint)
    if hint is type(None):
        if text.lower() in ("none", ""):
            return None
        raise BadInput(f"{name} must be none, not {text!r}")
    if hint in (str, Any, Path):
        return Path(text) if hint is Path else text
    raise BadInput(f"{name} cannot be given in a string; give it from Python")


def _convert_number(name: str, text: str, hint: type[int] | type[float]) -> int | float:
    try:
        return hint(text)
    except ValueError:
        raise BadInput(f"{name} must be a {'whole number' if hint is int else 'number'}, not {text!r}") from None


def _convert_union(name: str, text: str, hints: tuple[Any, ...]) -> Any:
    problems = []
    for hint in sorted(hints, key=lambda h: h is str):  # the most permissive last
        try:
            return convert(name, text, hint)
        except BadInput as problem:
            problems.append(str(problem))
    raise BadInput("; or ".join(dict.fromkeys(problems)))


def _convert_bool(name: str, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return text.lower() in ("true", "yes", "on", "1")
    raise BadInput(f"{name} must be true or false, not {text!r}")


def options_of(maker: Callable[..., Any]) -> dict[str, Any]:
    """{option: annotation or the default's type} of a dataclass or function; `**fields` stands for Task's fields."""
    hints = get_type_hints(maker if is_dataclass(maker) or inspect.isroutine(maker) else maker.__init__)
    if is_dataclass(maker):
        return {f.name: hints[f.name] for f in option_fields(maker)}
    options: dict[str, Any] = {}
    for parameter in inspect.signature(maker).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            from manyhands.task import Task

            options = {**options_of(Task), **options}
        elif parameter.name != "self":
            options[parameter.name] = hints.get(parameter.name, _type_of(parameter))
    return options


def option_fields(maker: Any) -> list[Field[Any]]:
    """A dataclass's options: its own before those that a base adds."""

    def distance(field: Field[Any]) -> int:
        return max(i for i, base in enumerate(bases) if field.name in base.__annotations__)

    bases = [base for base in type.mro(maker) if is_dataclass(base)]
    return sorted((field for field in fields(maker) if field.init), key=distance)


def field_docs(maker: type[Any]) -> dict[str, str]:
    """{field: the text below it in the source} of a dataclass and its bases; {} where the source is not there."""
    docs: dict[str, str] = {}
    for base in reversed([base for base in type.mro(maker) if is_dataclass(base)]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docs[field.target.id] = inspect.cleandoc(text)
    return docs


def documented(kind: type[Any]) -> None:
    """Add what each field of a dataclass means to its docstring, which `help` shows."""
    docs = field_docs(kind)
    lines = [f"{name}:\n{textwrap.indent(docs[name], '    ')}" for f in fields(kind) if (name := f.name) in docs]
    if lines:
        kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", *lines])


def _type_of(parameter: inspect.Parameter) -> Any:
    """The type of an option without annotation is its default's: `width=64` is a number for `def make(width=32)`. Without
    a default, what can be read as a number is one."""
    if parameter.default is parameter.empty:
        return int | float | str
    return type(parameter.default) if type(parameter.default) in (bool, int, float, str) else Any


def make(maker: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call `maker` with options given as text; `what` names it in errors ("strategy local-sgd")."""
    hints = options_of(maker)
    for name in options:
        if name not in hints:
            listing = f"its options are {', '.join(hints)}" if hints else "it has no options"
            raise UnknownName(f"{what} has no option {name!r}{did_you_mean(name, list(hints))}: {listing}")
    missing = [name for name in _required(maker) if name not in options]
    if missing:
        wanted = ",".join(f"{name}=..." for name in missing)
        raise BadInput(f"{what} needs {', '.join(missing)}: give it behind the name, {what.partition(' ')[2]}:{wanted}")
    return maker(**{name: convert(f"{what}: {name}", value, hints[name]) for name, value in options.items()})


def option_of(kind: type[T], given: Any, what: str, example: str) -> T | None:
    """An option as it is given: an object of this kind, or the text of its options. "" and None: None.

    Raises BadInput or UnknownName.
    """
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, str):
        raise BadInput(
            f'{what} must be a text such as "{example}", or {kind.__name__}({example}); got {type(given).__name__}'
        )
    if not given.strip():
        return None
    made: T = make(kind, parse(f"{what}:{given}")[1], what)
    return made


def _required(maker: Callable[..., Any]) -> list[str]:
    """The options without a default."""
    parameters = inspect.signature(maker).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty]


def find(name: str, catalogue: Mapping[str, str], kind: str, hints: Mapping[str, str] | None = None) -> Any:
    """What a catalogue ({name: "module:attribute"}) or a user's file (`path.py:Name`) holds under this name.

    hints: {what others call it: a spec of ours, or a sentence that says what there is instead}.
    """
    if ".py:" in name:
        path, _, attribute = name.partition(":")
        return _attribute(load_file(Path(path)), attribute, path)
    if name not in catalogue:
        hint = (hints or {}).get(name.lower().replace("_", "-"))
        if hint and " " not in hint:
            hint = f"what others call {name} is {hint!r} here"
        tail = f" ({hint})" if hint else did_you_mean(name, list(catalogue))
        raise UnknownName(
            f"no {kind} {name!r}{tail}: choose from {', '.join(catalogue)}, or give your own as file.py:Name"
        )
    module, _, attribute = catalogue[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _attribute(module: types.ModuleType, attribute: str, path: str) -> Any:
    if not hasattr(module, attribute):
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        names = [name for name, value in public.items() if _is_own(value, module)] or list(public)
        raise UnknownName(
            f"{path} has no {attribute!r}{did_you_mean(attribute, names)}: it defines {', '.join(names) or 'nothing'}"
        )
    return getattr(module, attribute)


def _is_own(value: Any, module: types.ModuleType) -> bool:
    """Whether a file's value may be what was meant: its own function or class, or an object of manyhands'."""
    where = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    here = getattr(where, "__module__", "") or ""
    return here == module.__name__ or (where is not value and here.startswith(__package__ + "."))


def load_file(path: Path) -> types.ModuleType:
    """Import a user's file under its own name, with its folder on the path as `python file.py` has it."""
    if not path.is_file():
        raise BadInput(f"there is no file {str(path)!r} (the current folder is {Path.cwd()})")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    specification = importlib.util.spec_from_file_location(name, path.resolve())
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        raise BadInput(
            f"{path} ended while it was imported (sys.exit({error.code!r}){_where(error, path)}): a file that is named for what is in it must not parse "
            'arguments or run a program. Put that below if __name__ == "__main__":'
        ) from error
    except Exception as error:
        del sys.modules[name]
        raise BadInput(f"{path} failed to import: {type(error).__name__}: {error}{_where(error, path)}") from error
    return module


def _where(error: BaseException, path: Path) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path.resolve()):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def to_spec(instance: Any, name: str) -> str:
    """The string that makes this dataclass again: its name and the options that differ from their defaults."""
    parts = []
    for field in option_fields(type(instance)):
        value = getattr(instance, field.name)
        default = (
            field.default
            if field.default is not MISSING
            else field.default_factory()
            if field.default_factory is not MISSING
            else MISSING
        )
        if value != default:
            parts.append(f"{field.name}={_to_text(value)}")
    return name + (":" + ",".join(parts) if parts else "")


def _to_text(value: Any) -> str:
    text = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if value is None:
        return "none"
    return f'"{text}"' if "," in text else text


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'downpour'?)`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def type_text(hint: Any) -> str:
    """How a type is shown to people: `int | "end"`."""
    if get_origin(hint) is Literal:
        return " | ".join(str(value) for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in get_args(hint))
    return "none" if hint is type(None) else getattr(hint, "__name__", str(typing.cast(Any, hint)))
