"""A part of a model has the whole model's values, and its random stream."""

import copy
from itertools import product

import torch
from stage_models import CNN, GPT, MLP
from torch import nn

from manyhands.parallel.build import build, is_absent, take_away, tied_names


class DrawsItself(nn.Module):
    """Parameters that are drawn before they are registered, and in the order of another loop."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("noise", torch.rand(4))
        for layer in reversed(self.layers):
            nn.init.xavier_uniform_(layer.weight)
            layer.bias.data.normal_()
            layer.bias.data[0].zero_()
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)


class Cloned(nn.Module):
    """Layers that are deep copies of one, which torch's own encoder makes; one of them is then drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.again = copy.deepcopy(self.body.layers[1])
        nn.init.normal_(self.body.layers[2].linear1.weight)
        self.head = nn.Linear(8, 3)


def test_a_third_of_a_model_has_the_whole_models_bits() -> None:
    for make, part in product((GPT, MLP, CNN, DrawsItself, Cloned), range(3)):
        torch.manual_seed(3)
        whole, after = make(), torch.get_rng_state()
        values, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
        held = set(list(values)[part::3])
        torch.manual_seed(3)
        model = build(make, held)
        assert torch.equal(torch.get_rng_state(), after), make
        for name, p in model.named_parameters():
            value, case = values[name], (make, part, name)
            assert is_absent(p) == (name not in held), case
            assert (p.shape, p.dtype, p.requires_grad) == (value.shape, value.dtype, value.requires_grad), case
            assert name not in held or torch.equal(p, value), case
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), (make, part, name)


def test_tied_parameters_stay_tied() -> None:
    for held in ({"tokens.weight"}, {"head.weight"}, {"norm.weight"}):
        model = build(GPT, held)
        assert model.head.weight is model.tokens.weight
        assert is_absent(model.head.weight) == ("norm.weight" in held)
        assert tied_names(model) == {"head.weight": "tokens.weight"}


def test_a_module_that_is_there_keeps_what_is_held() -> None:
    model = GPT()
    kept = model.blocks[1].norm1.weight
    assert take_away(model, {"blocks.1.norm1.weight"}) is model
    assert model.blocks[1].norm1.weight is kept
    assert is_absent(model.head.weight)
    assert model.head.weight is model.tokens.weight
    assert sum(not is_absent(p) for p in model.parameters()) == 1


def test_an_absent_parameter_takes_no_memory() -> None:
    """Also while the model is built: its own part and one parameter."""
    made = []

    def make() -> nn.Module:
        layers = [nn.Linear(512, 512) for _ in range(8)]
        made.append(
            sum(p.untyped_storage().nbytes() for layer in layers for p in layer.parameters() if not is_absent(p))
        )
        return nn.Sequential(*layers)

    build(make, {"2.weight"})
    assert made == [0, 512 * 512 * 4]
