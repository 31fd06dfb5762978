"""The first operation in which two passes differ."""

import torch
from torch import Tensor

from manyhands.evidence.check.function_mode import FunctionMode
from manyhands.evidence.check.operations import OperationLog, first_change, first_mixing

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WEIGHTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def journal(function: object, rows: Tensor, of: int) -> OperationLog:
    found = OperationLog(of)
    with FunctionMode(after=found.after):
        function(rows)  # type: ignore[operator]
    return found


def mixing(function: object) -> str | None:
    found = first_mixing(journal(function, ROWS[:6], 6), journal(function, ROWS[3:], 6))
    return None if found is None else found.function


def apart(x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ WEIGHTS)  # [6, 6]: as many columns as rows
    return torch.softmax(hidden, 1).log().mean()


def test_rows_that_go_their_own_way_do_not_mix() -> None:
    assert mixing(apart) is None


def test_what_mixes_rows_is_found() -> None:
    assert mixing(lambda x: torch.softmax(torch.tanh(x), 0)) == "softmax"
    assert mixing(lambda x: (x * 2) @ (x * 2).T) in ("matmul", "__matmul__")
    assert mixing(lambda x: x - x.mean(0)) == "sub"
    assert mixing(lambda x: torch.cumsum(x, 0)) == "cumsum"


def test_the_first_change() -> None:
    scale = [1.0]

    def pass_(x: Tensor) -> Tensor:
        y = x + 1
        z = y * scale[0]
        scale[0] += 1
        return z.sum()

    one, other = journal(pass_, ROWS, 1), journal(pass_, ROWS, 1)
    found = first_change(one, other)
    assert found is not None
    assert found.function == "mul"
    assert found.place is not None
    assert found.place.file == __file__
    assert first_change(one, one) is None
