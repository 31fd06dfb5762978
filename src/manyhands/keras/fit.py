"""A script's own `model.fit(...)` on the workers at hand: `manyhands run --auto` of a Keras script."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.observed.script import Observed, StepGroup

_SAME = (
    "x",
    "y",
    "sample_weight",
    "class_weight",
    "validation_data",
    "validation_split",
    "batch_size",
    "epochs",
    "shuffle",
)
"""Arguments of `fit` that `mh.keras.task` takes as they are."""
_REFUSED = {
    "initial_epoch": "leave it out: the epochs of a run are counted from 0",
    "steps_per_epoch": "leave it out, or give max_steps to mh.keras.task",
    "validation_steps": "leave it out: validation reads all rows",
    "validation_freq": "leave it out: validation follows each epoch",
}


@dataclass(frozen=True)
class FitOnWorkers:
    """`FitOnWorkers(strategy)(path)`: within, `keras.Model.fit` trains on all workers that make the same call.

    Each computes its rows of the model's calls, see `own_loop.whole`; with a strategy of which each worker has its own
    model, or with slices, `fit` is a task of `mh.train`.
    """

    strategy: str = "allreduce"
    batches: str | None = None

    @property
    def sees_whole(self) -> bool:
        """Whether the script computes with whole batches."""
        return Observed(self.strategy, self.batches).sees_whole

    @contextmanager
    def in_float64(self, stepped: Callable[[str, Sequence[StepGroup]], None]) -> Iterator[None]:
        """See `evidence.check.rehearsal.Watching`."""
        os.environ["KERAS_BACKEND"] = "torch"
        from manyhands.keras.backend import keras

        plain, before = keras.optimizers.Optimizer.apply, keras.config.floatx()

        def apply(optimizer: Any, *given: Any, **named: Any) -> Any:
            found = plain(optimizer, *given, **named)
            parameters = [variable.value for variable in optimizer._trainable_variables]
            stepped(type(optimizer).__name__, [StepGroup(float(optimizer.learning_rate), parameters)])
            return found

        keras.optimizers.Optimizer.apply = apply
        keras.config.set_floatx("float64")
        try:
            yield
        finally:
            keras.optimizers.Optimizer.apply = plain
            keras.config.set_floatx(before)

    @contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        from manyhands.own_loop.prepare import session

        if session().worker.size == 1:
            yield
            return
        backend = backend_of(Path(path).read_text(encoding="utf-8"), os.environ)
        if backend != "torch":
            raise BadInput(
                f"manyhands trains Keras models on the torch backend, and {Path(path).name} runs on {backend}: set KERAS_BACKEND=torch"
            )
        os.environ["KERAS_BACKEND"] = backend
        from manyhands.keras.backend import keras

        if self.sees_whole:
            with _callbacks_in_turn(), Observed(self.strategy, self.batches)(path):
                yield
            return
        strategy, plain = self.strategy, keras.Model.fit

        def fit(model: Any, *given: Any, **named: Any) -> Any:
            bound = inspect.signature(plain).bind(model, *given, **named)
            return fit_on_workers(model, strategy, plain, bound.arguments)

        keras.Model.fit = fit
        try:
            yield
        finally:
            keras.Model.fit = plain


@contextmanager
def _callbacks_in_turn() -> Iterator[None]:
    """Within, callbacks look at outputs in the thread that computes, so that all workers do so in one order."""
    from keras.src import backend

    before, backend.IS_THREAD_SAFE = backend.IS_THREAD_SAFE, False
    try:
        yield
    finally:
        backend.IS_THREAD_SAFE = before


def fit_on_workers(model: Any, strategy: str, plain: Any, arguments: dict[str, Any]) -> Any:
    """`model.fit` with these arguments, as a task of `mh.train`; the History that `fit` returns. A collective."""
    from manyhands.keras.backend import keras
    from manyhands.keras.declare import task
    from manyhands.training.train import train

    parameters = inspect.signature(plain).parameters
    for name, todo in _REFUSED.items():
        if arguments.get(name, parameters[name].default) != parameters[name].default:
            raise Unsupported(f"fit({name}={arguments[name]!r}) cannot be shared by several workers: {todo}")
    fields = {name: arguments[name] for name in _SAME if name in arguments}
    if fields.get("batch_size", 0) is None:
        del fields["batch_size"]
    history = keras.callbacks.History()
    callbacks = [*(arguments.get("callbacks") or ()), history]
    if arguments.get("verbose", "auto") != 0:
        epochs = fields.get("epochs", 1)
        say = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: _say_epoch(epoch, epochs, logs or {}))
        callbacks.append(say)
    train(task(model, fields.pop("x", None), fields.pop("y", None), callbacks=callbacks, **fields), strategy=strategy)
    model.history = history
    return history


def _say_epoch(epoch: int, epochs: int, logs: dict[str, Any]) -> None:
    """What a script's reader expects of `fit`, one line an epoch."""
    values = " - ".join(f"{name}: {float(value):.4f}" for name, value in logs.items())
    sys.stdout.write(f"Epoch {epoch + 1}/{epochs} - {values}\n")


def backend_of(text: str, environment: Mapping[str, str]) -> str:
    """The backend that a script sets before it imports Keras, else the environment's, else torch."""
    found = environment.get("KERAS_BACKEND", "torch")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            keys = [one.slice for one in node.targets if isinstance(one, ast.Subscript)]
            if any(isinstance(key, ast.Constant) and key.value == "KERAS_BACKEND" for key in keys):
                found = str(node.value.value)
    return found
