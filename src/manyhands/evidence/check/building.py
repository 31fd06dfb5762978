"""Models and optimizers as workers build them: whether all build the same, and whether the optimizer moves just that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from manyhands import rng
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import Copies
from manyhands.evidence.check.findings import BREAKS, NOTE, Finding, SourceLocation
from manyhands.evidence.check.generators import positions
from manyhands.evidence.check.recording import Trace, digests_of, foreign
from manyhands.task import Task
from manyhands.training.plan import build_model

_SHOWN = 4


def listed(names: Sequence[str]) -> str:
    """`a, b, c, d and 3 more`"""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def rebuilt(copies: Copies, traces: Sequence[Trace]) -> tuple[list[Finding], list[str]]:
    """(findings, what held): the function that makes the model gives the same one under the same seed, twice here and on every worker.

    traces: of one worker first, then of each of N.
    """
    task = copies.fresh()
    if isinstance(task.model, nn.Module):
        return [], []
    first, second = (_built(task) for _ in range(2))
    others = {name for trace in traces[1:] for name in _other(traces[0].built, trace.built)}
    changed = sorted({*_other(first, second), *others}, key=list(first).index)
    if not changed:
        where = " and on every worker" if len(traces) > 1 else ""
        return [], [f"model() builds the same from the seed, twice here{where}"]
    return [
        Finding(
            kind="not-rebuilt",
            severity=BREAKS,
            text=f"model() built another {listed(changed)} under the same seed: something in it is random and not "
            "drawn from the generators that the seed sets (torch's, numpy's, Python's own). N workers start from "
            "the first one's parameters, which are not those of one worker, and a run cannot be repeated. Draw from "
            "torch's global generator, or give the module itself.",
            places=_model_places(task),
            numbers={"names": changed},
        )
    ], []


def _built(task: Task) -> dict[str, str]:
    rng.seed_all(task.seed)
    return digests_of(build_model(task))


def _other(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name in a if a[name] != b.get(name)]


def _model_places(task: Task) -> tuple[SourceLocation, ...]:
    """Of the function that makes it, or of the module's class."""
    return source_locations.as_tuple(source_locations.of_function(task.model))


def optimized(copies: Copies) -> tuple[list[Finding], list[str]]:
    """(findings, what held): the optimizer holds the trainable parameters, and nothing else."""
    task = copies.fresh()
    rng.seed_all(task.seed)
    model = build_model(task)
    optimizer = task.optimizer(model)
    where = source_locations.as_tuple(source_locations.of_function(task.optimizer))
    others, held = foreign(optimizer, model), {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    found = [_foreign(others, where)] if others else []
    if left:
        found.append(
            Finding(
                kind="not-in-optimizer",
                severity=NOTE,
                text=f"{listed(left)} can be trained and the optimizer does not hold them: they never move, and their "
                "gradients are exchanged all the same. Give them requires_grad=False, or give them to the optimizer.",
                places=where,
                numbers={"names": left},
            )
        )
    if _draws(model, optimizer):
        found.append(_drawing(where))
    return found, [] if found else ["the optimizer holds all trainable parameters, and no others"]


def _draws(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step draws from the generators that the seed sets."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = positions()
    optimizer.step()
    return positions() != before


def _drawing(where: tuple[SourceLocation, ...]) -> Finding:
    return Finding(
        kind="randomness",
        severity=BREAKS,
        text="The optimizer draws random numbers in its step, and each worker draws its own: replicas that got the "
        "same mean gradient move apart, and never come together again. Draw from a generator that is seeded by the "
        "step, alike on all workers.",
        places=where,
    )


def _foreign(others: Sequence[torch.Tensor], where: tuple[SourceLocation, ...]) -> Finding:
    return Finding(
        kind="foreign-parameters",
        severity=BREAKS,
        text=f"The optimizer moves {len(others)} tensors ({sum(p.numel() for p in others):,} numbers) that are no "
        "parameters of the model (a loss with weights of its own?). Only the model's gradients are averaged, so "
        "every worker moves these its own way. Make them part of the model: a module that holds both.",
        places=where,
        numbers={"tensors": len(others)},
    )


def on_device(copies: Copies) -> list[Finding]:
    """A note about a model that is not on the CPU."""
    task = copies.fresh()
    rng.seed_all(task.seed)
    devices = sorted({str(p.device) for p in build_model(task).parameters()} - {"cpu"})
    if not devices:
        return []
    return [
        Finding(
            kind="on-device",
            severity=NOTE,
            text=f"The model is on {listed(devices)}. Each worker moves it to its own device (device=), and this check "
            "looked at a copy on the CPU.",
            places=_model_places(task),
        )
    ]


def unused(copies: Copies, trace: Trace) -> list[Finding]:
    """A note about parameters that no step gave a gradient."""
    names = [name for i, name in enumerate(trace.names) if not trace.touched >> i & 1]
    if not names or not trace.parameters:
        return []
    return [
        Finding(
            kind="unused-parameters",
            severity=NOTE,
            text=f"No gradient reached {listed(names)} in {len(trace.parameters)} steps: the loss does not depend on "
            "them. They are exchanged as zeros and do not move. Give them requires_grad=False, or remove them.",
            places=_parameter_places(copies.fresh(), names[0]),
            numbers={"names": names},
        )
    ]


def _parameter_places(task: Task, name: str) -> tuple[SourceLocation, ...]:
    model, owner = build_model(task), name.rpartition(".")[0]
    found = source_locations.of_module(model, owner, task.model) if owner else None
    return source_locations.as_tuple(found) or _model_places(task)
