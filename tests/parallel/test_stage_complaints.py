"""What users of other pipelines complain of: one test for each complaint, which its docstring names.

Others stand in the docstrings of test_stages.py and test_stages_result_integration.py.
"""

import copy
from typing import Any

import pytest
import torch
from stage_models import GPT, TASKS, classified, masked, numbers, tokens
from stage_threads import in_stages
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from manyhands.training.loop import Loop


def gradients(loop: Loop, batch: Any) -> dict[str, Tensor]:
    """Of one backward, by name, of what this worker holds."""
    loop.replica.begin_tick()
    loop.replica.backward(batch)
    return {name: view.clone() for name, view in loop.replica.named(loop.replica.gradients).items()}


def whole_gradients(model: nn.Module, loss: Any, batch: Any) -> dict[str, Tensor]:
    """In one process, of all rows at once."""
    own = copy.deepcopy(model)
    found = loss(own, batch)
    (found[0] if isinstance(found, tuple) else found).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.named_parameters()}


def expect_gradients(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert {name for own in found for name in own} == set(expected)
    for own in found:
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT().double()


class Skips(nn.Module):
    """Three values cross a cut: one that some micro-batches leave unused, one of whole numbers, one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.first(x)
        largest, fixed = skipped.argmax(-1), skipped.detach().tanh()
        y = self.second(fixed)
        if bool((x[:, 0] > 0).all()):
            y = y + skipped
        return self.third(y + F.one_hot(largest, 12) + fixed)


def test_an_input_of_a_stage_that_gets_no_gradient() -> None:
    """pytorch#152827: a stage whose input produces no gradient, or not for each micro-batch, is an error."""
    torch.manual_seed(0)
    model, batch = Skips().double(), numbers(8, (12,)).tensors
    batch[0][:, 0] = torch.tensor([1, 1, -1, -1, 1, 1, -1, 1])
    task = TASKS["mlp"].with_fields(micro_batch_size=2, train_data=TensorDataset(*batch))
    for plan in ("stages=2,cut=[second]", "stages=2,cut=[third]", "stages=3"):
        found = in_stages(task, model, plan, lambda loop: gradients(loop, batch))
        parts = [classified(model, tuple(column[i : i + 2] for column in batch)) for i in range(0, 8, 2)]
        model.zero_grad()
        (sum(parts) / 4).backward()
        expect_gradients(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_an_evaluation_before_the_first_step(gpt: nn.Module) -> None:
    """pytorch#162822: after an evaluation that comes before training, backward fails. torchtitan#547: the loss is -1 on all
    stages but the last one."""
    batch, held_out = tokens(12).tensors, tokens(7, seed=3).tensors

    def program(loop: Loop) -> tuple[float, float, dict[str, Tensor]]:
        loop.replica.model.eval()
        metrics = loop.replica.executor.evaluate(lambda model, rows: {"loss": masked(model, rows)[0]}, held_out)
        loop.replica.model.train()
        own = gradients(loop, batch)
        return float(metrics["loss"]), loop.replica.loss, own

    found = in_stages(TASKS["gpt"], gpt, "stages=3", program)
    with torch.no_grad():
        expected = [float(masked(gpt, rows)[0]) for rows in (held_out, batch)]
    assert [judged for judged, _, _ in found] == pytest.approx([expected[0]] * 3, abs=1e-12)
    assert [loss for _, loss, _ in found] == pytest.approx([expected[1]] * 3, abs=1e-12)
    expect_gradients([own for _, _, own in found], whole_gradients(gpt, masked, batch))


def test_replicas_with_other_numbers_of_micro_batches(gpt: nn.Module) -> None:
    """verl#6176: a replica that has fewer micro-batches than another one leaves a collective early, and all hang."""
    batch = tokens(7).tensors
    task = TASKS["gpt"].with_fields(micro_batch_size=2)

    def program(loop: Loop) -> dict[str, Tensor]:
        replica = loop.worker.mesh.rows[0]
        rows = slice(0, 6) if replica == 0 else slice(6, 7)  # three micro-batches, and one
        loop.replica.begin_tick()
        loop.replica.backward(tuple(column[rows] for column in batch))
        loop.replica.mean_gradients(loop.worker.mesh.data)
        return {name: view.clone() for name, view in loop.replica.named(loop.replica.gradients).items()}

    found = in_stages(task, gpt, "stages=2", program, workers=4)
    expect_gradients(found, whole_gradients(gpt, masked, batch))


class TiedTypes(nn.Module):
    """Two tied parameters of one type and one of another, which the stages meet in other orders; of few rows the last one
    uses one type alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(12, 12).double(), nn.Linear(12, 12)
        self.wide, self.second = nn.Linear(12, 12).double(), nn.Linear(12, 12)
        self.again, self.head = nn.Linear(12, 12), nn.Linear(12, 5).double()
        self.wide_again, self.idle = nn.Linear(12, 12).double(), nn.Linear(12, 12).double()
        self.again.weight, self.wide_again.weight = self.narrow.weight, self.wide.weight
        self.wide_again.bias = self.wide.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(torch.tanh(self.narrow(self.first(x).float())).double())
        x = torch.tanh(self.second(x.float()))
        x = self.again(x).double()
        return self.head(torch.tanh(self.wide_again(x) if len(x) > 5 else x))


@pytest.mark.parametrize("rows", [10, 4])
def test_tied_weights_of_several_types(rows: int) -> None:
    """A stage that got no gradient of a tied parameter steps it as those do that got one."""
    torch.manual_seed(0)
    model, batch = TiedTypes(), numbers(rows, (12,)).tensors

    def program(loop: Loop) -> tuple[dict[str, Tensor], int, set[str]]:
        executor: Any = loop.replica.executor
        found = gradients(loop, batch)
        stepped = {name for name, p in loop.replica.model.named_parameters() if p.grad is not None}
        return found, len(executor._tied), stepped

    found = in_stages(TASKS["mlp"], model, "stages=3,cut=[second,again]", program)
    expected = whole_gradients(model, classified, batch)
    for own, _, stepped in found:
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6, msg=name)
        assert stepped == own.keys() - {"idle.weight", "idle.bias"}
    assert {"wide.weight", "wide.bias", "narrow.weight"} <= found[0][2] & found[2][2]
    assert [messages for _, messages, _ in found] == [2, 0, 2]  # one for each type
