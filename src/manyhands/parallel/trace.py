"""Where a model can be cut into stages: its program, run once without parameters and without their memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from manyhands import rng, units
from manyhands.errors import BadInput, Line, Unsupported, calling_line
from manyhands.parallel.absent import Absent, on, recorded, tensors_of
from manyhands.parallel.build import build, move, tied_names, without_parameters
from manyhands.parallel.marks import noted
from manyhands.parallel.planner.partition import partition, sums

_NEARLY = 1.1  # so much larger a stage may be where cuts at outermost calls, at which fewer values cross, are to be had


@dataclass(frozen=True)
class ValuePlace:
    """How a value that is needed after a cut is found, on both of its sides."""

    kind: Literal["argument", "output", "result"]
    """Of the call at the cut; of a module that was called before; of a function in the body of a module around the cut."""
    module: str
    leaf: int  # which of the tensors in it
    number: int = 0  # of a function's call in that body


@dataclass(frozen=True)
class Cut:
    """A module call at which a stage may begin."""

    name: str
    time: int
    places: tuple[ValuePlace, ...]  # of the values that cross it
    values: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # their shapes, for the micro-batch that was traced
    marked: bool = False  # a call of `mh.cut`

    @property
    def nbytes(self) -> int:
        """Of the values, for the micro-batch that was traced."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.values)


@dataclass(frozen=True)
class ModelTrace:
    """What a program does with a model, as far as a cut needs to know it."""

    cuts: tuple[Cut, ...]  # all possible ones, in order
    refused: dict[str, str]  # why another module can begin no stage
    uses: dict[str, tuple[int, ...]]  # of each parameter, by its first name
    sizes: dict[str, int]  # how many numbers each parameter has
    names: dict[str, str]  # of tied parameters: {a further name: the first one}
    buffers: dict[str, int]  # when the module is called that has it, first
    calls: tuple[tuple[int, str], ...]  # when a module is called, and what it is and is given

    def chosen(self, names: Sequence[str]) -> list[Cut]:
        """The cuts at these modules. BadInput for what is none, or out of order."""
        by_name = {cut.name: cut for cut in self.cuts}
        for name in names:
            if name in by_name:
                continue
            near = get_close_matches(name, [*by_name, *self.refused], n=3)
            why = self.refused.get(
                name, "the model has no such module" + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
            raise BadInput(f"cut={name}: {why}{'' if why.endswith('?') else '.'} Stages may begin at {self._listed()}")
        found = [by_name[name] for name in names]
        if any(a.time >= b.time for a, b in pairwise(found)):
            raise BadInput(
                f"cut=[{','.join(names)}] is not in the order of the calls: {', '.join(cut.name for cut in sorted(found, key=lambda cut: cut.time))}"
            )
        return found

    def equal_cuts(self, stages: int) -> list[Cut]:
        """Cuts whose largest stage has as few parameters as can be, or nearly, where outermost calls do. BadInput where there
        are too few."""
        if stages - 1 > len(self.cuts):
            raise BadInput(
                f"stages={stages} needs {stages - 1} places to cut the model, and it has {len(self.cuts)}: {self._listed()}. Give fewer stages"
            )
        if len(marked := [cut for cut in self.cuts if cut.marked]) >= stages - 1 > 0:
            return self._balanced(marked, stages)[1]
        outer = self.outermost
        best, cuts = self._balanced(self.cuts, stages)
        cost, outermost = self._balanced(outer, stages)
        return outermost if cost <= _NEARLY * best else cuts

    @property
    def chain(self) -> list[Cut]:
        """Between the units of which a planner makes stages: marks where there are any, else the outermost cuts."""
        return [cut for cut in self.cuts if cut.marked] or self.outermost

    @property
    def outermost(self) -> list[Cut]:
        """Those of the possible cuts that lie in no other's module."""
        return self.units(())

    def units(self, cuts: Sequence[Cut]) -> list[Cut]:
        """The outermost of the possible cuts whose modules lie in one stage each, where stages begin at these cuts."""
        split = {name for cut in cuts for name in around_of(cut.name)}
        names = {cut.name for cut in self.cuts} - split
        return [cut for cut in self.cuts if cut.name in names and names.isdisjoint(around_of(cut.name))]

    def _balanced(self, cuts: Sequence[Cut], stages: int) -> tuple[float, list[Cut]]:
        """(how many numbers the largest stage has, its cuts)"""
        times = [cut.time for cut in cuts]
        sizes = [0] * (len(times) + 1)  # of the units, how many numbers each has, from one possible cut to the next
        for name, size in self.sizes.items():
            sizes[bisect_right(times, self.uses[name][0]) if self.uses[name] else 0] += size
        found = partition(len(sizes), stages, sums(sizes))
        return found.cost, [cuts[start - 1] for start in found.starts]

    def stages_of(self, cuts: Sequence[Cut]) -> dict[str, tuple[int, ...]]:
        """{parameter: the stages that use it}; one that is never used belongs to the first."""
        times = [cut.time for cut in cuts]
        return {
            name: tuple(sorted({bisect_right(times, time) for time in at})) or (0,) for name, at in self.uses.items()
        }

    def stage_of(self, buffer: str, cuts: Sequence[Cut]) -> int:
        """The stage that writes a buffer."""
        return bisect_right([cut.time for cut in cuts], self.buffers[buffer])

    def _listed(self) -> str:
        return units.listed([cut.name for cut in self.cuts], 12) or "no module of it"


def trace(model: nn.Module | Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Any], batch: Any) -> ModelTrace:
    """Run `loss` on one micro-batch with all parameters absent. Neither the random stream nor a given module changes.

    Unsupported, with file and line, for a program that reads values of which a stage has none, and for a loss that itself
    reads most of the parameters.
    """
    device = next((tensor.device for tensor in tensors_of(batch)), torch.device("cpu"))
    with rng.kept(), on(device):
        if isinstance(model, nn.Module):
            with without_parameters(model) as bare:
                return _traced(move(bare, device), loss, batch)
        return _traced(move(build(model, draws=False), device), loss, batch)


