"""What one simulated worker does to the process, the others do not see; that their draws do not mix, test_sim_equals_local shows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sim_world import run

from manyhands.engines.sim.isolation import capture, restore
from manyhands.engines.sim.timeline import Timeline
from manyhands.worker import Worker, current, set_current


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Leaves the process as it was."""
    before = capture()
    yield
    restore(before)


def test_numpys_pending_gauss_is_its_programs_own() -> None:
    """Legacy normal draws come in pairs: the second one waits, and must not be another program's. Seeded again, a generator comes
    to where it stood, with and without a number that waits."""
    expected = np.random.RandomState(7).standard_normal(4).tolist()
    timeline = Timeline()

    def program(first: float) -> list[float]:
        timeline.sleep(first)
        np.random.seed(7)
        drawn = []
        for _ in range(4):
            drawn.append(float(np.random.standard_normal()))
            timeline.sleep(1.0)
        return drawn

    def again() -> list[float]:
        drawn = []
        for numbers in (2, 1, 2, 1):
            np.random.seed(7)
            np.random.standard_normal(numbers)
            timeline.sleep(1.0)
            drawn.append(float(np.random.standard_normal()))
        return drawn

    programs = [lambda: program(0.0), lambda: program(0.5), lambda: program(1.0), again, again]
    assert run(timeline, programs) == [expected] * 3 + [[expected[2], expected[1]] * 2] * 2


def test_modes_do_not_leak() -> None:
    timeline, seen = Timeline(), []

    def state() -> tuple[Any, ...]:
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return *grad, torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), current()

    def without_grad() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            timeline.sleep(2.0)
            assert not torch.is_grad_enabled()
            return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def infers(nap: float) -> Any:
        with torch.inference_mode():
            for _ in range(3):
                timeline.sleep(nap)
                assert torch.is_inference_mode_enabled()
        timeline.sleep(1.0)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def doubles() -> None:
        torch.set_default_dtype(torch.float64)
        set_current(worker := Worker(rank=3, size=5))
        for _ in range(5):
            timeline.sleep(0.9)
            assert torch.zeros(1).dtype == torch.float64
            assert current() is worker

    def plain() -> None:
        for _ in range(9):
            seen.append(state())
            timeline.sleep(0.7)

    values = run(timeline, [without_grad, lambda: infers(1.0), plain, lambda: infers(1.5), doubles])
    assert values == [(True, torch.bfloat16), (False, True), None, (False, True), None]
    assert seen == [(True, False, False, torch.float32, None)] * 9
    assert state() == seen[0]
