"""The optimizer's state, averaged over replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import Unsupported
from manyhands.replica.replica import Replica
from manyhands.testing.threads import together
from manyhands.worker import Worker


class Two(nn.Module):
    """A matrix, and a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))


def averaged(make: Callable[[nn.Module], torch.optim.Optimizer], steps: list[int]) -> list[list[dict[str, Any]]]:
    """Every rank's state of both parameters, after so many steps alone and one average."""

    def program(worker: Worker) -> list[dict[str, Any]]:
        replica = Replica.of(Two(), make, group=worker.group)
        for _ in range(steps[worker.rank]):
            for p in replica.trainable:
                p.grad = torch.full_like(p, worker.rank + 1.0)
            replica.optimizer.step()
        replica.optimizer_state.average(worker.group, 1.0, 0b11)
        return [dict(replica.optimizer.state[p]) for p in replica.trainable]

    return together(len(steps), program)


def test_a_parameters_numbers_are_those_of_the_rank_that_stepped_it_most() -> None:
    alone = averaged(lambda m: torch.optim.NAdam(m.parameters()), [5])[0]
    for states in averaged(lambda m: torch.optim.NAdam(m.parameters()), [2, 5, 0]):
        for state, expected in zip(states, alone, strict=True):
            assert float(state["step"]) == 5
            assert float(state["mu_product"]) == float(expected["mu_product"])


def test_a_number_of_the_optimizers_own_stays_one_also_beside_a_parameter_that_is_one() -> None:
    for states in averaged(lambda m: Own(m.parameters(), "norm", torch.tensor(2.0, dtype=torch.float64)), [0, 1]):
        assert [state["norm"].shape for state in states] == [(), ()]
        assert [float(state["norm"]) for state in states] == [2.0, 2.0]


def test_one_rank_alone_may_have_any_state() -> None:
    """CASE 1"""
    (states,) = averaged(lambda m: torch.optim.Adafactor(m.parameters()), [2])
    assert states[0]["row_var"].shape == (2, 1)


def test_vectors_are_means_also_where_a_rank_has_none() -> None:
    states = averaged(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), [1, 1, 0])
    for w, scale in states:
        assert torch.allclose(w["momentum_buffer"], torch.ones(2, 3, dtype=torch.float64), atol=1e-15)
        assert float(scale["momentum_buffer"]) == pytest.approx(1.0)


def test_state_that_is_not_like_its_parameter_is_refused_by_name_on_all_ranks() -> None:
    refused: list[str] = []

    def program(worker: Worker) -> None:
        replica = Replica.of(Two(), lambda m: torch.optim.Adafactor(m.parameters()), group=worker.group)
        if worker.rank == 0:
            for p in replica.trainable:
                p.grad = torch.ones_like(p)
            replica.optimizer.step()
        with pytest.raises(
            Unsupported,
            match=r"Adafactor .* cannot be averaged.*: col_var \(of w\), row_var \(of w\).*optimizer_state=kept",
        ) as error:
            replica.optimizer_state.average(worker.group, 1.0, 0b11)
        refused.append(str(error.value))

    together(2, program)
    assert len(refused) == 2
    with pytest.raises(Unsupported, match="codes"):  # of another dtype than its parameter
        averaged(lambda m: Own(m.parameters(), "codes", torch.zeros(2, dtype=torch.uint8)), [1, 1])


class Own(torch.optim.SGD):
    """Its state of each parameter is one tensor of this name."""

    def __init__(self, parameters: Any, name: str, value: Tensor) -> None:
        super().__init__(parameters, lr=0.1)
        self.name, self.value = name, value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            shaped = self.value if self.value.dim() == 0 else torch.zeros_like(p, dtype=self.value.dtype)
            self.state[p][self.name] = shaped.clone()


def test_averaged_state_lies_in_one_vector() -> None:
    def program(worker: Worker) -> bool:
        replica = Replica.of(Two(), lambda m: torch.optim.Adagrad(m.parameters()), group=worker.group)
        replica.optimizer_state.average(worker.group, 1.0, 0b11)
        held = [replica.optimizer.state[p]["sum"] for p in replica.trainable]
        vectors = [*held, replica.optimizer_state.vectors["sum"].parts[0]]
        return len({vector.untyped_storage().data_ptr() for vector in vectors}) == 1

    assert together(2, program) == [True, True]
