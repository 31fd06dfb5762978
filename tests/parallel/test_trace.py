"""Where a program can be cut, and why elsewhere not."""

from typing import Any

import pytest
import torch
from stage_models import CNN, GPT, LENGTH, MLP, VOCABULARY, masked
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import BadInput, Unsupported
from manyhands.parallel.trace import ModelTrace, trace

TOKENS = torch.arange(3 * LENGTH).reshape(3, LENGTH) % VOCABULARY


def of_model(model: Any, batch: Tensor) -> ModelTrace:
    return trace(model, lambda model, batch: model(batch).sum(), batch)


def test_a_gpt_is_cut_at_its_blocks_and_within() -> None:
    found = trace(GPT, masked, (TOKENS, TOKENS))
    names = [cut.name for cut in found.cuts]
    assert names == sorted(names, key=lambda name: next(cut.time for cut in found.cuts if cut.name == name))
    assert {"blocks.0", "blocks.3", "norm", "head", "blocks.1.mlp", "blocks.2.attention"} <= set(names)
    by_name = {cut.name: cut for cut in found.cuts}
    width = 3 * LENGTH * 16 * 4
    assert by_name["blocks.1"].nbytes == width
    assert by_name["blocks.1.mlp"].nbytes == 2 * width  # what is added to it, too
    assert [place.kind for place in by_name["blocks.1.mlp"].places] == ["result", "argument"]
    assert [place.kind for place in by_name["blocks.1.attention"].places] == ["output", "argument"]
    assert found.names == {"head.weight": "tokens.weight"}


def test_tied_parameters_belong_to_each_stage_that_uses_them() -> None:
    found = trace(GPT, masked, (TOKENS, TOKENS))
    stages = found.stages_of(found.chosen(["blocks.1", "blocks.3"]))
    assert stages["tokens.weight"] == (0, 2)
    assert stages["places.weight"] == stages["blocks.0.norm1.weight"] == (0,)
    assert stages["blocks.1.norm1.weight"] == (1,)
    assert stages["norm.weight"] == (2,)


def test_cuts_leave_stages_of_about_equally_many_parameters() -> None:
    sizes = {name: p.numel() for name, p in MLP().named_parameters()}
    found = of_model(MLP, torch.zeros(2, 12))
    assert found.sizes == sizes
    for stages in (2, 3, 4):
        cuts = found.equal_cuts(stages)
        held = [
            sum(size for name, size in sizes.items() if found.stages_of(cuts)[name] == (stage,))
            for stage in range(stages)
        ]
        assert sum(held) == sum(sizes.values())
        assert min(held) > 0  # DeepSpeed#5078: a cut into many stages leaves some without a parameter


def test_neither_the_random_stream_nor_a_module_changes() -> None:
    model, state = CNN(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = of_model(model, torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)))
    assert found.cuts
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.device.type == "cpu" and type(p) is nn.Parameter for p in model.parameters())


class Calls(nn.Module):
    """A model whose body is given."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.idle = nn.Linear(1, 1)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(model: Calls, x: Tensor) -> Tensor:
    return model.third(model.second(model.first(x)))


ROWS = torch.ones(3, 4)


def test_why_a_module_begins_no_stage() -> None:
    for body, name, why in (
        (plain, "first", "nothing is computed before it"),
        (plain, "idle", "it is not called"),
        (lambda m, x: m.third(m.second(m.second(m.first(x)))), "second", "it is called 2 times"),
        (lambda m, x: (m.first(x), m.third(m.second(x)))[1], "second", "it needs nothing of what comes before it"),
    ):
        found = of_model(lambda body=body: Calls(body), ROWS)
        assert why in found.refused[name]
        with pytest.raises(BadInput, match=rf"cut={name}: {why}.*Stages may begin at "):
            found.chosen([name])
    found = of_model(lambda: Calls(lambda m, x: m.third(m.first(x) + m.second(x))), ROWS)
    assert "second" in [cut.name for cut in found.cuts]
    assert "second" not in found.refused


def test_a_program_that_reads_what_another_stage_computes_is_named_by_its_line() -> None:
    for body in (
        lambda m, x: m.third(m.first(x)) if m.first(x).sum() > 0 else x,
        lambda m, x: m.third(m.first(x) * float(m.second(x).max())),
        lambda m, x: m.third(m.first(x)[m.first(x) > 0].reshape(-1, 1).expand(-1, 4)),
        lambda m, x: m.third(x * len(m.first(x).nonzero())),
    ):
        with pytest.raises(Unsupported, match=r"test_trace\.py:\d+: "):
            of_model(lambda body=body: Calls(body), ROWS)


def test_a_value_that_is_written_into_a_tensor_of_every_stage() -> None:
    def body(model: Calls, x: Tensor) -> Tensor:
        out = torch.zeros(3, 4)
        out[:, :2] = model.first(x)[:, :2]
        return model.third(out)

    with pytest.raises(Unsupported, match=r"test_trace\.py:\d+: this writes a value that another stage computes"):
        of_model(lambda: Calls(body), ROWS)


def test_a_value_is_not_taken_for_a_tensor_that_is_gone() -> None:
    """Tensors that every stage makes, and drops, have ids that come again."""

    def body(model: Calls, x: Tensor) -> Tensor:
        made = [x + i for i in range(200)]
        del made
        doubled = 2 * model.first(x)
        return model.third(model.second(x) + doubled)

    (place,) = of_model(lambda: Calls(body), ROWS).chosen(["second"])[0].places
    assert (place.kind, place.module, place.number) == ("result", "", 201)


def test_masks_that_are_there_may_index() -> None:
    def body(model: Calls, x: Tensor) -> Tensor:
        left = torch.tensor([True, False, True])
        return F.relu(model.third(model.second(model.first(x))[left]))

    assert [cut.name for cut in of_model(lambda: Calls(body), ROWS).cuts] == ["second", "third"]


def test_a_loss_that_itself_reads_most_of_the_parameters() -> None:
    def penalised(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() + sum(p.square().sum() for p in model.parameters())

    with pytest.raises(Unsupported, match=r"test_trace\.py:\d+: the loss reads first\.weight and other .*weight_decay"):
        trace(lambda: Calls(plain), penalised, ROWS)


def test_a_loss_that_itself_reads_one_parameter_holds_it_too() -> None:
    """As an output that is tied to an embedding is computed by some losses."""
    found = trace(lambda: Calls(plain), lambda model, x: (model(x) @ model.third.weight * model.first.bias).sum(), ROWS)
    owners = found.stages_of(found.chosen(["second", "third"]))
    assert owners["first.bias"] == (0, 2)
    assert owners["third.weight"] == (2,)


@pytest.mark.slow
def test_a_compiled_block_is_one_module() -> None:
    torch.manual_seed(0)

    def compiled() -> nn.Module:
        model = CNN()
        for i in range(3):
            model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
        return model

    found = of_model(compiled, torch.ones(2, 1, 6, 6))
    assert [cut.name for cut in found.cuts] == ["blocks", "blocks.1", "blocks.2", "head"]
    cuts = found.chosen(["blocks.1", "head"])
    assert found.stages_of(cuts)["blocks.1._orig_mod.conv1.weight"] == (1,)
    assert found.stage_of("blocks.0._orig_mod.norm1.running_mean", cuts) == 0
    assert found.stage_of("blocks.2._orig_mod.norm2.running_var", cuts) == 1


def test_a_loss_that_calls_the_model_twice() -> None:
    with pytest.raises(Unsupported, match="the loss calls the model 2 times"):
        trace(lambda: Calls(plain), lambda model, batch: model(batch).sum() + model(batch).mean(), ROWS)
