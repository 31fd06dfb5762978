"""manyhands trains one PyTorch program on many workers, exactly, and measures whether it was worth it.

Public names load when first used: `import manyhands` alone imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands import callbacks as callbacks
    from manyhands import keras as keras
    from manyhands import kernels as kernels
    from manyhands import spark as spark
    from manyhands import tasks as tasks
    from manyhands.callbacks import Callback as Callback
    from manyhands.callbacks import EarlyStopping as EarlyStopping
    from manyhands.callbacks import MLflow as MLflow
    from manyhands.callbacks import Progress as Progress
    from manyhands.callbacks import TensorBoard as TensorBoard
    from manyhands.callbacks import WandB as WandB
    from manyhands.data.corpus import Corpus as Corpus
    from manyhands.data.csr import Csr as Csr
    from manyhands.data.sharding import epoch_order as epoch_order
    from manyhands.data.shards.source import shards as shards
    from manyhands.data.shards.write import write_shards as write_shards
    from manyhands.engines.hosts.engine import Hosts as Hosts
    from manyhands.engines.local.engine import Local as Local
    from manyhands.engines.sim.engine import Sim as Sim
    from manyhands.engines.spark.engine import Spark as Spark
    from manyhands.engines.survive import Survive as Survive
    from manyhands.engines.torchrun.engine import Torchrun as Torchrun
    from manyhands.errors import BadInput as BadInput
    from manyhands.errors import CallbackFailed as CallbackFailed
    from manyhands.errors import ManyhandsError as ManyhandsError
    from manyhands.errors import PeerLost as PeerLost
    from manyhands.errors import Preempted as Preempted
    from manyhands.errors import UnknownName as UnknownName
    from manyhands.errors import Unsupported as Unsupported
    from manyhands.errors import WorkerFailed as WorkerFailed
    from manyhands.events import Event as Event
    from manyhands.evidence.calibrate.calibrate import calibrate as calibrate
    from manyhands.evidence.check.check import Checked as Checked
    from manyhands.evidence.check.check import check as check
    from manyhands.evidence.compare.compare import compare as compare
    from manyhands.evidence.compare.comparison import Comparison as Comparison
    from manyhands.evidence.estimate.estimate import Estimates as Estimates
    from manyhands.evidence.estimate.estimate import estimate as estimate
    from manyhands.evidence.replay.replay import Replayed as Replayed
    from manyhands.evidence.replay.replay import replay as replay
    from manyhands.inference.evaluate import evaluate as evaluate
    from manyhands.inference.predict import Predictions as Predictions
    from manyhands.inference.predict import predict as predict
    from manyhands.own_loop.launch import launch as launch
    from manyhands.own_loop.prepare import is_first as is_first
    from manyhands.own_loop.prepare import mean as mean
    from manyhands.own_loop.prepare import prepare as prepare
    from manyhands.own_loop.prepare import share as share
    from manyhands.own_loop.prepare import weight as weight
    from manyhands.own_loop.prepare import worker as worker
    from manyhands.parallel.marks import cut as cut
    from manyhands.parallel.spec import ModelParallel as ModelParallel
    from manyhands.recording.run import Run as Run
    from manyhands.recording.run import read_history as read_history
    from manyhands.server.base import ServerSpec as ServerSpec
    from manyhands.server.pushes import Push as Push
    from manyhands.server.rules.base import Rule as Rule
    from manyhands.sparse.kernel import Kernel as Kernel
    from manyhands.sparse.rows import Rows as Rows
    from manyhands.strategies.agn import AGN as AGN
    from manyhands.strategies.allreduce import AllReduce as AllReduce
    from manyhands.strategies.base import Needs as Needs
    from manyhands.strategies.base import State as State
    from manyhands.strategies.base import StepResult as StepResult
    from manyhands.strategies.base import Strategy as Strategy
    from manyhands.strategies.diloco import DiLoCo as DiLoCo
    from manyhands.strategies.distance import Distance as Distance
    from manyhands.strategies.downpour import Downpour as Downpour
    from manyhands.strategies.dynsgd import DynSGD as DynSGD
    from manyhands.strategies.eamsgd import EAMSGD as EAMSGD
    from manyhands.strategies.easgd import EASGD as EASGD
    from manyhands.strategies.ensemble import Ensemble as Ensemble
    from manyhands.strategies.gossip import Gossip as Gossip
    from manyhands.strategies.hogwild import Hogwild as Hogwild
    from manyhands.strategies.local_sgd import LocalSGD as LocalSGD
    from manyhands.strategies.quorum import Quorum as Quorum
    from manyhands.strategies.rotate import Rotate as Rotate
    from manyhands.strategies.solo import Solo as Solo
    from manyhands.strategies.update_sharing import UpdateSharing as UpdateSharing
    from manyhands.task import Task as Task
    from manyhands.training.plans import Plans as Plans
    from manyhands.training.plans import plan as plan
    from manyhands.training.train import train as train
    from manyhands.worker import Worker as Worker
    from manyhands.worker_callback import WorkerCallback as WorkerCallback
    from manyhands.worker_callback import WorkerCallbackFactory as WorkerCallbackFactory

__version__ = "0.1.0"

_MODULES = ("callbacks", "keras", "kernels", "spark", "tasks")
_WHERE = {
    "AGN": "strategies.agn",
    "AllReduce": "strategies.allreduce",
    "BadInput": "errors",
    "Callback": "callbacks",
    "CallbackFailed": "errors",
    "Checked": "evidence.check.check",
    "Comparison": "evidence.compare.comparison",
    "Corpus": "data.corpus",
    "Csr": "data.csr",
    "DiLoCo": "strategies.diloco",
    "Distance": "strategies.distance",
    "Downpour": "strategies.downpour",
    "DynSGD": "strategies.dynsgd",
    "EAMSGD": "strategies.eamsgd",
    "EASGD": "strategies.easgd",
    "EarlyStopping": "callbacks",
    "Ensemble": "strategies.ensemble",
    "Estimates": "evidence.estimate.estimate",
    "Event": "events",
    "Gossip": "strategies.gossip",
    "Hogwild": "strategies.hogwild",
    "Hosts": "engines.hosts.engine",
    "Kernel": "sparse.kernel",
    "Local": "engines.local.engine",
    "LocalSGD": "strategies.local_sgd",
    "MLflow": "callbacks",
    "ManyhandsError": "errors",
    "ModelParallel": "parallel.spec",
    "Needs": "strategies.base",
    "PeerLost": "errors",
    "Plans": "training.plans",
    "Predictions": "inference.predict",
    "Preempted": "errors",
    "Progress": "callbacks",
    "Push": "server.pushes",
    "Quorum": "strategies.quorum",
    "Replayed": "evidence.replay.replay",
    "Rotate": "strategies.rotate",
    "Rows": "sparse.rows",
    "Rule": "server.rules.base",
    "Run": "recording.run",
    "ServerSpec": "server.base",
    "Sim": "engines.sim.engine",
    "Solo": "strategies.solo",
    "Spark": "engines.spark.engine",
    "State": "strategies.base",
    "StepResult": "strategies.base",
    "Strategy": "strategies.base",
    "Survive": "engines.survive",
    "Task": "task",
    "TensorBoard": "callbacks",
    "Torchrun": "engines.torchrun.engine",
    "UnknownName": "errors",
    "Unsupported": "errors",
    "UpdateSharing": "strategies.update_sharing",
    "WandB": "callbacks",
    "Worker": "worker",
    "WorkerCallback": "worker_callback",
    "WorkerCallbackFactory": "worker_callback",
    "WorkerFailed": "errors",
    "calibrate": "evidence.calibrate.calibrate",
    "check": "evidence.check.check",
    "compare": "evidence.compare.compare",
    "cut": "parallel.marks",
    "epoch_order": "data.sharding",
    "estimate": "evidence.estimate.estimate",
    "evaluate": "inference.evaluate",
    "is_first": "own_loop.prepare",
    "launch": "own_loop.launch",
    "mean": "own_loop.prepare",
    "plan": "training.plans",
    "predict": "inference.predict",
    "prepare": "own_loop.prepare",
    "read_history": "recording.run",
    "replay": "evidence.replay.replay",
    "train": "training.train",
    "share": "own_loop.prepare",
    "shards": "data.shards.source",
    "weight": "own_loop.prepare",
    "worker": "own_loop.prepare",
    "write_shards": "data.shards.write",
}
__all__ = [*_WHERE, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"manyhands.{name}")
    where = f"manyhands.{_WHERE[name]}" if name in _WHERE else _strategy_module(name)
    if where is None:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    value = getattr(importlib.import_module(where), name)
    if isinstance(value, type) and "__dataclass_fields__" in vars(value):
        importlib.import_module("manyhands.spec").documented(value)
    globals()[name] = value
    return value


def _strategy_module(name: str) -> str | None:
    """Where the class of a strategy of the catalogue is: it needs no row here."""
    if not name[:1].isupper():
        return None
    catalogue: dict[str, str] = importlib.import_module("manyhands.strategies").CATALOGUE
    places = (place.partition(":") for place in catalogue.values())
    return next((module for module, _, kind in places if kind == name), None)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`manyhands.worker` is a function here and a module on disk: importing the module does not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (
            __name__,
        )  # a function of a notebook may refer to `mh`; pickle knows plain modules only


sys.modules[__name__].__class__ = _Package
