from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.engines.hosts.plain_values import decode, encode
from manyhands.errors import BadInput, ManyhandsError


@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "text", [1, [2]], (1, "a"), {"a": [None]}, {"tuple": 1}, {"tensor": 0}, []]
)
def test_what_goes_in_comes_out(value: Any) -> None:
    encoded, tensors = encode(value, "the value")
    found = decode(encoded, tensors)
    assert found == value
    assert type(found) is type(value)


def test_tensors_go_beside() -> None:
    value = {"a": torch.arange(3), "b": [torch.ones(2, 2)]}
    encoded, tensors = encode(value, "the value")
    assert encoded == {"dict": {"a": {"tensor": 0}, "b": [{"tensor": 1}]}}
    assert tensors == [value["a"], value["b"][0]]
    assert decode(encoded, tensors)["b"][0] is value["b"][0]


class Odd:
    pass


@pytest.mark.parametrize(
    "part", [Odd(), {1: 2}, {1}, b"", lambda: 0, torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex64)]
)
def test_anything_else_is_refused_by_its_place(part: Any) -> None:
    with pytest.raises(BadInput, match=r"the value\['a'\]\[1\] is a .* cannot return that"):
        encode({"a": [0, part]}, "the value")


@pytest.mark.parametrize(
    "encoded", [{"tensor": 1}, {"tensor": -1}, {"tuple": 1}, {"dict": []}, {"other": 1}, {"a": 1, "b": 2}, {}]
)
def test_what_encode_never_wrote_is_refused(encoded: Any) -> None:
    with pytest.raises(ManyhandsError, match="cannot be read"):
        decode(encoded, [torch.zeros(1)])
