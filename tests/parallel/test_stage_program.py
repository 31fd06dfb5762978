"""A stage's span in one process: two of them, one after the other, are the whole program."""

import copy
import weakref

import pytest
import torch
from stage_models import CNN, GPT, MLP, classified, masked, numbers, tokens
from torch import Tensor, nn

from manyhands.comm.stage_channel import Sent
from manyhands.errors import Unsupported
from manyhands.parallel.build import take_away
from manyhands.parallel.stage_program import StageProgram
from manyhands.parallel.trace import trace

CASES = {
    "gpt": (GPT, masked, tokens(6).tensors, ["blocks.1.mlp", "blocks.3"]),
    "mlp": (MLP, classified, numbers(6, (12,)).tensors, ["2", "4"]),
    "cnn": (CNN, classified, numbers(6, (1, 6, 6)).tensors, ["blocks.1", "blocks.2.conv2"]),
}


def as_sent(values: list[Sent]) -> list[Sent]:
    """What travels: copies without a graph."""
    return [Sent(None if one.tensor is None else one.tensor.detach().clone(), one.requires_grad) for one in values]


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_a_run_keeps_nothing_once_it_went_back(name: str) -> None:
    """The graph of a run holds what keeps the gradients of what was received, which must not hold the graph."""
    make, loss, batch, names = CASES[name]
    whole = make().double()
    cuts = (found := trace(whole, loss, batch)).chosen(names)[:1]
    owners = found.stages_of(cuts)
    parts = [take_away(copy.deepcopy(whole), {n for n, at in owners.items() if stage in at}) for stage in range(2)]
    first, last = (StageProgram(part, cuts, stage) for stage, part in enumerate(parts))
    received = as_sent(first.run(loss, batch, []).sent())
    kept = [weakref.ref(one.tensor) for one in received]
    own = last.run(loss, batch, received)
    own.values = [own.result[0] if isinstance(own.result, tuple) else own.result]
    own.backward([Sent(torch.ones_like(own.values[0]))])
    del received
    assert [one() for one in kept] == [None] * len(kept)


def held_bytes(recomputed: set[str]) -> int:
    """What autograd keeps between forward and back."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    make, loss, batch, _ = CASES["gpt"]
    torch.manual_seed(0)
    program = StageProgram(make().double(), [], 0, recomputed)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program.run(loss, batch, [])
    return kept


def test_units_that_are_computed_again_hold_less() -> None:
    make, loss, batch, _ = CASES["gpt"]
    names = {cut.name for cut in trace(make, loss, batch).outermost}
    assert {"blocks.0", "blocks.3", "head"} <= names
    assert "blocks.0.mlp" not in names
    assert held_bytes(names) < held_bytes(set()) / 3


def test_a_model_is_as_ever_to_who_does_not_run_a_stage() -> None:
    make, loss, batch, names = CASES["mlp"]
    model = make().double()
    expected = loss(model, batch)
    StageProgram(model, trace(model, loss, batch).chosen(names), 1)
    assert torch.equal(loss(model, batch), expected)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x)) if len(x) > 2 else self.third(x)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_batch_that_takes_another_way_is_an_error(stage: int) -> None:
    model = Branching()
    cuts = trace(model, lambda model, x: model(x).sum(), torch.ones(3, 4)).chosen(["second"])
    program = StageProgram(model, cuts, stage)
    received = [Sent(torch.ones(2, 4), True)] if stage else []
    with pytest.raises(Unsupported, match="the program did not call second, where a stage begins"):
        program.run(lambda model, x: model(x).sum(), torch.ones(2, 4), received)
