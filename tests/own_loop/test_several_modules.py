"""One optimizer over several modules, prepared together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from own_loops import loader_of, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
import plain
from manyhands.errors import BadInput
from manyhands.own_loop.prepare import prepare_on
from manyhands.own_loop.session import Session
from manyhands.testing.threads import together
from manyhands.worker import Worker


def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    encoder, decoder = seeded(lambda: nn.Linear(5, 4).double()), seeded(lambda: nn.Linear(4, 3).double())
    return encoder, decoder, torch.optim.AdamW(chain(encoder.parameters(), decoder.parameters()), lr=0.01)


def train(encoder: nn.Module, decoder: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Tensor:
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(decoder(torch.tanh(encoder(x))), y).backward()
            optimizer.step()
    return torch.cat([plain.flat(encoder), plain.flat(decoder)])


def prepared(workers: int, wrap: Callable[[list[nn.Module]], Any], strategy: str) -> list[Tensor]:
    def program(worker: Worker) -> Tensor:
        encoder, decoder, optimizer = parts()
        modules = wrap([encoder, decoder])
        back, _, loader = prepare_on(Session(worker), modules, optimizer, loader_of(), strategy=strategy)
        assert back is modules
        return train(encoder, decoder, optimizer, loader)

    return together(workers, program)


@pytest.mark.parametrize("wrap", [list, tuple])
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_equals_one_plain_loop(workers: int, wrap: Any) -> None:
    alone = train(*parts(), loader_of())
    for ours in prepared(workers, wrap, "allreduce"):
        assert (ours - alone).abs().max() < (1e-10 if workers > 1 else 1e-300)


def test_replicas_are_equal_after_each_pass_under_another_strategy() -> None:
    first, second = prepared(2, list, "local-sgd:period=3")
    assert torch.equal(first, second)


@pytest.mark.parametrize("modules", [[], [nn.Linear(1, 1), 3], {"a": nn.Linear(1, 1)}, "model"])
def test_what_is_no_module_is_refused(modules: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(BadInput, match=r"must be an nn\.Module, or a list of several, not"):
        mh.prepare(modules, optimizer)


def test_an_optimizer_over_more_than_the_model_is_shown_the_way() -> None:
    encoder, _, optimizer = parts()
    with pytest.raises(BadInput, match=r"prepare all modules together, mh\.prepare\(\[first, second\], optimizer\)"):
        mh.prepare(encoder, optimizer)
