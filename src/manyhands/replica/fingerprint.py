"""What must be alike on all workers: code, versions, settings and rows before the first tick, parameters later.

A worker's facts are a dict of JSON values by what they are called in an error. All workers gather them by one
collective and raise the same error. Facts leave out what may lawfully differ: paths, addresses of objects, functions
and their closures, rows that each worker reads for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import rng
from manyhands.data.batch import columns
from manyhands.data.ragged import Ragged
from manyhands.data.source import Pick, Planned, Reading, Source
from manyhands.data.strata import Strata
from manyhands.errors import LIBRARIES, BadInput, ManyhandsError
from manyhands.replica.flat_vector import FlatVector
from manyhands.worker import Worker

Facts = dict[str, Any]

REMEDY = (
    "Put the same files and versions on every host. Read settings that must differ from environment variables, and rows "
    "that only one host has from an IterableDataset"
)

ROWS = 4  # of each source that are read and compared
CLOSE = 1e-3
"""Means of rows nearer than this are alike: decoders and vector units of other machines round otherwise."""
ROUNDING = 1e-4
"""Replicas nearer than this, as a share of their norm, differ by rounding: other vector units or libraries."""

_ALWAYS = ("torch", "numpy")
_BACKEND = "manyhands_backend"  # this library's own, beside the package
_PATH = re.compile(r"[~/\\]|[A-Za-z]:[/\\]")
_LIBRARIES = (*LIBRARIES, f"{Path(__file__).parents[1]}/")


def compare(worker: Worker, facts: Callable[[], Facts]) -> None:
    """A collective: BadInput on all workers where one's facts are not worker 0's."""
    if found := differences(worker, facts):
        raise BadInput(f"{found}. {REMEDY}")


def differences(worker: Worker, facts: Callable[[], Facts]) -> str:
    """A collective: whose facts are not worker 0's, and which; "" where all are alike. A fact that only one of them has
    is none.

    Workers of one process have the same code and data: they look at nothing.
    """
    return next(iter(differing(worker, facts, 0).values()), "")


def differing(worker: Worker, facts: Callable[[], Facts], of: int) -> dict[int, str]:
    """A collective: the ranks whose facts are not those of rank `of`, and how they differ."""
    if worker.size == 1 or worker.shares_process:
        return {}
    everyone = worker.group.all_gather_json({"host": worker.host, "name": worker.worker_id, "facts": facts()})
    theirs, found = everyone[of], {}
    where = f"worker {theirs['name']} ({theirs['host']})"
    for rank, other in enumerate(everyone):
        if differences := _differing(theirs["facts"], other["facts"], where):
            who = f"worker {other['name']} on {other['host']} differs from worker {theirs['name']}"
            found[rank] = f"{who}: {'; '.join(differences)}"
    return found


def _differing(facts: Facts, others: Facts, where: str) -> list[str]:
    """Those of worker 0's facts that are others there."""
    return [
        f"{name} is {_shown(others[name])}, and on {where} it is {_shown(value)}"
        for name, value in facts.items()
        if name in others and not _alike(value, others[name])
    ]