def check_not_compiled(model: nn.Module) -> None:
    """Unsupported for a model whose module calls nobody sees, because all of it is compiled, or a module in place."""
    if _is_compiled(model):
        raise Unsupported(
            "model_parallel: the model is compiled as a whole (torch.compile(model)), and stages are spans of its modules' calls: compile blocks, "
            "model.blocks[i] = torch.compile(model.blocks[i])"
        )
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            what = f"the module {name} is" if name else "the model is"
            raise Unsupported(
                f"model_parallel: {what} compiled in place (.compile()), and so are the hooks by which stages see its calls: compile blocks by "
                "torch.compile, model.blocks[i] = torch.compile(model.blocks[i])"
            )


def seen_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Its modules by name, but for those within one that torch.compile made: they run as one."""
    found: dict[str, nn.Module] = {}
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{one}.") for one in compiled):
            continue
        found[name] = module
        if _is_compiled(module):
            compiled.append(name)
    return found


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Within, modules that torch.compile made run as they are written: no compiler takes absent tensors."""
    compiled = any(map(_is_compiled, model.modules()))
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__module__ == "torch._dynamo.eval_frame"  # which takes a second to import


@dataclass
class _Call:
    time: int
    name: str
    arguments: list[Tensor]
    marked: bool = False


@dataclass
class _Record:
    """Notes of one run."""

    time: int = 0
    calls: list[_Call] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)  # by id: when a value was made
    values: list[Absent] = field(default_factory=list)  # all of them, so that no id comes twice
    last_use: dict[int, int] = field(default_factory=dict)
    of_parameters: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[int, list[tuple[str, int, str, int]]] = field(default_factory=dict)  # (module, leaf, around, when)
    results: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # (module, number, leaf)
    depth: int = 0  # of module calls under way; 0: the program is in the loss itself
    of_loss: dict[str, Line] = field(default_factory=dict)  # parameters that the loss itself reads, and where first

    def call(self, name: str, arguments: Any, *, marked: bool = False) -> None:
        self.time += 1
        self.calls.append(_Call(self.time, name, tensors_of(arguments), marked))
        for value in self.calls[-1].arguments:
            if isinstance(value, Absent):
                self.used(value)

    def made(self, absent: Absent) -> None:
        self.born[id(absent)] = self.time
        self.values.append(absent)

    def used(self, absent: Absent) -> None:
        if absent.parameter is None:
            self.last_use[id(absent)] = self.time
        else:
            self.of_parameters.setdefault(absent.parameter, []).append(self.time)
            if not self.depth and absent.parameter not in self.of_loss:
                self.of_loss[absent.parameter] = calling_line()


@dataclass
class _Body:
    """One call of a module."""

    module: str
    functions: int = 0  # called in it so far
    marks: int = 0


class Numbering(TorchFunctionMode):
    """Numbers the functions that are called in the body of each module call, in order."""

    def __init__(self, result: Callable[[str, int, Any], None]) -> None:
        """result: called with the module, the number, and what came out."""
        super().__init__()
        self._result, self._bodies = result, [_Body("")]

    def enter(self, module: str) -> None:
        self._bodies.append(_Body(module))

    def leave(self) -> None:
        self._bodies.pop()

    @property
    def body(self) -> str:
        """The module in whose body the program is."""
        return self._bodies[-1].module

    def mark(self) -> str:
        """The name of a mark that the program comes to."""
        body = self._bodies[-1]
        body.marks += 1
        return f"{body.module}.cut{body.marks}".lstrip(".")

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":
            body = self._bodies[-1]
            body.functions += 1
            self._result(body.module, body.functions, result)
        return result


