"""The user's Keras callbacks, called in the loop of worker 0. Their decisions apply to all workers.

They get the consensus: at an epoch's end the model has the weights that all replicas agree on, and the logs include all
workers' rows. All workers stop if `stop_training` is set and use a rate that is set. The weights in the model when
training ends (EarlyStopping's best) are the run's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from manyhands.errors import BadInput, Unsupported
from manyhands.keras import losses
from manyhands.keras.backend import keras
from manyhands.keras.module import KerasModule
from manyhands.keras.optimizer import KerasOptimizer
from manyhands.replica import evaluation
from manyhands.replica.replica import Replica
from manyhands.task import Summed
from manyhands.worker import Worker
from manyhands.worker_callback import WorkerCallback, WorkerCallbackFactory

_UNSUPPORTED = {
    "BackupAndRestore": "give train() a run_dir, and resume=True to continue",
    "SwapEMAWeights": "average the weights after training",
}
_DRAWS_APART = 1 << 20  # between the seed generators of two workers; a layer draws once a step


@dataclass(frozen=True)
class KerasCallbacks(WorkerCallbackFactory):
    """Of a Keras task: its callbacks, if any, and a different dropout on every worker."""

    callbacks: tuple[Any, ...]

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise BadInput(
                    f"callbacks of mh.keras.task must be keras.callbacks.Callback objects, not {callback!r}; manyhands' "
                    "own go to train(callbacks=…)"
                )
            if (name := type(callback).__name__) in _UNSUPPORTED:
                raise BadInput(f"{name} cannot be used with manyhands: {_UNSUPPORTED[name]}")

    @override
    def check(self, one_model: bool) -> None:
        if self.callbacks and not one_model:
            raise Unsupported(
                "Keras callbacks need one model, and the strategy trains one on each worker: leave callbacks out, or "
                "use another strategy"
            )

    @override
    def create(self, worker: Worker, replica: Replica) -> WorkerCallback | None:
        module = replica.model
        assert isinstance(module, KerasModule)
        for seed in module.seeds():
            seed[1] += worker.rank * _DRAWS_APART
        return KerasWorkerCallback(self.callbacks, worker, replica, module) if self.callbacks else None

    @override
    def on_result(self, result: Any) -> None:
        """Copy the attributes of worker 0's callbacks to the user's: `history`, `best`, `stopped_epoch`."""
        for callback, remembered in zip(self.callbacks, result or (), strict=False):
            vars(callback).update(remembered)


class KerasWorkerCallback(WorkerCallback):
    """On each worker: counts metrics; worker 0 calls the callbacks; all apply their decisions."""

    def __init__(self, callbacks: tuple[Any, ...], worker: Worker, replica: Replica, module: KerasModule) -> None:
        self._callbacks = callbacks if worker.rank == 0 else ()
        self._worker, self._module, self._model = worker, module, module.keras
        assert isinstance(replica.optimizer, KerasOptimizer)
        self._optimizer = replica.optimizer
        self._batches = 0  # of this worker, in this epoch
        self._logs: dict[str, float] = {}  # of the newest epoch

    @override
    def on_start(self, facts: Mapping[str, Any]) -> None:
        self._module.counts = True
        self._model.stop_training = False
        for callback in self._callbacks:
            callback.set_params({"verbose": 0, "epochs": facts["epochs"], "steps": facts["ticks_per_epoch"]})
            callback.set_model(self._model)
        self._agree("on_train_begin")

    @override
    def on_epoch_start(self, epoch: int) -> None:
        self._model.reset_metrics()
        self._batches = 0
        self._agree("on_epoch_begin", epoch)

    @override
    def on_step(self, loss: float | None) -> bool:
        if loss is None:
            return False
        if self._callbacks:
            rate = self._rate()
            with self._module.placed():
                self._call("on_train_batch_begin", self._batches)
                self._call("on_train_batch_end", self._batches, losses.results(self._model))
            if self._rate() != rate and self._worker.size > 1:
                raise Unsupported(
                    "a callback set the learning rate after a batch, which the other workers would not get: set it at an "
                    "epoch's beginning or end, or compile the model with a LearningRateSchedule"
                )
        self._batches += 1
        return bool(self._model.stop_training)

    @override
    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        validation = {"val_" + name.removeprefix("validation_"): value for name, value in metrics.items()}
        self._logs = self._counted() | validation
        return self._agree("on_epoch_end", epoch, self._logs)

    @override
    def on_end(self) -> list[dict[str, Any]]:
        self._module.counts = False
        with self._module.placed():
            self._call("on_train_end", self._logs)
        return [_attributes(callback) for callback in self._callbacks]

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*arguments)

    def _agree(self, method: str, *arguments: Any) -> bool:
        """Collective. Worker 0 calls the callbacks; all get its learning rate. Returns whether the run shall end."""
        before = self._rate()
        with self._module.placed():
            self._call(method, *arguments)
        rate = self._rate()
        own = [bool(self._model.stop_training), None if rate == before else rate]
        stop, rate = self._worker.group.all_gather_json(own)[0]
        if rate is not None:
            self._model.optimizer.learning_rate = rate
        self._optimizer.agree_on_rate()
        return bool(stop)

    def _rate(self) -> float:
        return float(self._model.optimizer.learning_rate)

    def _counted(self) -> dict[str, float]:
        """The metrics over the epoch's rows of all workers, as they were trained."""
        sums = {"": Summed(losses.read(self._model), lambda total: losses.results_of(self._module, total))}
        return evaluation.results_of(sums if self._batches else {}, self._worker.group)


def _attributes(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that JSON can hold."""
    found = vars(callback).items()
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in found}
    return {name: value for name, value in plain.items() if name != "params" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value is None or isinstance(value, int | float | str)
