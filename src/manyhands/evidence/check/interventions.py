"""Functions of torch that keep N workers from equalling one: recognized, recorded and replaced while a user's code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from manyhands.evidence.check import source_locations
from manyhands.evidence.check.source_locations import SourceLocation

BATCH_NORM, DROPOUT, RANDOMNESS, IN_PLACE = "batch-norm", "dropout", "randomness", "in-place-change"
FULL_SUM = "sum"  # the kind of a recorded sum over all elements


def name_set(names: str) -> frozenset[str]:
    """The names in a text, separated by spaces."""
    return frozenset(names.split())


_LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
_CASTS_TO_LOW = name_set("float half bfloat16")
METADATA_FUNCTIONS = name_set(
    "__get__ __set__ __delete__ __hash__ __repr__ __len__ __deepcopy__ __reduce_ex__ size dim stride numel data_ptr "
    "storage untyped_storage is_floating_point element_size requires_grad_ retain_grad register_hook "
    "share_memory_"
)
"""Functions of the tensor object and not of its values: a copy in float64 would be another object."""
_DROPOUTS = name_set(
    "dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_"
)
_RECURRENT = name_set("lstm gru rnn_tanh rnn_relu")
_DRAWS = name_set(
    "rand randn randint randperm bernoulli multinomial normal uniform exponential random log_normal cauchy geometric "
    "poisson binomial gumbel_softmax rrelu trunc_normal _sample_dirichlet _standard_gamma"
)
_OWN = str(Path(__file__).parents[2])
_NO_WRITES = name_set("requires_grad_ share_memory_ detach_ rename_")


@dataclass(frozen=True)
class RecordedCall:
    """A call that an intervention applies to, or a sum over all elements."""

    kind: str
    function: str
    place: SourceLocation | None
    module: nn.Module | None  # the module whose forward made the call


class FunctionMode(TorchFunctionMode):
    """Intercepts every function of torch that the user's code calls from Python.

    Calls inside of C++ operators and of TorchScript are not intercepted.
    """

    def __init__(
        self,
        *,
        double: bool = False,
        without: frozenset[str] = frozenset(),
        guarded: frozenset[int] = frozenset(),
        record: bool = False,
        after: Callable[[FunctionCall, Any], None] | None = None,
        of_script: bool = False,
    ) -> None:
        """double: floating tensors in arguments become float64, and so does every floating dtype that is requested.
        without: kinds of intervention to apply. batch-norm: running statistics replace the batch's; dropout: p = 0;
            randomness: the midpoint of its range replaces a draw; in-place-change: writes to `guarded` storages
            (given by address) are skipped.
        record: fill `recorded`. after: called with every call and its result.
        of_script: a whole script runs inside: what manyhands' own code calls is left alone, and so is backward().
        """
        super().__init__()
        self.double, self.without, self.guarded, self.record, self.after = double, without, guarded, record, after
        self.of_script = of_script
        self.recorded: list[RecordedCall] = []
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
        if self.of_script and (func is Tensor.backward or sys._getframe(1).f_code.co_filename.startswith(_OWN)):
            return call.run()
        if call.function is Tensor.backward:
            return self._backward(call)
        if self.double:
            call = _call_in_float64(call)
        found = intervention_for(call) or write_to(call, self.guarded)
        if found is not None and self.record:
            self._record(found.kind, call)
        result = found.replacement() if found is not None and found.kind in self.without else call.run()
        if self.record and is_full_sum(call, result):
            self._record(FULL_SUM, call)
        if self.after is not None:
            self.after(call, result)
        return result

    def _backward(self, call: FunctionCall) -> None:
        """Run the backward pass under a mode of its own, so that recomputation (activation checkpoints) is intercepted.

        A mode is off while its own `__torch_function__` runs. The autograd engine uses the modes that are on when it
        is called.
        """
        if any(option is not None and option is not False for option in (*call.args[1:], *call.kwargs.values())):
            call.run()  # the training loop calls backward() without options
            return
        nested = FunctionMode(
            double=self.double, without=self.without, guarded=self.guarded, record=self.record, after=self.after
        )
        nested.recorded = self.recorded
        ones = torch.ones_like(call.target)
        with nested:
            torch.autograd.Variable._execution_engine.run_backward(
                (call.target,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _record(self, kind: str, call: FunctionCall) -> None:
        place, module = source_locations.running(), source_locations.module_running()
        self.recorded.append(RecordedCall(kind, call.name, place, module))


@contextmanager
def eager() -> Iterator[None]:
    """Run functions of torch.compile uncompiled: a FunctionMode does not intercept compiled code."""
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def is_full_sum(call: FunctionCall, result: Any) -> bool:
    """Whether the call sums all elements to one number."""
    summing = call.name in ("sum", "nansum") or call.kwargs.get("reduction") == "sum"
    return summing and isinstance(result, Tensor) and result.numel() == 1


def _call_in_float64(call: FunctionCall) -> FunctionCall:
    """The call with float64 arguments. A tensor that it writes to is passed as it is."""
    if call.name in METADATA_FUNCTIONS:
        return call
    function = torch.Tensor.double if call.name in _CASTS_TO_LOW else call.function
    written = call.name.endswith("_") or call.name == "__setitem__"
    args = tuple(a if written and not i else _to_float64(a) for i, a in enumerate(call.args))
    kwargs = {name: value if name == "out" else _to_float64(value) for name, value in call.kwargs.items()}
    return replace(call, function=function, args=args, kwargs=kwargs)


def _to_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _LOW_PRECISION else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW_PRECISION else value
    if type(value) in (list, tuple):
        return type(value)(_to_float64(item) for item in value)
    return value


# -- calls and what replaces them --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionCall:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")

    @property
    def target(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs.get("input")

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, given by position or by name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def with_argument(self, position: int, name: str, value: Any) -> FunctionCall:
        """The call with one argument replaced."""
        if name in self.kwargs or position >= len(self.args):
            return replace(self, kwargs={**self.kwargs, name: value})
        return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))


@dataclass(frozen=True)
class Intervention:
    """A kind of call that breaks equality, and what replaces it."""

    kind: str
    replacement: Callable[[], Any]


def intervention_for(call: FunctionCall) -> Intervention | None:
    """None for a call that treats each row separately and draws nothing."""
    for recognize in (_batch_norm, _dropout, _attention, _recurrent, _draw):
        found = recognize(call)
        if found is not None:
            return found
    return None


def write_to(call: FunctionCall, guarded: frozenset[int]) -> Intervention | None:
    """The intervention for a write to one of the `guarded` storages, given by their addresses."""
    if not guarded or not _writes(call):
        return None
    written = call.target if isinstance(call.target, list | tuple) else [call.target]
    if not any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in guarded for t in written):
        return None
    returns_nothing = call.name in ("__set__", "__setitem__")
    return Intervention(IN_PLACE, lambda: None if returns_nothing else call.target)


def _writes(call: FunctionCall) -> bool:
    """Whether the call changes its first argument. Of attributes only `data` counts."""
    if call.name == "__set__":
        return getattr(getattr(call.function, "__self__", None), "__name__", "") == "data"
    in_place = call.name.endswith("_") and not call.name.endswith("__") and call.name not in _NO_WRITES
    return in_place or call.name == "__setitem__"


def _batch_norm(call: FunctionCall) -> Intervention | None:
    if call.name != "batch_norm" or not call.get(5, "training", False):
        return None
    first = 1 if call.function is F.batch_norm else 3  # torch.batch_norm has weight and bias before the statistics

    def replacement() -> Any:
        plain, features = call.with_argument(5, "training", False), call.target.shape[1]
        for position, name, value in ((first, "running_mean", 0.0), (first + 1, "running_var", 1.0)):
            if call.get(position, name) is None:
                plain = plain.with_argument(position, name, call.target.detach().new_full((features,), value))
        return plain.run()

    return Intervention(BATCH_NORM, replacement)


def _dropout(call: FunctionCall) -> Intervention | None:
    if call.name not in _DROPOUTS:
        return None
    active = call.get(2, "train" if "train" in call.kwargs else "training", True)
    return Intervention(DROPOUT, lambda: call.target) if active and call.get(1, "p", 0.5) > 0 else None


def _attention(call: FunctionCall) -> Intervention | None:
    position, training = 4, True
    if call.name == "multi_head_attention_forward":
        position, training = 10, call.get(13, "training", True)
    elif call.name != "scaled_dot_product_attention":
        return None
    if not training or not call.get(position, "dropout_p", 0.0):
        return None
    return Intervention(DROPOUT, lambda: call.with_argument(position, "dropout_p", 0.0).run())


def _recurrent(call: FunctionCall) -> Intervention | None:
    """The arguments are (input, hidden, weights, has_biases, layers, dropout, train, …); `weights` is the only list."""
    if call.name not in _RECURRENT:
        return None
    weights = next(i for i, argument in enumerate(call.args) if isinstance(argument, list))
    dropout, train = call.args[weights + 3 : weights + 5]
    if not (dropout and train):
        return None
    return Intervention(DROPOUT, lambda: call.with_argument(weights + 3, "dropout", 0.0).run())


def _draw(call: FunctionCall) -> Intervention | None:
    base = call.name.removesuffix("_").removesuffix("_like")
    if base not in _DRAWS or (base == "rrelu" and not call.get(3, "training", False)):
        return None
    return Intervention(RANDOMNESS, lambda: _midpoint_of_draw(base, call))


def _midpoint_of_draw(base: str, call: FunctionCall) -> Any:
    """The midpoint of the range of a draw, for every element; the draw itself where no midpoint is known."""
    if base == "rrelu":
        return call.with_argument(3, "training", False).run()
    if base == "gumbel_softmax":
        return torch.softmax(call.target / call.get(1, "tau", 1.0), call.get(4, "dim", -1))
    drawn = call.run()
    with torch.no_grad():
        match base:
            case "rand":
                drawn.fill_(0.5)
            case "randn" | "trunc_normal":
                drawn.zero_()
            case "uniform":
                drawn.fill_((call.get(1, "from", 0.0) + call.get(2, "to", 1.0)) / 2)
            case "exponential":
                drawn.fill_(1 / call.get(1, "lambd", 1.0))
            case "normal":
                mean = call.get(1 if call.name == "normal_" else 0, "mean", 0.0)
                drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
            case "bernoulli":
                chance = call.get(1, "p")
                drawn.copy_(torch.as_tensor(call.target if chance is None else chance) >= 0.5)
            case "randint" | "random":  # (low, high, size), (high, size) and in place: the lower bound
                bounds = [argument for argument in call.args if type(argument) is int]
                low = call.kwargs.get("low")
                drawn.fill_(int(low) if low is not None else bounds[0] if len(bounds) > 1 else 0)
            case "randperm":
                drawn.copy_(torch.arange(len(drawn)))
            case "multinomial":
                drawn.copy_(call.target.argsort(-1, descending=True)[..., : drawn.shape[-1]])
    return drawn


# -- the first operation in which two passes differ --------------------------------------------------------------------

NOISE = 1e-7  # sums of the same rows in another batch may differ by rounding

Sums = tuple[tuple[float, float, float], ...]  # of each tensor of a result: (sum, position-weighted sum, absolute sum)


@dataclass(frozen=True)
class OperationRecord:
    """A call that returned tensors, and their sums."""

    function: str
    place: SourceLocation | None
    module: nn.Module | None
    whole: Sums
    first: Sums  # over the first half of the rows; empty where the tensors have no rows
    second: Sums


class OperationLog:
    """Records the operations of a pass over a batch of `rows`, an even number: give `after` to a FunctionMode."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.operations: list[OperationRecord] = []

    def after(self, call: FunctionCall, result: Any) -> None:
        if call.name in METADATA_FUNCTIONS:
            return
        with torch.no_grad():
            tensors = [t.detach().double() for t in tensors_of(result) if t.numel() and not t.is_complex()]
            halves = [t for t in tensors if t.dim() and t.shape[0] % self.rows == 0]
            self.operations.append(
                OperationRecord(
                    function=call.name,
                    place=source_locations.running(),
                    module=source_locations.module_running(),
                    whole=sums(tensors),
                    first=sums([t[: t.shape[0] // 2] for t in halves]),
                    second=sums([t[t.shape[0] // 2 :] for t in halves]),
                )
            )


def first_change(one: OperationLog, other: OperationLog) -> OperationRecord | None:
    """The first operation in which two passes over the same batch differ."""
    return _first(one, other, lambda a, b: not near(a.whole, b.whole, 0.0))


def first_mixing(ab: OperationLog, bc: OperationLog) -> OperationRecord | None:
    """Of passes over rows A, B and over rows B, C: the first operation whose values for B differ."""
    return _first(ab, bc, lambda a, b: not (near(a.whole, b.whole, 0.0) or near(a.second, b.first, NOISE)))


def _first(
    one: OperationLog, other: OperationLog, differs: Callable[[OperationRecord, OperationRecord], bool]
) -> OperationRecord | None:
    for a, b in zip(one.operations, other.operations, strict=False):
        if a.function != b.function or len(a.whole) != len(b.whole):
            return a  # the passes took different branches
        if differs(a, b):
            return a
    return None


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def sums(tensors: list[Tensor]) -> Sums:
    found = []
    for t in tensors:
        # [numel] another factor for each element, so that a permutation changes the sum
        factors = torch.arange(t.numel(), dtype=torch.float64, device=t.device).mul_(0.7).cos_()
        found.append((float(t.sum()), float(t.reshape(-1) @ factors), float(t.abs().sum())))
    return tuple(found)


def near(a: Sums, b: Sums, share: float) -> bool:
    """Whether all sums differ by at most `share` of the absolute sum; NaN equals NaN."""
    return len(a) == len(b) and all(
        str(x) == str(y) or all(abs(p - q) <= share * max(x[2], y[2]) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )
