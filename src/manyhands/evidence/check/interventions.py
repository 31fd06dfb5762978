"""Functions of torch that keep N workers from equalling one, and what to do in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BATCH_NORM, DROPOUT, RANDOMNESS, IN_PLACE = "batch-norm", "dropout", "randomness", "in-place-change"


def words(text: str) -> frozenset[str]:
    """Names with spaces between them."""
    return frozenset(text.split())


_DROPOUTS = words(
    "dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_"
)
_RECURRENT = words("lstm gru rnn_tanh rnn_relu")
_DRAWS = words(
    "rand randn randint randperm bernoulli multinomial normal uniform exponential random log_normal cauchy geometric "
    "poisson binomial gumbel_softmax rrelu trunc_normal _sample_dirichlet _standard_gamma"
)
_NO_WRITES = words("requires_grad_ share_memory_ detach_ rename_")


@dataclass(frozen=True)
class FunctionCall:
    """A function that is about to be called."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")

    @property
    def target(self) -> Any:
        """Its first argument."""
        return self.args[0] if self.args else self.kwargs.get("input")

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, however it was given."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def having(self, position: int, name: str, value: Any) -> FunctionCall:
        """The same with another argument."""
        if name in self.kwargs or position >= len(self.args):
            return replace(self, kwargs={**self.kwargs, name: value})
        return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))


@dataclass(frozen=True)
class Effect:
    """What a call does to equality, and what to do in its place."""

    kind: str
    instead: Callable[[], Any]


def effect_of(call: FunctionCall) -> Effect | None:
    """None for a call that treats rows apart and draws nothing."""
    for recognize in (_batch_norm, _dropout, _attention, _recurrent, _draw):
        found = recognize(call)
        if found is not None:
            return found
    return None


def write_of(call: FunctionCall, guarded: frozenset[int]) -> Effect | None:
    """A write to one of the `guarded` storages, given by their addresses."""
    if not guarded or not _writes(call):
        return None
    written = call.target if isinstance(call.target, list | tuple) else [call.target]
    if not any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in guarded for t in written):
        return None
    returns_nothing = call.name in ("__set__", "__setitem__")
    return Effect(IN_PLACE, lambda: None if returns_nothing else call.target)


def _writes(call: FunctionCall) -> bool:
    """Whether it changes its first argument; of attributes, `data` alone."""
    if call.name == "__set__":
        return getattr(getattr(call.function, "__self__", None), "__name__", "") == "data"
    in_place = call.name.endswith("_") and not call.name.endswith("__") and call.name not in _NO_WRITES
    return in_place or call.name == "__setitem__"


# -- recognized ----------------------------------------------------------------------------------------------------------


def _batch_norm(call: FunctionCall) -> Effect | None:
    if call.name != "batch_norm" or not call.get(5, "training", False):
        return None
    first = 1 if call.function is F.batch_norm else 3  # torch.batch_norm has weight and bias before the statistics

    def instead() -> Any:
        plain, features = call.having(5, "training", False), call.target.shape[1]
        for position, name, value in ((first, "running_mean", 0.0), (first + 1, "running_var", 1.0)):
            if call.get(position, name) is None:
                plain = plain.having(position, name, call.target.detach().new_full((features,), value))
        return plain.run()

    return Effect(BATCH_NORM, instead)


def _dropout(call: FunctionCall) -> Effect | None:
    if call.name not in _DROPOUTS:
        return None
    active = call.get(2, "train" if "train" in call.kwargs else "training", True)
    return Effect(DROPOUT, lambda: call.target) if active and call.get(1, "p", 0.5) > 0 else None


def _attention(call: FunctionCall) -> Effect | None:
    position, training = 4, True
    if call.name == "multi_head_attention_forward":
        position, training = 10, call.get(13, "training", True)
    elif call.name != "scaled_dot_product_attention":
        return None
    if not training or not call.get(position, "dropout_p", 0.0):
        return None
    return Effect(DROPOUT, lambda: call.having(position, "dropout_p", 0.0).run())


def _recurrent(call: FunctionCall) -> Effect | None:
    """(input, hidden, weights, has_biases, layers, dropout, train, …), of packed sequences one later."""
    if call.name not in _RECURRENT:
        return None
    weights = next(i for i, argument in enumerate(call.args) if isinstance(argument, list))
    dropout, train = call.args[weights + 3 : weights + 5]
    return Effect(DROPOUT, lambda: call.having(weights + 3, "dropout", 0.0).run()) if dropout and train else None


def _draw(call: FunctionCall) -> Effect | None:
    base = _base(call)
    if base not in _DRAWS or (base == "rrelu" and not call.get(3, "training", False)):
        return None
    return Effect(RANDOMNESS, lambda: _middle(call))


def _base(call: FunctionCall) -> str:
    return call.name.removesuffix("_").removesuffix("_like")


def _middle(call: FunctionCall) -> Any:
    """In place of a draw: the middle of what it may give, the same for every element; where none is known, the draw."""
    base = _base(call)
    if base == "rrelu":
        return call.having(3, "training", False).run()
    if base == "gumbel_softmax":
        return torch.softmax(call.target / call.get(1, "tau", 1.0), call.get(4, "dim", -1))
    drawn = call.run()
    with torch.no_grad():
        _settle(base, call, drawn)
    return drawn


def _settle(base: str, call: FunctionCall, drawn: Tensor) -> None:
    if base == "rand":
        drawn.fill_(0.5)
    elif base in ("randn", "trunc_normal"):
        drawn.zero_()
    elif base == "uniform":
        drawn.fill_((call.get(1, "from", 0.0) + call.get(2, "to", 1.0)) / 2)
    elif base == "exponential":
        drawn.fill_(1 / call.get(1, "lambd", 1.0))
    elif base == "normal":
        mean = call.get(1 if call.name == "normal_" else 0, "mean", 0.0)
        drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
    elif base == "bernoulli":
        chance = call.get(1, "p")
        drawn.copy_(torch.as_tensor(call.target if chance is None else chance) >= 0.5)
    elif base in ("randint", "random"):
        drawn.fill_(_least(call))
    elif base == "randperm":
        drawn.copy_(torch.arange(len(drawn)))
    elif base == "multinomial":
        drawn.copy_(call.target.argsort(-1, descending=True)[..., : drawn.shape[-1]])


def _least(call: FunctionCall) -> int:
    """Of randint(low, high, size), randint(high, size) and their in-place kin."""
    bounds = [argument for argument in call.args if type(argument) is int]
    given = call.kwargs.get("low")
    return int(given) if given is not None else bounds[0] if len(bounds) > 1 else 0
