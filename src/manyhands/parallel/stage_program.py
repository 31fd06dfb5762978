"""One stage's span of the task's own program: what comes before it is skipped, and it stops where the next one begins."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from manyhands.comm.stage_channel import Sent
from manyhands.errors import Unsupported
from manyhands.parallel.absent import Absent, on, tensors_of
from manyhands.parallel.build import buffers_kept, without_parameters
from manyhands.parallel.marks import noted
from manyhands.parallel.trace import Cut, Numbering, ValuePlace, around_of, seen_modules, uncompiled

_REMEDY = "a stage must call the same modules in the same order for every batch: cut elsewhere, or train without stages"


class _StageOver(BaseException):
    """Leaves the program at the next stage's first module."""


@dataclass
class StagePass:
    """One run over a micro-batch, forward and back."""

    received: list[Sent] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # that the next stage needs
    result: Any = None  # of the last stage's program
    gradients: list[Tensor | None] = field(default_factory=list)  # of what was received, after backward

    def sent(self) -> list[Sent]:
        return [Sent(value, value.requires_grad) for value in self.values]

    def backward(self, gradients: Sequence[Sent]) -> list[Sent]:
        """The gradients of what was received. gradients: of `values`, from the next stage.

        Nothing of the run is kept: its graph holds this object, and nobody would free either.
        """
        pairs = [
            (value, one.tensor)
            for value, one in zip(self.values, gradients, strict=True)
            if value.requires_grad and one.tensor is not None
        ]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        found = self.gradients or [None] * len(self.received)
        back = [
            Sent(gradient if one.requires_grad else None) for one, gradient in zip(self.received, found, strict=True)
        ]
        self.received, self.values, self.result, self.gradients = [], [], None, []
        return back


