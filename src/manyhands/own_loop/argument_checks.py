"""What `prepare` refuses, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from manyhands.comm.group import Group
from manyhands.engines.base import Engine
from manyhands.engines.own_rules import list_rule
from manyhands.errors import BadInput, Unsupported
from manyhands.replica import fingerprint
from manyhands.replica.executor import strangers
from manyhands.strategies import spec_of
from manyhands.strategies.base import Strategy
from manyhands.task import named
from manyhands.worker import Worker


def root_of(model: Any) -> nn.Module:
    """The module that holds all that is prepared together: the model, or a list of several. BadInput for anything else."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, list | tuple) and model and all(isinstance(one, nn.Module) for one in model):
        return nn.ModuleList(model)
    raise BadInput(
        f"prepare takes (model, optimizer, *loaders): the model must be an nn.Module, or a list of several, not {named(model)}"
    )


def check_arguments(model: nn.Module, optimizer: Any, strategy: Strategy, worker: Worker) -> None:
    """BadInput for what is no model or optimizer; Unsupported for a strategy that `prepare` cannot run."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"prepare takes (model, optimizer, *loaders): the optimizer must be a torch.optim.Optimizer over model.parameters(), not {named(optimizer)}"
        )
    wrappers = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
    for module in model.modules():
        if type(module).__module__.startswith("torch.") and type(module).__name__ in wrappers:
            raise BadInput(
                f"prepare takes the plain model, not one in {type(module).__name__}: leave the wrapper out, manyhands shares the work itself"
            )

    if found := strangers(optimizer, model):
        raise BadInput(
            f"the optimizer holds {found}: prepare all modules together, mh.prepare([first, second], optimizer) say"
        )

    check_strategy(strategy, worker)


def check_launch(strategy: Strategy, engine: Engine, workers: int, servers: int) -> None:
    """BadInput or Unsupported, before anything starts, for a strategy that cannot run on this engine."""
    strategy.check_workers(workers)
    spec = strategy.server()
    if spec is not None:
        list_rule(spec)
    if spec is not None and spec.one_shard and servers > 1:
        raise Unsupported(
            f"strategy {strategy.name} needs a server with one shard, and servers={servers}: leave servers out, or give servers=1"
        )
    if (spec is not None or strategy.leasing() is not None) and not engine.capabilities.serves:
        wants = "needs a parameter server" if spec is not None else "has workers that go at their own pace"
        raise Unsupported(
            f"strategy {strategy.name} {wants}, and engine {engine.name} does not support that: use engine local or hosts, outside of "
            "manyhands run and torchrun"
        )
    if strategy.needs.one_host and not engine.on_one_host(workers):
        raise Unsupported(
            f"strategy {strategy.name} shares memory between the workers, so all of them must be on one machine: use engine local"
        )


def check_strategy(strategy: Strategy, worker: Worker) -> None:
    """BadInput for a strategy that cannot run on so many workers, Unsupported for one whose server was not started."""
    if strategy.needs.kernel:
        raise Unsupported(
            f"strategy {strategy.name} cuts the tables of a kernel, and a loop of your own steps a model: use mh.train(kernel=...), or another strategy"
        )
    strategy.check_workers(worker.size)
    wanted = strategy.server()
    if wanted is None:
        return
    option = spec_of(strategy)
    if worker.server is None:
        raise Unsupported(
            f"strategy {strategy.name} needs a parameter server, which is started with the workers: give the strategy to "
            f"`manyhands run --strategy {option} SCRIPT`, or to mh.launch(function, strategy={option!r})"
        )
    if worker.server.spec != wanted:
        raise BadInput(
            f"these workers were started with the server of another strategy (rule {worker.server.spec.rule}, bound {worker.server.spec.bound}): "
            f"give {option} to `manyhands run --strategy` or mh.launch(strategy=...), and none to mh.prepare"
        )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Unsupported for what would let workers diverge in this step."""
    if "found_inf" in vars(optimizer):  # put there by a GradScaler, for an optimizer that `_step_supports_amp_scaling`
        raise Unsupported(
            "a GradScaler decides on each worker alone whether to step, and with this strategy each worker has gradients of its own: use allreduce, or "
            "train in bfloat16 (torch.autocast(..., dtype=torch.bfloat16)), which needs no GradScaler"
        )


def late_parameters(optimizer: torch.optim.Optimizer, own: set[int]) -> list[nn.Parameter]:
    """Those that have a gradient and were frozen, or not there, when the model was prepared; `own`: ids of the others."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) not in own]


def check_equal(group: Group, own: Sequence[str], must: str) -> None:
    """A collective: BadInput unless all workers have the same. must: what all of them must do."""
    everyone = group.all_gather_json(list(own))
    first, *others = (one if isinstance(one, list) else [] for one in everyone)  # a worker may compare something else
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            pairs = zip_longest(first, theirs, fillvalue="nothing")
            mine, other = next((one, another) for one, another in pairs if one != another)
            raise BadInput(f"all workers must {must}: worker 0 has {mine} where worker {rank} has {other}")


def named_tensors(model: nn.Module) -> list[str]:
    """Name, shape and dtype of each parameter and buffer."""
    return [f"{name} {list(t.shape)} {t.dtype}" for name, t in (*model.named_parameters(), *model.named_buffers())]


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> fingerprint.Facts:
    """The code and libraries of this worker's program; its rates too where every step must be equal on all workers."""
    facts = fingerprint.of_code(model, optimizer)
    return facts | (fingerprint.of_optimizer(optimizer) if strategy.needs.mean_gradient else {})
