"""A random state that nobody else sees, and one that all ranks draw from."""

import random
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands import rng
from manyhands.comm.solo import SoloGroup
from manyhands.rng import RngScope, mixed


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


def seed():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)


def test_it_goes_on_where_it_stood_and_leaves_no_trace():
    seed()
    expected_outside = [draw(), draw()]
    seed()
    own, inside, outside = RngScope((5, 0)), [], []
    for _ in range(2):
        with own:
            inside.append(draw())
        outside.append(draw())
    assert outside == expected_outside
    torch.manual_seed(mixed((5, 0)))
    assert [torch.rand(1).item(), torch.rand(1).item()] == [first for first, _, _ in inside]
    assert inside[0] != inside[1]
    before = torch.get_rng_state()
    with suppress(KeyError), RngScope((1,)):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_it_goes_on_from_here_as_if_there_were_one_stream():
    """Where nobody else draws; else the process's generators stay where they went, which is another way."""
    seed()
    expected = [draw() for _ in range(4)]
    for else_drawn in (False, True):
        seed()
        got, own = [draw()], RngScope.from_here()
        with own.in_place():
            for _ in range(2):
                with own:
                    got.append(draw())
                if else_drawn:
                    assert draw() not in expected
        got.append(draw())
        assert got[:3] == expected[:3]
        assert (got[3] in expected) is not else_drawn
    assert len({mixed((a, b)) for a in range(30) for b in range(30)}) == 900  # neighbouring keys are far apart


class SecondRank(SoloGroup):
    """What another rank's group gives: rank 0's state, which `first` captured."""

    rank = 1

    def __init__(self, tensors: list[Tensor], values: Any) -> None:
        self._tensors, self._values = list(tensors), values

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._tensors.pop(0))

    def all_gather_json(self, value: Any) -> list[Any]:
        return [self._values, value]


def test_ranks_draw_alike_and_the_others_keep_their_own() -> None:
    rng.seed_all(5)
    of_first = torch.Generator().manual_seed(1)
    tensors, values = rng.capture()
    tensors.pop("cuda", None)
    states = [*(tensor.clone() for tensor in tensors.values()), of_first.get_state()]
    with rng.drawn_alike(SoloGroup(), [of_first]):
        first = draw(), torch.rand(2, generator=of_first)
    after = draw()
    rng.seed_all(5)
    assert draw() == first[0]  # as if nothing had been asked for
    assert draw() == after

    rng.seed_all(7)
    own = draw()
    rng.seed_all(7)
    generator = torch.Generator().manual_seed(2)
    with rng.drawn_alike(SecondRank(states, values), [generator]):
        assert draw() == first[0]
        assert torch.equal(torch.rand(2, generator=generator), first[1])
    assert draw() == own
    assert torch.equal(generator.get_state(), of_first.get_state())  # it has moved on, as rank 0's


class OfGpu:
    """Stands in for a GPU's generator."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def test_a_digest_is_that_of_another_process_in_the_same_state() -> None:
    rng.seed_all(3)
    program = "from manyhands import rng; rng.seed_all(3); print(rng.digest())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) == rng.digest()
    for draw in (torch.rand, np.random.rand, lambda _: random.random()):
        before = rng.digest()
        draw(1)
        assert rng.digest() != before


def test_noise_of_a_ranks_own_on_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = OfGpu(), []
    monkeypatch.setattr(rng, "_generators", lambda: [torch.default_generator, gpu])

    def drawn() -> tuple[int, int]:
        return int(torch.randint(1000, ())), int(torch.randint(1000, (), generator=gpu._generator))

    for rank in range(2):
        torch.manual_seed(0)
        gpu.manual_seed(0)
        alone = [(drawn(), torch.randint(2**62, ()))[0] for _ in range(3)]
        torch.manual_seed(0)
        gpu.manual_seed(0)
        inside, outside = [], []
        for _ in range(3):
            outside.append(drawn())
            with rng.TorchScope(rank):
                inside.append(drawn())
        assert outside == alone
        found.append(inside)
    numbers = [number for rank in found for pair in rank for number in pair]
    assert len(set(numbers)) == len(numbers) == 12  # no rank and no device draws another one's, or the same again
