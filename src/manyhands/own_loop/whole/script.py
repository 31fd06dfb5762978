"""A script of one process on all workers: each runs it whole, with the same random numbers and the same batches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch._functorch.apis
import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import Tensor, nn

from manyhands import rng, units
from manyhands.engines.driver.run_monitor import USER
from manyhands.errors import calling_line
from manyhands.own_loop.argument_checks import check_equal, named_tensors
from manyhands.own_loop.rank_zero import RankZeroLines
from manyhands.own_loop.whole.calls import Calls
from manyhands.own_loop.whole.equality import EqualFacts
from manyhands.own_loop.whole.exchange import Workers, mean_of_workers
from manyhands.own_loop.whole.gradients import GradientMeans
from manyhands.own_loop.whole.lazy import ShardedOutput, gathered
from manyhands.own_loop.whole.reading import LoaderReading
from manyhands.own_loop.whole.sharded_functions import parts_of, whole_gradient
from manyhands.worker import Worker

_grad, _apply = torch.autograd.grad, torch.autograd.Function.__dict__["apply"]
_add_param_group = torch.optim.Optimizer.add_param_group
_make_parameter = nn.Parameter.__new__
_SETTERS = {name: getattr(torch._C.TensorBase, name) for name in ("data", "grad")}
_TRANSFORMS = (  # whose functions see other tensors than what they are given
    (torch.jit.ScriptFunction, "__call__", torch.jit.ScriptFunction.__call__),
    (torch._functorch.apis, "vmap_impl", torch._functorch.vmap.vmap_impl),
    (torch._functorch.eager_transforms, "grad_impl", torch._functorch.eager_transforms.grad_impl),
)
_SHOWN = 3  # lines that look at outputs, in what is said at the end
_LEAST_BYTES, _LEAST_S = 1_000_000, 1.0  # less is not worth a line


class WholeScript:
    """Gradients of leaves become the mean over workers; see `Calls` and `LoaderReading` for the rest."""

    def __init__(self, worker: Worker, read: str | None = None, *, counts_steps: bool = True) -> None:
        """read: see `LoaderReading`. counts_steps: a backward is a step, of which nobody else tells the driver."""
        self._counts_steps = counts_steps
        self.worker, self.workers = worker, Workers(worker.mesh.data)
        self.say = RankZeroLines(self.workers.rank)
        facts = EqualFacts(self.workers)
        self.calls = Calls(self.workers, self.say, self._meet, self._know_module, facts)
        self.gradients = GradientMeans(self.workers, facts)
        self.reading = LoaderReading(self.workers, self.say, facts, self.calls.plainly, read)
        self.begins: Callable[[], None] = _nothing
        """Called once, before the first call of a module."""
        self.prepares: Callable[[list[torch.optim.Optimizer]], None] | None = None
        """Called with the optimizers that were made since, before the next call of a module and before a backward."""
        self.backwards = 0
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self._behind: Any = None  # torch.autograd.backward, while this one is installed

    # -- leaves --------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Every worker gets worker 0's model. A collective of all workers.

        Raises BadInput where the workers' models differ in more than values.
        """
        check_equal(self.workers.group, named_tensors(model), "prepare the same model")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                value = tensor.detach().contiguous().view(-1)
                self.workers.group.broadcast_(value, 0)
                tensor.data.copy_(value.view(tensor.shape))
        self._know(p for group in optimizer.param_groups for p in group["params"])
        self._know(model.parameters())

    def average_elsewhere(self, leaves: Iterable[Tensor]) -> None:
        """Somebody else averages what a backward adds to these leaves' gradients."""
        self._know(leaves := list(leaves))
        self.gradients.elsewhere |= {self.workers.leaves.number_of(leaf) for leaf in leaves}

    def _know(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if leaf.is_leaf and not leaf.is_meta:
                self.workers.leaves.add(leaf)

    def _meet(self, module: nn.Module) -> None:
        """A module is about to be called."""
        begins, self.begins = self.begins, _nothing
        begins()
        self._prepare_made()
        if next(module.parameters()) not in self.workers.leaves:
            self._know(module.parameters())

    def _know_module(self, module: nn.Module) -> None:
        self._know(module.parameters())

    def _prepare_made(self) -> None:
        if self.prepares is None or not self._made:
            return
        found = [optimizer for reference in self._made if (optimizer := reference()) is not None]
        self._made = []
        self.prepares(list(dict.fromkeys(found)))

    # -- what is replaced in torch -------------------------------------------------------------------------------------

    def install(self) -> None:
        """From now on, until `leave`. A collective: all workers draw the same numbers from here on."""
        rng.take_first(self.workers.group)
        self._replace()
        self.reading.install()
        watching = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(watching()))  # a process of the script is no worker

    @contextmanager
    def within(self) -> Iterator[None]:
        """Within, functions of torch are replaced as by `install`; readers are not."""
        self._replace()
        try:
            yield
        finally:
            self._put_back()

    def _replace(self) -> None:
        def add_param_group(optimizer: Any, group: Any) -> None:
            _add_param_group(optimizer, group)
            self._know(p for one in optimizer.param_groups for p in one["params"])
            self._made.append(weakref.ref(optimizer))

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            """A script's own function of outputs: it would not see that they are lazy."""
            if function.__module__.startswith(("manyhands.", "torch.nn.")):
                return _apply.__func__(function, *args, **kwargs)
            args, kwargs = gathered((args, kwargs), function.__name__)
            with self.calls.plainly():  # what it computes with modules would be lazy, too
                return _apply.__func__(function, *args, **kwargs)

        def transformed(plain: Any) -> Any:
            def transform(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = gathered((args, kwargs), "vmap")
                return plain(*args, **kwargs)

            return transform

        torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        self._behind = torch.autograd.backward
        torch.autograd.backward, torch.autograd.grad = self._average_after, self._average_of
        for place, name, plain in _TRANSFORMS:
            setattr(place, name, transformed(plain))

        def parameter(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
            return _make_parameter(kind, gathered(data, "Parameter"), requires_grad)

        nn.Parameter.__new__ = parameter  # type: ignore[assignment,method-assign]
        for name, plain in _SETTERS.items():
            setattr(Tensor, name, _gathering(plain))
        self.calls.install()

    def leave(self) -> None:
        """The script is over, or shares nothing any more. Nothing where it was said before."""
        if self._behind is None:
            return
        self.tell_costs()
        self.reading.remove()
        self._put_back()

    def _put_back(self) -> None:
        self.calls.remove()
        for place, name, plain in _TRANSFORMS:
            setattr(place, name, plain)
        nn.Parameter.__new__ = _make_parameter  # type: ignore[method-assign]
        for name in _SETTERS:
            delattr(Tensor, name)
        torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
        torch.autograd.backward, torch.autograd.grad = self._behind, _grad
        torch.optim.Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign]
        self._behind = None

    def tell_costs(self) -> None:
        """Say which lines needed whole outputs, where that has cost something."""
        found = sorted(self.workers.gathered.items(), key=lambda one: -one[1].bytes)
        size, seconds = sum(one.bytes for _, one in found), sum(one.seconds for _, one in found)
        if size < _LEAST_BYTES and seconds < _LEAST_S:
            return
        times = sum(one.times for _, one in found) / max(1, self.backwards)
        places = [f"{function} in {line} ({units.size(one.bytes)})" for (function, line), one in found[:_SHOWN]]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        self.say(
            f"outputs and inputs were gathered {units.short(times)} times a step, {units.size(size)} and {units.duration(seconds)} in all: by {', '.join(places)}{more}"
        )

    # -- backward ------------------------------------------------------------------------------------------------------

    def _average_after(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """In place of torch.autograd.backward."""
        if torch._C._current_graph_task_id() != -1:  # within another one, for torch.utils.checkpoint
            self._behind(*gathered((tensors, grad_tensors)), *args, **kwargs)
            return
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
        given = given if len(given) == len(losses) else [None] * len(losses)
        self._prepare_made()
        self.gradients.begin()
        self._behind(*parts_of(losses, given), *args, **kwargs)
        driver, group = self.worker.driver, self.workers.group
        if self._counts_steps:
            driver.progress("exchange", self.backwards)
        self.gradients.end(calling_line(), losses)
        self.backwards += 1
        if self._counts_steps:
            group.step = self.backwards
            driver.progress(USER, self.backwards)

    def _average_of(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of torch.autograd.grad."""
        outputs = gathered([outputs] if isinstance(outputs, Tensor) else list(outputs), "grad")
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        many = [one.part if _is_in_use(one) else gathered(one, "grad") for one in given]
        got = _grad(outputs, many, *args, **kwargs)
        return tuple(
            whole_gradient(one, gradient)
            if _is_in_use(one) and gradient is not None
            else self._averaged(gradient, leaf)
            for gradient, leaf, one in zip(got, many, given, strict=True)
        )

    def _averaged(self, gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
        if gradient is None or leaf not in self.workers.leaves:
            return gradient
        if gradient.requires_grad:
            return mean_of_workers(gradient, self.workers)
        return self.gradients.mean_of(gradient)


def _is_in_use(one: Any) -> TypeGuard[ShardedOutput]:
    """Whether the script may have computed with this worker's part of an output, and with no whole."""
    return isinstance(one, ShardedOutput) and not one.gathered and one.part.requires_grad


def _gathering(plain: Any) -> property:
    """Of tensors: what is assigned to it is gathered first."""
    return property(
        plain.__get__, lambda tensor, value: plain.__set__(tensor, gathered(value, "an assignment")), plain.__delete__
    )


def _nothing() -> None:
    pass


def _leave(script: WholeScript | None) -> None:
    if script is not None:
        script.workers.gathered.clear()  # its own process tells them
        script.leave()
