"""Where something is in the user's files: a running call, a function, the line that makes a layer."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import nn

from manyhands import errors
from manyhands.task import SupervisedLoss, SupervisedMetrics

_PACKAGE = str(Path(__file__).parents[2])
_CHECK = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class SourceLocation:
    """A line in a file of the user's."""

    file: str
    line: int
    name: str = ""
    """The name of what is there, if any: `encoder.norm1`."""

    @property
    def where(self) -> str:
        """`net.py:14`, relative to the working directory if the file is below it."""
        relative = os.path.relpath(self.file) if Path(self.file).is_absolute() else self.file
        return f"{self.file if relative.startswith('..') else relative}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where} ({self.name})" if self.name else self.where


def running() -> SourceLocation | None:
    """The line that is running now: the innermost one of the user's, else the innermost outside of torch and manyhands.

    It is one of what this package calls: who called this package (a launcher, the user's `mh.check`) is not looked at.
    """
    library, measured = None, False
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith(_CHECK) and measured:
            break
        measured = measured or not file.startswith(_CHECK)
        if is_users(file):
            return SourceLocation(file, line)
        if library is None and not _is_ours(file):
            library = SourceLocation(file, line)
    return library


def module_running() -> nn.Module | None:
    """The innermost module whose forward is running now."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "forward" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            return owner
    return None


def is_users(file: str) -> bool:
    """Whether it is a file of the user's, and not code without a file."""
    return errors.is_users(file) and not file.startswith("<")


def _is_ours(file: str) -> bool:
    """Whether a file is of torch or manyhands, or code without a file."""
    return file.startswith((_TORCH, _PACKAGE, "<frozen", "<string"))


def of_error(error: BaseException) -> SourceLocation | None:
    """The innermost line of the user's in the traceback of an error's cause, else of the error itself."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            found = SourceLocation(frame.f_code.co_filename, line)
    return of_error(error.__cause__) or found if error.__cause__ is not None else found


def in_text(text: str) -> SourceLocation | None:
    """The innermost line of the user's in the text of a traceback."""
    lines = re.findall(r'File "(.+?)", line (\d+)', text)
    return next((SourceLocation(file, int(line)) for file, line in reversed(lines) if is_users(file)), None)


# -- functions ---------------------------------------------------------------------------------------------------------


def of_function(given: Any) -> SourceLocation | None:
    """Where a function, a method, a class with `__call__`, a module or a criterion begins; None if it is not the user's."""
    code = getattr(_unwrapped(given), "__code__", None)
    if not isinstance(code, CodeType) or not is_users(code.co_filename):
        return None
    name = getattr(given, "__qualname__", "").replace("<lambda>", "lambda")
    return SourceLocation(code.co_filename, code.co_firstlineno, name)


def of_method(owner: Any, *names: str) -> SourceLocation | None:
    """Where the first of these methods that an object has is defined."""
    for name in names:
        method = getattr(type(owner), name, None)
        found = None if method is None else of_function(method)
        if found is not None:
            return found
    return None


def of_change(owner: Any, *names: str) -> SourceLocation | None:
    """The first line that assigns to an attribute of `self` in the first of these methods, else where the method begins."""
    for name in names:
        source = _source(getattr(type(owner), name, None))
        if source is not None:
            changes = [node.lineno for node in ast.walk(source.tree) if _changes_self(node)]
            return SourceLocation(source.file, min(changes, default=source.line))
    return None


def _changes_self(node: ast.AST) -> TypeGuard[ast.stmt]:
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return False
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        root = target
        while isinstance(root, ast.Attribute | ast.Subscript):  # down to `self` of `self.counts[i]`
            root = root.value
        if root is not target and isinstance(root, ast.Name) and root.id == "self":
            return True
    return False