def _traced(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> ModelTrace:
    check_not_compiled(model)
    record, modules = _Record(), seen_modules(model)
    names = {module: name for name, module in modules.items()}

    def came_out(module: str, number: int, result: Any) -> None:
        for leaf, value in enumerate(tensors_of(result)):
            if isinstance(value, Absent):  # others end, and their id comes again
                record.results.setdefault(id(value), (module, number, leaf))

    numbering = Numbering(came_out)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        record.call(names[module], (args, kwargs))
        record.depth += 1
        numbering.enter(names[module])

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        numbering.leave()
        record.depth -= 1
        for leaf, value in enumerate(tensors_of(output)):
            if isinstance(value, Absent):
                record.outputs.setdefault(id(value), []).append((names[module], leaf, numbering.body, record.time))
        record.time += 1

    def marked(value: Any) -> Any:
        record.call(numbering.mark(), value, marked=True)
        record.time += 1
        return value

    handles = []
    for module in modules.values():
        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
    try:
        with recorded(record), noted(marked), uncompiled(model), numbering:
            loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    calls = Counter(call.name for call in record.calls)
    if calls[""] != 1:
        raise Unsupported(
            f"the loss calls the model {units.count(calls[''], 'time')}, and a stage is a span of one call: call it once, on all that it needs"
        )
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    _check_penalty(record.of_loss, sizes)
    cuts, refused = _cuts(record, calls, modules)
    uses = {name: tuple(sorted(set(record.of_parameters.get(name, [])))) for name, _ in model.named_parameters()}
    first = {call.name: call.time for call in reversed(record.calls)}
    buffers = {name: first.get(_nearest(name, modules), 0) for name, _ in model.named_buffers()}
    kinds = tuple((call.time, _kind(modules.get(call.name), call.arguments)) for call in record.calls)
    return ModelTrace(tuple(cuts), refused, uses, sizes, tied_names(model), buffers, kinds)


def _kind(module: nn.Module | None, arguments: list[Tensor]) -> str:
    """Of a call; two that are alike cost the same."""
    given = [f"{list(value.shape)} {value.dtype}" for value in arguments]
    return f"{type(module).__name__}({'' if module is None else module.extra_repr()}) {given}"


def _check_penalty(of_loss: dict[str, Line], sizes: dict[str, int]) -> None:
    """Unsupported for a loss that itself reads most of the parameters: the stage that computes it would hold them all."""
    read = sum(sizes.get(name, 0) for name in of_loss)
    if 2 * read <= sum(sizes.values()):
        return
    name, line = next(iter(of_loss.items()))
    raise Unsupported(
        f"{line}: the loss reads {name} and other parameters itself, {read:,} numbers of {sum(sizes.values()):,}, and a stage holds its own alone. A penalty on "
        "weights is the optimizer's weight_decay; another term belongs into the forward of the module that has the parameter"
    )


def _cuts(record: _Record, calls: Counter[str], modules: dict[str, nn.Module]) -> tuple[list[Cut], dict[str, str]]:
    """(the possible ones, why others are none)"""
    cuts, refused = list[Cut](), dict[str, str]()
    first = min((min(times) for times in record.of_parameters.values()), default=0)
    for name, module in modules.items():
        if name and not calls[name]:
            refused[name] = (
                "it is not called"
                if not isinstance(module, nn.ModuleList | nn.ModuleDict)
                else "it holds modules and is not called itself"
            )
    taken: set[frozenset[int]] = set()
    for call in record.calls:
        if not call.name:
            continue
        alive = [value for value in record.values if value.parameter is None and _is_alive(record, value, call.time)]
        if calls[call.name] > 1:
            refused[call.name] = f"it is called {calls[call.name]} times"
        elif not call.marked and not any(True for _ in modules[call.name].parameters()):
            refused[call.name] = "it has no parameters"
        elif call.time <= first:
            refused[call.name] = "nothing is computed before it"
        elif not alive:
            refused[call.name] = "it needs nothing of what comes before it"
        else:
            places = [_place(record, value, call) for value in alive]
            if None in places:
                value = alive[places.index(None)]
                refused[call.name] = (
                    f"a value of shape {list(value.shape)} is needed after it that is neither its argument nor what a module before it gave"
                )
            elif (crossing := frozenset(map(id, alive))) in taken and not call.marked:
                refused[call.name] = "a module around it, or one before it, begins at the same place"
            else:
                taken.add(crossing)
                values = tuple((tuple(value.shape), value.dtype) for value in alive)
                found = tuple(place for place in places if place is not None)
                cuts.append(Cut(call.name, call.time, found, values, call.marked))
    return cuts, refused


def _is_alive(record: _Record, value: Absent, time: int) -> bool:
    return record.born[id(value)] < time <= record.last_use.get(id(value), -1)


def _place(record: _Record, value: Absent, call: _Call) -> ValuePlace | None:
    around = around_of(call.name)
    for leaf, argument in enumerate(call.arguments):
        if argument is value:
            return ValuePlace("argument", call.name, leaf)
    for module, leaf, body, when in record.outputs.get(id(value), []):
        if body in around and when < call.time:
            return ValuePlace("output", module, leaf)
    found = record.results.get(id(value))
    return ValuePlace("result", found[0], found[2], found[1]) if found is not None and found[0] in around else None


def _nearest(name: str, modules: dict[str, nn.Module]) -> str:
    """Of these modules the innermost one in which a buffer lies."""
    return next(one for one in sorted(around_of(name), key=len, reverse=True) if one in modules)


def around_of(name: str) -> set[str]:
    """The modules in which one lies, the model itself among them."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(len(parts))}
