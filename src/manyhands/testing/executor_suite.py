"""The conformance suite of step executors: the guarantees of `StepExecutor`, as checks for any implementation.

Run every check of `EXECUTOR_SUITE` in the same order on each of the workers that hold a replica, with rows that have no
draws (no dropout) and a loss that is a mean over rows or tokens:

    for name, check in EXECUTOR_SUITE.items():
        check(case)

A check raises CheckFailed. Parameters are afterwards as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.data.batch import rows_of, slice_rows
from manyhands.replica.executor import StepExecutor, StepLoss
from manyhands.task import Evaluate, Metrics
from manyhands.testing.group_suite import checks_of, expect

TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class ExecutorCase:
    """A built executor, and what it is run on."""

    executor: StepExecutor
    batch: Any  # two rows or more, the same on all members
    evaluate: Evaluate


def check_members_have_one_answer(case: ExecutorCase) -> None:
    found = _backward(case.executor, case.batch)
    everyone = case.executor.members.all_gather_json([found.loss, found.weight])
    expect(all(one == everyone[0] for one in everyone), f"loss and weight differ between members: {everyone}")
    expect(found.weight > 0, f"the weight of {rows_of(case.batch)} rows is {found.weight}")


def check_an_empty_tick_weighs_nothing(case: ExecutorCase) -> None:
    _backward(case.executor, case.batch)
    found = _backward(case.executor, None)
    expect((found.loss, found.weight) == (0.0, 0.0), f"without rows loss and weight are {found.loss}, {found.weight}")
    if case.executor.has_gradients:
        expect(all(not bool(part.any()) for part in _gradients(case.executor)), "without rows gradients are not zero")


def check_a_tick_forgets_the_one_before(case: ExecutorCase) -> None:
    if not case.executor.has_gradients:
        return
    for _ in range(2):
        _backward(case.executor, case.batch)
        found = _gradients(case.executor)
    _backward(case.executor, case.batch)
    same = all(torch.equal(a, b) for a, b in zip(found, _gradients(case.executor), strict=True))
    expect(same, "the same rows give another gradient in the next tick")


def check_a_gradient_is_the_mean_of_its_parts(case: ExecutorCase) -> None:
    """Weighted by what the loss counted; so is the loss."""
    if not case.executor.has_gradients:
        return
    whole, gradients = _backward(case.executor, case.batch), _gradients(case.executor)
    middle, rows = rows_of(case.batch) // 2, rows_of(case.batch)
    summed, loss, weight = [torch.zeros_like(part) for part in gradients], 0.0, 0.0
    for start, stop in ((0, middle), (middle, rows)):
        found = _backward(case.executor, slice_rows(case.batch, start, stop))
        loss, weight = loss + found.weight * found.loss, weight + found.weight
        for total, part in zip(summed, _gradients(case.executor), strict=True):
            total.add_(part, alpha=found.weight)
    expect(abs(weight - whole.weight) <= TOLERANCE * weight, f"the parts weigh {weight}, the whole {whole.weight}")
    expect(abs(loss / weight - whole.loss) <= TOLERANCE * max(1.0, abs(whole.loss)), "the loss is not the parts' mean")
    for total, part in zip(summed, gradients, strict=True):
        off = float((total / weight - part).abs().max())
        expect(off <= TOLERANCE * max(1.0, float(part.abs().max())), f"the gradient is off its parts' mean by {off}")


def check_a_limit_of_rows_changes_no_gradient(case: ExecutorCase) -> None:
    if not case.executor.has_gradients:
        return
    _backward(case.executor, case.batch)
    before = _gradients(case.executor)
    case.executor.limit_rows(max(1, rows_of(case.batch) // 2))
    _backward(case.executor, case.batch)
    for a, b in zip(before, _gradients(case.executor), strict=True):
        off = float((a - b).abs().max())
        expect(off <= TOLERANCE * max(1.0, float(a.abs().max())), f"with a limit of rows the gradient is off by {off}")


def check_sums_are_of_all_members(case: ExecutorCase) -> None:
    members = case.executor.members
    found = case.executor.reduce(torch.tensor([1.0, float(members.rank)], dtype=torch.float64)).tolist()
    expect(found == [members.size, sum(range(members.size))], f"sums over {members.size} members are {found}")


def check_clipping_is_by_the_norm_of_the_whole_replica(case: ExecutorCase) -> None:
    if not case.executor.has_gradients:
        return
    _backward(case.executor, case.batch)
    before, norm = _gradients(case.executor), _norm(case.executor)
    case.executor.clip(2 * norm)
    same = all(torch.equal(a, b) for a, b in zip(before, _gradients(case.executor), strict=True))
    expect(same, "a norm below the limit was changed")
    case.executor.clip(norm / 2)
    expect(abs(_norm(case.executor) / norm - 0.5) < 1e-6, f"a norm of {norm} was clipped to {_norm(case.executor)}")


def check_a_wish_to_stop_reaches_all_members(case: ExecutorCase) -> None:
    members = case.executor.members
    case.executor.stop = members.rank == members.size - 1
    found = _backward(case.executor, case.batch)
    case.executor.stop = False
    if members.size > 1:
        expect(found.stop, "one member wants to stop, and this one does not learn of it")
    expect(not _backward(case.executor, case.batch).stop, "nobody wants to stop any more")


def check_a_step_moves_the_parameters(case: ExecutorCase) -> None:
    """Of the model, which are views of the shards."""
    with _parameters_kept(case.executor) as before:
        _backward(case.executor, case.batch)
        case.executor.apply()
        own = any(not torch.equal(a, b) for a, b in _pairs(case.executor, before))
        moved = case.executor.reduce(torch.tensor([float(own)], dtype=torch.float64))
        expect(bool(moved), "no parameter of any member has moved")
        for shard in case.executor.shards:
            shard.layout.check_attached(case.executor.model, shard.parameters)


def check_an_evaluation_is_the_same_on_all_members_and_changes_nothing(case: ExecutorCase) -> None:
    _backward(case.executor, case.batch)
    gradients = _gradients(case.executor) if case.executor.has_gradients else []
    before = [shard.parameters.clone() for shard in case.executor.shards]
    found = _numbers(case.executor.evaluate(case.evaluate, case.batch))
    everyone = case.executor.members.all_gather_json(found)
    expect(all(one == everyone[0] for one in everyone), f"metrics differ between members: {everyone}")
    expect(found == _numbers(case.executor.evaluate(case.evaluate, case.batch)), "the second evaluation is another one")
    expect(all(torch.equal(a, b) for a, b in _pairs(case.executor, before)), "an evaluation has moved parameters")
    now = _gradients(case.executor) if case.executor.has_gradients else []
    expect(all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True)), "an evaluation has changed gradients")


def _backward(executor: StepExecutor, batch: Any) -> StepLoss:
    executor.begin_tick()
    return executor.backward(batch)


def _gradients(executor: StepExecutor) -> list[Tensor]:
    return [shard.gradients[: shard.layout.padded].clone() for shard in executor.shards]


def _norm(executor: StepExecutor) -> float:
    own = sum(shard.dot(shard.gradients, shard.gradients) for shard in executor.shards)
    return math.sqrt(float(executor.reduce(torch.tensor([own], dtype=torch.float64))))


def _numbers(metrics: Metrics) -> dict[str, list[float]]:
    return {
        name: [float(part) for part in (value if isinstance(value, tuple) else (value,))]  # type: ignore[arg-type]
        for name, value in metrics.items()
    }


def _pairs(executor: StepExecutor, before: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip((shard.parameters for shard in executor.shards), before, strict=True)


@contextmanager
def _parameters_kept(executor: StepExecutor) -> Iterator[list[Tensor]]:
    before = [shard.parameters.clone() for shard in executor.shards]
    try:
        yield before
    finally:
        for now, then in _pairs(executor, before):
            now.copy_(then)


EXECUTOR_SUITE: dict[str, Callable[[ExecutorCase], None]] = checks_of(globals())