class _Received(torch.autograd.Function):
    """What came from the stage before, as results of a function whose backward keeps their gradients. They are no leaves:
    the program may change them in place."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, own: StagePass) -> tuple[Tensor, ...]:
        ctx.own = own
        ctx.set_materialize_grads(False)
        values = [one.tensor for one in own.received if one.tensor is not None]
        ctx.mark_non_differentiable(
            *[one.tensor for one in own.received if one.tensor is not None and not one.requires_grad]
        )
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.own.gradients = list(gradients)
        return None, None


class StageProgram:
    """Runs one stage of a model whose other parameters are absent. The model stays as it is to everybody else."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[Cut],
        stage: int,
        recomputed: Collection[str] = (),
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        """cuts: between all stages, in order. recomputed: modules that keep what they are given alone, and compute the rest
        again in backward. device: where the model is."""
        self.model, self._recomputed, self._device = model, recomputed, device
        self.begin = cuts[stage - 1] if stage else None
        self.end = cuts[stage] if stage < len(cuts) else None
        self._active = self._before = False  # a run is under way; it has not reached this stage yet
        self._pass = StagePass()
        self._kept: dict[ValuePlace, Tensor] = {}
        self._shapes: dict[Any, Any] = {}  # what skipped modules give, by what they are given
        self._trigger = torch.zeros((), requires_grad=True)
        self._installed = ExitStack()
        self.skipped_s = 0.0
        """Seconds of the last run before it came to this stage."""
        self._places = {place for cut in (self.begin, self.end) if cut is not None for place in cut.places}
        marked = any(cut is not None and cut.marked for cut in (self.begin, self.end))
        numbers = marked or any(place.kind == "result" for place in self._places)
        self._numbering = Numbering(self._came_out) if numbers else None
        self._install()

    def run(self, function: Callable[[nn.Module, Any], Any], batch: Any, received: list[Sent]) -> StagePass:
        """`function(model, batch)` from this stage's first module to the next one's. received: of the stage before."""
        own = self._pass = StagePass(received)
        self._started = time.perf_counter()
        self._active, self._before, self._kept = True, self.begin is not None, {}
        try:
            with on(self._device), noted(self._marked), nullcontext() if self._numbering is None else self._numbering:
                own.result = function(self.model, batch)
            if self._before or self.end is not None:
                missed = self.begin if self._before else self.end
                assert missed is not None
                raise Unsupported(f"the program did not call {missed.name}, where a stage begins; {_REMEDY}")
        except _StageOver:
            pass
        finally:
            self._active, self._kept = False, {}
        return own

    def remove(self) -> None:
        """The model is as before this program was made of it."""
        self._installed.close()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        modules = seen_modules(self.model)
        outputs = {place.module for place in self._places if place.kind == "output"}
        around = {name for cut in (self.begin, self.end) if cut is not None for name in around_of(cut.name)}
        for name, module in modules.items():
            if self._numbering is not None:
                self._number(name, module)
            if name in outputs:
                self._hooked(module.register_forward_hook(self._catcher(name), with_kwargs=True))
            if name in self._recomputed and name not in around:
                self._replace_forward(module, self._recomputing(module, module.forward))
            if self.begin is None or not name or name == self.begin.name or name in around_of(self.begin.name):
                continue
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                self._replace_forward(module, self._skipper(module.forward))
        if self.begin is not None and not self.begin.marked:
            self._hooked(modules[self.begin.name].register_forward_pre_hook(self._at_begin, with_kwargs=True))
        if self.end is not None and not self.end.marked:
            self._hooked(modules[self.end.name].register_forward_pre_hook(self._at_end, with_kwargs=True))

    def _hooked(self, handle: RemovableHandle) -> None:
        self._installed.callback(handle.remove)

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        own = module.__dict__.get("forward")  # of this object alone, not of its class

        def put_back() -> None:
            if own is None:
                del module.forward
            else:
                module.forward = own

        self._installed.callback(put_back)
        module.forward = types.MethodType(forward, module)

    def _number(self, name: str, module: nn.Module) -> None:
        numbering = self._numbering
        assert numbering is not None

        def enter(module: nn.Module, args: Any) -> None:
            if self._active:
                numbering.enter(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._active:
                numbering.leave()

        self._hooked(module.register_forward_pre_hook(enter, prepend=True))
        self._hooked(module.register_forward_hook(leave))

    def _skipper(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a module's forward: before this stage it gives absent tensors."""

        def skip(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self._active and self._before):
                return forward(*args, **kwargs)
            leaves: Sequence[Any] = args
            spec: Any = len(args)
            if kwargs or not all(isinstance(one, Tensor) for one in args):  # flattening takes longer than all the rest
                leaves, spec = pytree.tree_flatten((args, kwargs))
            with (
                DisableTorchFunctionSubclass()
            ):  # an absent tensor's shape is that of its memory, which takes no detour
                key = (id(module), module.training, spec, *map(_kind_of, leaves))
            if key not in self._shapes:
                with (
                    without_parameters(module),
                    uncompiled(module),
                    torch.no_grad(),
                ):  # tied ones that are here, too; buffers are others' to write
                    output = forward(*args, **kwargs)
                found, shape = pytree.tree_flatten(output)
                if any(isinstance(leaf, Tensor) and not isinstance(leaf, Absent) for leaf in found):
                    return output  # of inputs that every stage has: computed each time
                self._shapes[key] = found, shape
            found, shape = self._shapes[key]
            return pytree.tree_unflatten(
                [Absent.like(leaf) if isinstance(leaf, Absent) else leaf for leaf in found], shape
            )

        return skip

    def _recomputing(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a module's forward: between forward and back it holds its arguments alone (Chen et al., Training
        Deep Nets with Sublinear Memory Cost, 2016). Generators and buffers are as if it ran once."""

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._active or self._before or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            again = False

            def body(*args: Any, **kwargs: Any) -> Any:
                nonlocal again
                if not again:
                    again = True
                    return forward(*args, **kwargs)
                with buffers_kept(module):
                    return forward(*args, **kwargs)

            return checkpoint(body, *args, use_reentrant=False, **kwargs)

        return run

    def _catcher(self, name: str) -> Callable[..., None]:
        def caught(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._active:
                for leaf, value in enumerate(tensors_of(output)):
                    self._kept[ValuePlace("output", name, leaf)] = value

        return caught

    def _came_out(self, module: str, number: int, result: Any) -> None:
        for leaf, value in enumerate(tensors_of(result)):
            if (place := ValuePlace("result", module, leaf, number)) in self._places:
                self._kept[place] = value

    def _marked(self, value: Any) -> Any:
        """At a call of `mh.cut`."""
        if self._numbering is None:
            return value
        name = self._numbering.mark()
        if self.end is not None and name == self.end.name:
            self._at_end(self.model, (value,), {})
        if self.begin is not None and name == self.begin.name:
            ((value,), _) = self._at_begin(self.model, (value,), {})
        return value

    def _at_begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._active:
            return None
        if not self._before:
            raise Unsupported(
                f"the program calls {self.begin and self.begin.name} again, where a stage begins; {_REMEDY}"
            )
        assert self.begin is not None
        came: list[Any] = [one.tensor for one in self._pass.received]
        if torch.is_grad_enabled() and any(one.requires_grad for one in self._pass.received):
            came = list(_Received.apply(self._trigger, self._pass))  # type: ignore[no-untyped-call]
        for place, value in zip(self.begin.places, came, strict=True):
            target = self._found(place, (args, kwargs))
            if not isinstance(target, Absent):
                raise Unsupported(
                    f"a value that {place.module} gives is needed by the stage that begins at {self.begin.name}, and both stages compute it, of a parameter "
                    "that they share: cut elsewhere"
                )
            target.fill(value)
        self._before = False
        self.skipped_s = time.perf_counter() - self._started
        return pytree.tree_map(_filled, (args, kwargs))

    def _at_end(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._active:
            return
        assert self.end is not None
        self._pass.values = [_filled(self._found(place, (args, kwargs))) for place in self.end.places]
        raise _StageOver

    def _found(self, place: ValuePlace, arguments: Any) -> Tensor:
        try:
            return tensors_of(arguments)[place.leaf] if place.kind == "argument" else self._kept[place]
        except (IndexError, KeyError):
            raise Unsupported(
                f"a value that {place.module} gave when the model was traced is not there for this batch; {_REMEDY}"
            ) from None


def _filled(value: Any) -> Any:
    return value.filled if isinstance(value, Absent) and value.filled is not None else value


def _kind_of(leaf: Any) -> Any:
    """Of a tensor its shape and dtype; of other things themselves, or their class."""
    if isinstance(leaf, Tensor):
        return isinstance(leaf, Absent), tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else type(leaf)
