"""Each step executor keeps what the contract promises: one worker's, and those of replicas that several workers hold."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from products import Products, rows_of_products
from torch import nn

import manyhands as mh
from manyhands.replica.executor import AutogradExecutor, StepExecutor
from manyhands.replica.kernel_executor import KernelExecutor
from manyhands.testing.executor_suite import EXECUTOR_SUITE, ExecutorCase
from manyhands.testing.group_suite import CheckFailed

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))
from stage_models import TASKS
from stage_threads import in_stages


def batch_of(task: mh.Task) -> Any:
    return tuple(column[:12] for column in task.train_data.tensors)


def measured(task: mh.Task) -> Any:
    def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
        found = task.loss(model, batch)
        return {"loss": found if isinstance(found, tuple) else (found, len(batch[0]))}

    return evaluate


def built(executor: StepExecutor) -> StepExecutor:
    executor.build(lambda n, dtype, device: torch.zeros(n, dtype=dtype, device=device))
    return executor


def alone(task: mh.Task) -> StepExecutor:
    torch.manual_seed(0)
    return built(AutogradExecutor(task.model, task.optimizer, loss=task.loss))


@pytest.mark.parametrize("name", ["gpt", "mlp", "encoder"])
def test_one_worker(name: str) -> None:
    task = TASKS[name]
    for check in EXECUTOR_SUITE.values():
        check(ExecutorCase(executor=alone(task), batch=batch_of(task), evaluate=measured(task)))


def test_a_kernel() -> None:
    data = rows_of_products()
    task = mh.Task(kernel=Products(), rate=0.02, train_data=data)
    batch = {name: torch.from_numpy(column[:12]) for name, column in data.items()}
    for check in EXECUTOR_SUITE.values():
        executor = built(KernelExecutor(task.model, task.optimizer))
        check(ExecutorCase(executor=executor, batch=batch, evaluate=task.metrics))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "stages=1"),
        ("gpt", "stages=3,recompute=units"),
        ("mlp", "stages=4,schedule=gpipe"),
        ("encoder", "stages=2,micro_batches=4"),
        ("marked", "stages=3"),
    ],
)
def test_stages(name: str, plan: str) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.model()

    def run(loop: Any) -> None:
        case = ExecutorCase(executor=loop.replica.executor, batch=batch_of(task), evaluate=measured(task))
        for check in EXECUTOR_SUITE.values():
            check(case)

    in_stages(task, model, plan, run)


class PilesUp(AutogradExecutor):
    """Forgets nothing."""

    def begin_tick(self) -> None:
        pass


class ClipsAlone(AutogradExecutor):
    """Half of the limit."""

    def clip(self, norm: float) -> None:
        super().clip(norm / 2)


def test_what_breaks_the_contract_is_found() -> None:
    task = TASKS["mlp"]
    for kind, check in (
        (PilesUp, "a_tick_forgets_the_one_before"),
        (ClipsAlone, "clipping_is_by_the_norm_of_the_whole_replica"),
    ):
        executor = built(kind(task.model, task.optimizer, loss=task.loss))
        with pytest.raises(CheckFailed):
            EXECUTOR_SUITE[check](ExecutorCase(executor=executor, batch=batch_of(task), evaluate=measured(task)))