def _alike(one: Any, other: Any) -> bool:
    """Equal, or lists of numbers that are close, each beside the mean size of what it sums up."""
    if isinstance(one, dict) and isinstance(other, dict):  # of `_column`
        size = max(one["size"], other["size"])
        return one["of"] == other["of"] and all(
            abs(a - b) <= CLOSE * size for a, b in zip(one["means"], other["means"], strict=True)
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return "rows with the means " + ", ".join(f"{part['means'][0]:.4g}" for part in value[:4])
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- code and versions -----------------------------------------------------------------------------------------------


def of_code(*used: Any) -> Facts:
    """{"code of my": digest, "version of numpy": "2.1.0"}: of the user's modules that are loaded, and of the libraries
    that they or `used` come from.

    Comments, layout and line numbers are no part of a digest, nor are constants that are absolute paths.
    """
    own = dict(_own_modules())
    facts: Facts = {}
    for name, module in own.items():
        digest = _digest_of(name, module)
        if digest is not None:
            facts[f"code of {name}"] = digest
    facts["version of python"] = platform.python_version()
    for root in sorted({*_ALWAYS, *_roots([*(vars(module) for module in own.values()), *map(_namespace, used)])}):
        version = getattr(sys.modules.get(root), "__version__", None)
        if isinstance(version, str):
            facts[f"version of {root}"] = version.partition("+")[0]
    return facts


def _own_modules() -> Iterator[tuple[str, ModuleType]]:
    """Loaded modules that lie in no library."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name != _BACKEND and not _in_a_library(file):
            yield name, module


def _in_a_library(file: str) -> bool:
    """Whether it belongs to Python, to an installed package or to this one, or is no Python source."""
    return file.startswith(_LIBRARIES) or not file.endswith(".py") or "-packages/" in file


def _digest_of(name: str, module: ModuleType) -> str | None:
    """None for a file that is gone, or that has changed into no Python since it was imported."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        return digest_of_code(name, Path(str(module.__file__)).read_bytes())
    return None


@functools.lru_cache(maxsize=1024)  # a program that trains often compiles its modules once
def digest_of_code(name: str, source: bytes) -> str:
    """Equal for what computes the same: without file, lines, comments, layout, and the values of absolute paths."""
    return _digest(_of_code(compile(source, name, "exec", dont_inherit=True)))


def _of_code(code: CodeType) -> list[Any]:
    names = [code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars]
    return [names, code.co_flags, code.co_argcount, code.co_code.hex(), [_constant(c) for c in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, frozenset):
        return ["a set", *sorted(map(repr, value))]
    if isinstance(value, tuple):
        return [_constant(part) for part in value]
    if isinstance(value, str):
        return "a path" if _PATH.match(value) else value
    return repr(value)


def _namespace(used: Any) -> dict[str, Any]:
    """What an object of the task refers to, as far as its libraries are concerned."""
    if isinstance(used, functools.partial):
        return {**_namespace(used.func), "arguments": used.args, **used.keywords}
    if isinstance(used, nn.Module):
        return {str(i): kind for i, kind in enumerate({type(module) for module in used.modules()})}
    return {**getattr(used, "__globals__", {}), "itself": used}


def _roots(namespaces: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The top-level packages of what stands in these namespaces."""
    for namespace in namespaces:
        for value in list(namespace.values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(type(value), "__module__", "")
            if isinstance(value, type) or callable(value):
                name = getattr(value, "__module__", "")
            if isinstance(name, str) and name:
                yield name.partition(".")[0]


# -- settings --------------------------------------------------------------------------------------------------------


def of_settings(**settings: Any) -> Facts:
    """Numbers and texts; of a dataclass its class and such fields, else the class: a repr may hold addresses."""
    return {name.replace("_", " "): _setting(value) for name, value in settings.items()}


def _setting(value: Any) -> Any:
    plain = _plain(value)
    if plain is not _UNKNOWN:
        return plain
    named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)} if is_dataclass(value) else {}
    options = ",".join(f"{name}={option}" for name, option in named.items() if option is not _UNKNOWN)
    return type(value).__name__ + (f"({options})" if options else "")


def of_model(model: nn.Module) -> Facts:
    """Its class, how many parameters it has, and a digest of all their names, shapes and types."""
    named = [*model.named_parameters(), *model.named_buffers()]
    listed = [f"{name} {list(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for name, tensor in named]
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"the model": f"{type(model).__name__} of {count:,} parameters", "the list of parameters": _digest(listed)}


def of_optimizer(optimizer: torch.optim.Optimizer, schedule: Any = None) -> Facts:
    """Classes and hyperparameters, a group's beside another's; what is no number, text or tuple of them is left out."""
    groups = optimizer.param_groups
    facts: Facts = {"the optimizer": type(optimizer).__name__, "the number of parameter groups": len(groups)}
    names = dict.fromkeys(name for group in groups for name in group if name != "params")
    for name in names:
        values = [_plain(group.get(name)) for group in groups]
        if _UNKNOWN not in values:
            facts[f"the optimizer's {name}"] = values[0] if all(value == values[0] for value in values) else values
    return facts if schedule is None else facts | _of_schedule(schedule, "the schedule")


def _of_schedule(schedule: Any, what: str) -> Facts:
    facts: Facts = {what: type(schedule).__name__}
    for name, value in vars(schedule).items():
        if name == "_schedulers":  # those that a chain or a sequence is made of
            for i, part in enumerate(value):
                facts |= _of_schedule(part, f"{what}'s part {i}")
        elif not name.startswith("_") and (plain := _plain(value)) is not _UNKNOWN:
            facts[f"{what}'s {name}"] = plain
    return facts


_UNKNOWN = "?"


def _plain(value: Any) -> Any:
    """A number, a text, or a list of them; `_UNKNOWN` for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return _UNKNOWN if _UNKNOWN in parts else parts
    if value is None or isinstance(value, int | float | str):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return _UNKNOWN


# -- rows ------------------------------------------------------------------------------------------------------------


def of_rows(source: Source, what: str, seed: int) -> Facts:
    """How many rows there are, and a few of them, where all workers are to see the same ones.

    They are read twice under one seed: where they differ from themselves they are no evidence. A stream is left alone:
    each worker reads its own part. The process's generators stand afterwards as they did.
    """
    source = source.inner if isinstance(source, Strata) else source
    if not isinstance(source, Planned):
        return {}
    facts: Facts = {f"the number of rows of {what}": source.rows}
    keys = source.samples(ROWS)
    if keys is None:
        return facts
    pick, reading = Pick(0, keys, len(keys)), Reading(seed=seed)
    first, second = (_read(source, pick, reading) for _ in range(2))
    return facts | ({f"a sample of {what}": first} if first == second else {})


def _read(source: Planned, pick: Pick, reading: Reading) -> list[dict[str, Any]]:
    with rng.kept():
        rng.seed_all(reading.seed)
        with closing(source.load(iter([pick]), reading)) as slices:
            return [_column(column) for _, column in columns(next(slices).batch)]


def _column(column: Any) -> dict[str, Any]:
    """A column as its mean and slope. Texts are exact, without paths; of other objects only the kind counts."""
    column = [*column] if isinstance(column, Ragged) else column
    if isinstance(column, list | tuple):
        texts = ["a path" if isinstance(value, str) and _PATH.match(value) else repr(value) for value in column]
        return {"of": texts, "means": [], "size": 0.0}
    if isinstance(column, np.ndarray) and column.dtype.kind in "fiub":
        column = torch.from_numpy(column.astype(np.float64))
    if not isinstance(column, Tensor) or column.layout != torch.strided or column.is_complex() or not column.numel():
        return {"of": [type(column).__name__, len(column)], "means": [], "size": 0.0}
    values = column.detach().cpu().double().nan_to_num().flatten()
    slope = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    means = [float(values.mean()), float((values * slope).mean())]
    return {"of": list(column.shape), "means": means, "size": float(values.abs().mean())}


# -- replicas --------------------------------------------------------------------------------------------------------


def compare_replicas(
    worker: Worker, parameters: FlatVector, norm: Callable[[FlatVector], float], facts: Facts, step: int
) -> None:
    """A collective: ManyhandsError on all workers where parameters that should be equal are not; a warning where
    only rounding differs.

    One pass over the parameters and one small message; where sums differ, worker 0's parameters travel to all.
    """
    everyone = worker.group.all_gather_json([_bits(parameters), facts, worker.mesh.coordinate])
    first = {part: bits for bits, _, part in reversed(everyone)}  # of each part of the model, the lowest rank's
    if all(bits == first[part] for bits, _, part in everyone):
        return
    of_0 = parameters.clone()
    of_0.broadcast_(worker.mesh.data, 0)
    own = norm(parameters - of_0) / max(norm(of_0), 1e-30)
    apart = worker.group.all_gather_json({"host": worker.host, "apart": own})
    rank = max(range(worker.size), key=lambda r: apart[r]["apart"])
    found, share = _differing(everyone[0][1], everyone[rank][1], "worker 0"), apart[rank]["apart"]
    where = f"worker {rank} on {apart[rank]['host']}"
    if share <= ROUNDING and not found:
        if worker.rank == 0:
            message = (
                f"the parameters of {where} differ from worker 0's by rounding ({share:.1g} of their norm, at step "
                f"{step}): do the machines or library versions differ?"
            )
            worker.emit("warning", step=step, kind="replicas", message=message)
        return
    raise ManyhandsError(
        f"the workers' models must be equal, and differ at step {step}: the parameters of {where} are off worker 0's "
        f"by {share:.2g} of their norm{''.join(f'; {one}' for one in found)}. Does the code, a library version, or "
        "code that changes parameters or rates differ there?"
    )


def _bits(parameters: FlatVector) -> int:
    """The sum of all bits, eight bytes a number, modulo 2^64: other bits, another sum."""
    total = 0
    for part in parameters.parts:
        whole = part.detach().view(torch.uint8)
        even = whole.numel() // 8 * 8
        rest = whole[even:].sum(dtype=torch.int64) if even < whole.numel() else 0
        total += int(whole[:even].view(torch.int64).sum() + rest)
    return total


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
