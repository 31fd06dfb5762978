"""Functions of torch seen, computed in float64, or taken away, while a user's loss runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from manyhands.evidence.check import source_locations
from manyhands.evidence.check.findings import SourceLocation
from manyhands.evidence.check.interventions import FunctionCall, effect_of, words, write_of

SUM = "sum"
"""What `Seen` says of a sum over everything."""

_LOW = (torch.float32, torch.float16, torch.bfloat16)
_TO_LOW = words("float half bfloat16")
OF_THE_TENSOR = words(  # not of its numbers: a tensor in float64 would be another one
    "__get__ __set__ __delete__ __hash__ __repr__ __len__ __deepcopy__ __reduce_ex__ size dim stride numel data_ptr "
    "storage untyped_storage is_floating_point element_size requires_grad_ retain_grad register_hook share_memory_"
)


@dataclass(frozen=True)
class Seen:
    """A call that did something worth knowing."""

    kind: str
    function: str
    place: SourceLocation | None
    module: nn.Module | None
    """Whose forward called it."""


class FunctionMode(TorchFunctionMode):
    """Stands between the user's code and every function of torch that is called from Python.

    What an operator does inside is not seen, nor what TorchScript calls.
    """

    def __init__(
        self,
        *,
        double: bool = False,
        without: frozenset[str] = frozenset(),
        guarded: frozenset[int] = frozenset(),
        look: bool = False,
        after: Callable[[FunctionCall, Any], None] | None = None,
    ) -> None:
        """double: every floating tensor that a function takes, and every floating type that is asked for, is float64.
        without: what is taken away. batch-norm: running statistics for the batch's; dropout: p = 0; randomness: the
            middle for a draw; in-place-change: nothing is written to `guarded` storages, given by their addresses.
        look: fill `seen`. after: called with every call and what it gave.
        """
        super().__init__()
        self.double, self.without, self.guarded, self.look, self.after = double, without, guarded, look, after
        self.seen: list[Seen] = []
        self._dtype = torch.get_default_dtype()

    def __enter__(self) -> FunctionMode:
        self._dtype = torch.get_default_dtype()
        if self.double:
            torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._dtype)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = FunctionCall(func, tuple(args), dict(kwargs or {}))
        if call.function is Tensor.backward:
            return self._backward(call)
        if self.double:
            call = _doubled(call)
        effect = effect_of(call) or write_of(call, self.guarded)
        if effect is not None and self.look:
            self._note(effect.kind, call)
        result = effect.instead() if effect is not None and effect.kind in self.without else call.run()
        if self.look and sums_up(call, result):
            self._note(SUM, call)
        if self.after is not None:
            self.after(call, result)
        return result

    def _backward(self, call: FunctionCall) -> None:
        """What is computed once more on the way back (a checkpoint) is seen, too.

        While a function that it was told of runs, a mode is off; the engine takes up those that are on when it is called.
        """
        if any(option is not None and option is not False for option in (*call.args[1:], *call.kwargs.values())):
            call.run()  # as no loop of manyhands' calls it
            return
        inside = FunctionMode(
            double=self.double, without=self.without, guarded=self.guarded, look=self.look, after=self.after
        )
        inside.seen = self.seen
        ones = torch.ones_like(call.target)
        with inside:
            torch.autograd.Variable._execution_engine.run_backward(
                (call.target,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _note(self, kind: str, call: FunctionCall) -> None:
        self.seen.append(Seen(kind, call.name, source_locations.running(), source_locations.module_running()))


@contextmanager
def eager() -> Iterator[None]:
    """Within, what torch.compile made runs as it was written: a Lens sees nothing of compiled code."""
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def sums_up(call: FunctionCall, result: Any) -> bool:
    """Whether it adds everything up to one number."""
    summing = call.name in ("sum", "nansum") or call.kwargs.get("reduction") == "sum"
    return summing and isinstance(result, Tensor) and result.numel() == 1


def _doubled(call: FunctionCall) -> FunctionCall:
    """The same in float64; what is written to stays what it is."""
    if call.name in OF_THE_TENSOR:
        return call
    function = torch.Tensor.double if call.name in _TO_LOW else call.function
    written = call.name.endswith("_") or call.name == "__setitem__"
    args = tuple(a if written and not i else _in_double(a) for i, a in enumerate(call.args))
    kwargs = {name: value if name == "out" else _in_double(value) for name, value in call.kwargs.items()}
    return replace(call, function=function, args=args, kwargs=kwargs)


def _in_double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _LOW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW else value
    if type(value) in (list, tuple):
        return type(value)(_in_double(item) for item in value)
    return value