def _unwrapped(given: Any) -> Any:
    """The plain function behind partials, criteria, modules, classes, methods and decorators."""
    for _ in range(16):
        if isinstance(given, partial):
            given = given.func
        elif isinstance(given, SupervisedLoss | SupervisedMetrics):
            given = given.criterion
        elif isinstance(given, nn.Module):
            given = type(given).forward
        elif isinstance(given, type):
            given = vars(given).get("__init__")
        elif inspect.ismethod(given):
            given = given.__func__
        elif hasattr(given, "__wrapped__"):
            given = given.__wrapped__
        elif not hasattr(given, "__code__") and callable(given):
            given = type(given).__call__
        else:
            break
    return given


# -- layers ------------------------------------------------------------------------------------------------------------


def of_module(model: nn.Module, name: str, make: Any = None) -> SourceLocation | None:
    """The line that makes the module of this dotted name: in the class that holds it, else in `make`, the model function."""
    parts = name.split(".")
    kind = type(model.get_submodule(name)).__name__
    for depth in reversed(range(len(parts))):
        parent = model.get_submodule(".".join(parts[:depth]))
        found = _made_in(type(parent), parts[depth], kind, _nth(parent, name, depth, kind))
        if found is not None:
            return SourceLocation(found.file, found.line, name)
    if make is None or isinstance(make, nn.Module):
        return None
    found = _made_in(make, "", kind, _nth(model, name, 0, kind))
    return None if found is None else SourceLocation(found.file, found.line, name)


def _nth(parent: nn.Module, name: str, depth: int, kind: str) -> int:
    """The index of the module among those of its kind below the parent."""
    inner = ".".join(name.split(".")[depth:])
    same = [n for n, module in parent.named_modules() if type(module).__name__ == kind and n]
    return same.index(inner) if inner in same else 0


def _made_in(owner: Any, attribute: str, kind: str, nth: int) -> SourceLocation | None:
    """The call of `kind` in the source of a class or function: in an assignment to self.attribute, else the nth call."""
    source = _source(owner)
    if source is None:
        return None
    assigned = list(_assigned(source.tree, attribute))
    calls = [call for value in assigned for call in _calls(value, kind)]
    if not assigned:
        calls = list(_calls(source.tree, kind))
        calls = calls[nth : nth + 1] or calls[-1:]
    lines = [call.lineno for call in calls] or [value.lineno for value in assigned]
    return SourceLocation(source.file, min(lines)) if lines else None


def _assigned(tree: ast.AST, attribute: str) -> Iterator[ast.expr]:
    """The values assigned to `self.attribute`."""
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(t, ast.Attribute) and t.attr == attribute for t in targets):
            yield value


def _calls(tree: ast.AST, kind: str) -> Iterator[ast.Call]:
    """Calls of a function of this name, in the order of their lines."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [c for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) == kind]
    yield from sorted(named, key=lambda call: (call.lineno, call.col_offset))


@dataclass(frozen=True)
class _Source:
    """The definition of a function or class."""

    file: str
    line: int
    tree: ast.AST


def _source(given: Any) -> _Source | None:
    """None if there is no source of the user's."""
    inner = given if isinstance(given, type) else _unwrapped(given)
    try:
        file = inspect.getsourcefile(inner)
        line = inspect.getsourcelines(inner)[1] if isinstance(inner, type) else inner.__code__.co_firstlineno
    except (OSError, TypeError, AttributeError):  # built in, or made where no file is
        return None
    if file is None or not is_users(file):
        return None
    linecache.checkcache(file)
    try:
        tree = _tree("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook's cell with a line of IPython's own
        return None
    definitions = [node for node in ast.walk(tree) if _first_line(node) == line]
    code = getattr(inner, "__code__", None)
    arguments = [] if code is None else list(code.co_varnames[: code.co_argcount])
    same = [  # of several lambdas in one line
        node
        for node in definitions
        if isinstance(node, ast.Lambda | ast.FunctionDef) and [one.arg for one in node.args.args] == arguments
    ]
    return _Source(file, line, (same or definitions)[0]) if definitions else None


@lru_cache(maxsize=32)
def _tree(source: str) -> ast.AST:
    return ast.parse(source)


def _first_line(node: ast.AST) -> int:
    """The line of a definition or of its first decorator; 0 for other nodes."""
    if isinstance(node, ast.Lambda):
        return node.lineno
    if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return 0
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
