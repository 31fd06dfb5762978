"""The public names: every one resolves, none is loaded before it is asked for, and the catalogues and docs agree with them."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import manyhands as mh
from manyhands import engines, strategies, tasks
from manyhands.engines.base import Engine
from manyhands.strategies.base import Strategy

PACKAGE = Path(mh.__file__)
CATALOGUES = {"strategies": strategies.CATALOGUE, "engines": engines.CATALOGUE, "tasks": tasks.CATALOGUE}


def test_importing_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pandas", "pyarrow", "rich", "typer", "cloudpickle", "safetensors", "IPython"]
    code = f"import sys, manyhands; print(sorted(set({heavy}) & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def test_a_name_from_here_is_the_thing_itself_not_a_copy_nor_a_module_of_that_name() -> None:
    """`worker` is a function here and a module on disk: importing the module, which sets it here, does not hide it."""
    for name, module in mh._WHERE.items():
        thing = getattr(importlib.import_module(f"manyhands.{module}"), name)
        setattr(mh, name, ModuleType(name))
        assert getattr(mh, name) is thing, name
    assert all(importlib.util.find_spec(f"manyhands.{name}") for name in mh._MODULES)


def test_dir_lists_what_there_is_and_another_name_is_an_attribute_error() -> None:
    assert dir(mh) == sorted(set(mh.__all__))
    with pytest.raises(AttributeError, match="module 'manyhands' has no attribute 'trian'"):
        _ = mh.trian


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING and the lazy table name the same things in the same modules."""
    assert _typed() == {name: f"manyhands.{module}" for name, module in mh._WHERE.items()} | dict.fromkeys(
        mh._MODULES, "manyhands"
    )


def _typed() -> dict[str, str]:
    """{name: module} of the imports that only type checkers see; each must be `import name as name`, a re-export."""
    block = next(
        node
        for node in ast.parse(PACKAGE.read_text()).body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert alias.asname == alias.name, f"{ast.unparse(node)} is not a re-export"
            typed[alias.name] = str(node.module)
    return typed


def test_every_catalogue_entry_imports() -> None:
    bases = {"strategies": Strategy, "engines": Engine}
    for catalogue, rows in CATALOGUES.items():
        for name, where in rows.items():
            module, _, attribute = where.partition(":")
            made = getattr(importlib.import_module(module), attribute)
            if catalogue == "tasks":
                assert callable(made), name
                assert name in tasks.SUMMARIES
            else:
                assert issubclass(made, bases[catalogue]), name
                assert made.name == name
                assert getattr(mh, made.__name__) is made, name


def test_hints_lead_somewhere() -> None:
    """What others call it is a name of ours; and no name of ours is taken for another (CASE 20)."""
    assert not strategies.CATALOGUE.keys() & strategies.ELSEWHERE.keys()  # where these lead: test_names.py
    assert set(engines.HINTS.values()) <= engines.CATALOGUE.keys()
    assert not engines.CATALOGUE.keys() & engines.HINTS.keys()
