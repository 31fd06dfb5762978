"""The tables of docs that say what another system's word is here: their rows, and whether what they name is there.

In a row's last cell whatever stands in backquotes must be ours: a strategy's spec (which then trains), a command, an
expression of the API with its keywords, an option, an engine, a variable; or a library's own name that imports. One
letter as an option's value (`window=w`) stands for any, `…` for what a reader fills in.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import typer

import manyhands as mh
import plain
from manyhands import engines, spec, tasks
from manyhands.cli.commands import app
from manyhands.comm.codecs import codec_of
from manyhands.engines import cluster
from manyhands.engines.base import Engine
from manyhands.strategies import CATALOGUE, strategy_of

STEPS = 3
LETTERS = {"window": "2", "push_every": "2", "pull_every": "2", "period": "2", "alpha": "0.1", "momentum": "0.5"}
LETTERS |= {"tau": "0.001", "density": "0.1", "bound": "1", "backups": "1", "warmup": "2", "quorum": "2"}
LETTERS |= {"compress": "threshold:0.001"}
USERS = {"main", "train", "program"}  # functions of the reader's own program
FILES = {"events.jsonl", "result.json", "my.py", "train.py"}
LIBRARIES = ("torch", "pyspark", "keras", "torchrun", "pip")


@dataclass(frozen=True)
class Row:
    """A row of a table that compares."""

    section: str
    there: str
    here: str

    @property
    def key(self) -> str:
        return f"{self.section}: {self.there}"

    @property
    def named(self) -> list[str]:
        """What the last cell has in backquotes."""
        return codes(self.here)


def rows(page: Path) -> list[Row]:
    """Of all tables whose last column is `here`."""
    found: list[Row] = []
    section, inside = "", False
    for line in re.sub(r"(?ms)^```.*?^```$", "", page.read_text()).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] if line.startswith("|") else []
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not cells:
            inside = False
        elif cells[-1] == "here":
            inside = True
        elif inside and set(cells[-1]) != {"-"}:
            found.append(Row(section, " ".join(cells[:-1]), cells[-1]))
    return found


def resolve(code: str) -> None:
    """Raise AssertionError unless this is something of ours, or of a library; train what is a strategy."""
    if code.partition(":")[0] in CATALOGUE:
        train_briefly(filled_in(code))
    elif code.partition(":")[0] in tasks.CATALOGUE and ":" in code:
        check_task(code)
    elif code.split()[0] == "manyhands":
        check_command(shlex.split(code.replace("…", "")))
    elif code.partition(":")[0] in engines.CATALOGUE:
        engines.engine_of(code.replace("…", ""))
    elif code.startswith("--"):
        assert any(code.split()[0] in options for options in commands().values()), f"no command has {code}"
    elif code.partition(".")[0] in LIBRARIES:
        check_library(code)
    elif code not in cluster.NAMES and code not in FILES and not is_option(code):
        check_expression(expression(code))


# -- strategies -------------------------------------------------------------------------------------------------------


def filled_in(text: str) -> str:
    """A spec whose placeholders have become numbers."""
    name, _, options = text.partition(":")
    parts = [part.partition("=") for part in options.split(",") if part]
    values = [f"{key}={LETTERS[key] if is_placeholder(value) else value}" for key, _, value in parts]
    return name + (":" + ",".join(values) if values else "")


def is_placeholder(value: str) -> bool:
    return re.fullmatch(r"[A-Za-zη]|η·ρ|…|\w+:[a-z]", value) is not None


def ratings() -> mh.Task:
    """Of a few users and items, for strategies that train kernels alone."""
    users, items = np.arange(60) % 10, np.arange(60) % 8
    data = {"users": users, "items": items, "ratings": np.ones(60)}
    return mh.Task(kernel=mh.kernels.Factors(users=10, items=8, rank=2), rate=0.1, train_data=data)


@cache
def train_briefly(text: str) -> mh.Run:
    """Some steps on two simulated workers; what shares memory, and what is for one worker, on one real one."""
    strategy = strategy_of(text)
    alone = strategy.needs.one_worker or strategy.needs.one_host
    workers, engine = (1, "local") if alone else (2, "sim")
    task = ratings() if strategy.needs.kernel else plain.task(epochs=1)
    run = mh.train(task, strategy=strategy, engine=engine, workers=workers, max_steps=STEPS)
    assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
    return run


def check_task(text: str) -> None:
    """The options of a ready-made task, whose files are not there."""
    name, given = spec.parse(text)
    unknown = given.keys() - spec.options_of(spec.find(name, tasks.CATALOGUE, "task")).keys()
    assert not unknown, f"task {name} has no {sorted(unknown)}"


# -- commands and options ---------------------------------------------------------------------------------------------


@cache
def commands() -> dict[str, set[str]]:
    """{command: its options}"""
    group: Any = typer.main.get_command(app)
    return {name: {one for p in command.params for one in p.opts} for name, command in group.commands.items()}


def check_command(words: list[str]) -> None:
    assert words[1] in commands(), f"there is no command {words[1]}"
    script = next((i for i, word in enumerate(words) if word.endswith(".py") and words[1] == "run"), len(words))
    unknown = [word for word in words[2:script] if word.startswith("-") and word not in commands()[words[1]]]
    assert not unknown, f"manyhands {words[1]} has no {unknown}"


@cache
def options() -> set[str]:
    """Of everything that trains, launches, or brings rows, and of all strategies."""
    takers: list[Callable[..., Any]] = [mh.train, mh.compare, mh.launch, Engine.run, cluster.Cluster.rows]
    takers += [mh.predict, mh.evaluate]
    if find_spec("pyspark"):
        takers += [mh.spark.Estimator.__init__, mh.spark.frame]
    found = {name for taker in takers for name in inspect.signature(taker).parameters}
    found |= {field.name for field in dataclasses.fields(mh.Task)} | {"workers_per_host"}
    makers = [spec.find(one, tasks.CATALOGUE, "task") for one in tasks.CATALOGUE]
    makers += [spec.find(one, CATALOGUE, "strategy") for one in CATALOGUE]
    return found | {name for maker in makers for name in spec.options_of(maker)}


def is_option(code: str) -> bool:
    """`batch_size`, `batch_size=b`, `compress=bf16`."""
    name, _, value = code.partition("=")
    if name == "compress" and value and not is_placeholder(value):
        codec_of(value)
    return name in options()


# -- the API ----------------------------------------------------------------------------------------------------------


def check_library(code: str) -> None:
    """Where it is installed: `torch.autocast(…)`, `pyspark.ml.functions.predict_batch_udf`."""
    parts = code.partition("(")[0].split(".")
    if len(parts) == 1 or not find_spec(parts[0]):
        return
    for last in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:last]))
        except ModuleNotFoundError:
            continue
        for name in parts[last:]:
            found = getattr(found, name)
        return


def expression(code: str) -> ast.expr:
    try:
        return ast.parse(code.replace("…", "..."), mode="eval").body
    except SyntaxError:
        raise AssertionError(f"{code} is nothing of ours") from None


def roots() -> dict[str, Any]:
    from manyhands.worker import Worker

    known = {"mh": mh, "run": mh.Run, "cluster": cluster.Cluster, "worker": Worker}
    if find_spec("pyspark"):
        known |= {"fitted": mh.spark.Model, "Model": mh.spark.Model}
    return known


def check_expression(node: ast.expr) -> Any:
    """What an expression is, or of which class: names, attributes, and keywords of calls must exist."""
    match node:
        case ast.Name(id=name):
            if name not in {*USERS, *roots()} and not find_spec("pyspark"):
                pytest.skip("needs pyspark, for the options of mh.spark")
            assert name in {*USERS, *roots()}, f"{name} is nothing of ours"
            return roots().get(name)
        case ast.Attribute(value=value, attr=name):
            owner = check_expression(value)
            if owner is mh.Run and name == "model":  # of a kernel, where rows ask it for something
                return mh.kernels.WordVectors
            if name == "spark" and not find_spec("pyspark"):
                pytest.skip("needs pyspark")
            if isinstance(owner, type) and name in (fields := get_type_hints(owner)):
                return fields[name]
            assert hasattr(owner, name), f"{owner} has no {name}"
            return getattr(owner, name)
        case ast.Call(func=function, keywords=keywords):
            called = check_expression(function)
            if called is not None:
                takes = inspect.signature(called).parameters
                free = any(one.kind is one.VAR_KEYWORD for one in takes.values())
                fields = {field.name for field in dataclasses.fields(mh.Task)} if free else set()
                wrong = [one.arg for one in keywords if one.arg not in {*takes, *fields}]
                assert not wrong, f"{called} takes no {wrong}"
            return called if isinstance(called, type) else returned(called)
        case _:
            raise AssertionError(f"{ast.unparse(node)} is nothing of ours")


def returned(function: Any) -> Any:
    """The class that a function says it returns, as far as it is one."""
    name = getattr(function, "__annotations__", {}).get("return")
    return {"Worker": roots()["worker"], "Run": mh.Run}.get(str(name))


def is_nothing(row: Row) -> bool:
    """Whether the row says that there is nothing of the kind."""
    return row.here.startswith(("nothing", "not here", "not built yet"))


def codes(cell: str) -> list[str]:
    """What a cell has in backquotes."""
    return re.findall(r"`([^`]+)`", cell)
