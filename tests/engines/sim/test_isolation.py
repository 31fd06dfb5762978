"""What one simulated worker does to the process, the others do not see."""

import random

import numpy as np
import pytest
import torch
from sim_world import run

from manyhands.engines.sim.isolation import capture, copied, restore
from manyhands.engines.sim.timeline import Timeline
from manyhands.worker import Worker, current, set_current


@pytest.fixture(autouse=True)
def _process():
    """Leaves the process as it was."""
    before = capture()
    yield
    restore(before)


def draws():
    """One number of each generator; an odd number of normal draws leaves numpy one that waits."""
    return (
        float(torch.rand(())),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        random.random(),
        random.gauss(0, 1),
    )


def alone(seed, rounds):
    timeline = Timeline()

    def program():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        drawn = []
        for _ in range(rounds):
            drawn.append(draws())
            timeline.sleep(1.0)
        return drawn

    return timeline, program


def test_generators_do_not_leak():
    wanted = []
    for seed in range(3):
        timeline, program = alone(seed, 5)
        wanted += run(timeline, [program])
    timeline = Timeline()

    def program(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        drawn = []
        for _ in range(5):
            drawn.append(draws())
            timeline.sleep(1.0)
        return drawn

    assert run(timeline, [lambda seed=seed: program(seed) for seed in range(3)]) == wanted


def test_numpys_pending_gauss_is_its_programs_own():
    """Legacy normal draws come in pairs: the second one waits, and must not be another program's."""
    expected = np.random.RandomState(7).standard_normal(4).tolist()
    timeline = Timeline()

    def program(first):
        timeline.sleep(first)
        np.random.seed(7)
        drawn = []
        for _ in range(4):
            drawn.append(float(np.random.standard_normal()))
            timeline.sleep(1.0)
        return drawn

    assert run(timeline, [lambda: program(0.0), lambda: program(0.5), lambda: program(1.0)]) == [expected] * 3


def test_all_begin_with_the_state_outside_and_leave_it_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    np.random.standard_normal()  # one waits
    state = copied(capture())
    wanted = draws()
    restore(state)
    timeline = Timeline()

    def program():
        first = draws()
        timeline.sleep(1.0)
        draws()
        return first

    assert run(timeline, [program, program]) == [wanted, wanted]
    assert draws() == wanted


def test_modes_do_not_leak():
    timeline, seen = Timeline(), []

    def without_grad():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            timeline.sleep(2.0)
            assert not torch.is_grad_enabled()
            return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def plain():
        for _ in range(3):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            timeline.sleep(1.0)

    assert run(timeline, [without_grad, plain])[0] == (True, torch.bfloat16)
    assert seen == [(True, False)] * 3
    assert torch.is_grad_enabled()


def test_inference_mode_and_default_dtype_do_not_leak():
    timeline, seen = Timeline(), []

    def infers(until):
        with torch.inference_mode():
            for _ in range(3):
                timeline.sleep(until)
                assert torch.is_inference_mode_enabled()
        timeline.sleep(1.0)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def doubles():
        torch.set_default_dtype(torch.float64)
        for _ in range(5):
            timeline.sleep(0.9)
            assert torch.zeros(1).dtype == torch.float64

    def plain():
        for _ in range(9):
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()))
            timeline.sleep(0.7)

    values = run(timeline, [lambda: infers(1.0), plain, lambda: infers(1.5), doubles])
    assert values[0] == values[2] == (False, True)
    assert seen == [(False, True, torch.float32)] * 9
    assert (torch.is_inference_mode_enabled(), torch.get_default_dtype()) == (False, torch.float32)


def test_each_program_is_its_own_worker():
    timeline = Timeline()

    def program(rank):
        worker = Worker(rank=rank, size=3)
        set_current(worker)
        for _ in range(3):
            timeline.sleep(1.0)
            assert current() is worker
        return current().rank

    assert run(timeline, [lambda rank=rank: program(rank) for rank in range(3)]) == [0, 1, 2]
    assert current() is None


def test_a_failed_program_leaves_nothing_behind():
    timeline = Timeline()

    def fails():
        torch.set_grad_enabled(False)
        torch.manual_seed(99)
        timeline.sleep(1.0)
        raise ValueError("mine")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        run(timeline, [fails])
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pending_gauss_is_seen_where_the_generator_stands_as_before():
    """Seeded again, a generator comes to where it stood, with and without a number that waits."""
    timeline = Timeline()

    def program():
        drawn = []
        for numbers in (2, 1, 2, 1):
            np.random.seed(7)
            np.random.standard_normal(numbers)
            timeline.sleep(1.0)
            drawn.append(float(np.random.standard_normal()))
        return drawn

    np.random.seed(7)
    first = np.random.standard_normal(3)
    expected = [first[2], first[1]] * 2
    assert run(timeline, [program, program]) == [expected] * 2
