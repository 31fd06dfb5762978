from __future__ import annotations

from typing import Any

import torch
from refused_cases import all_refused

from manyhands.engines.hosts.plain_values import decode, encode
from manyhands.errors import ManyhandsError

PLAIN = [None, True, 3, -1.5, "text", [1, [2]], (1, "a"), {"a": [None]}, {"tuple": 1}, {"tensor": 0}, []]


def test_what_goes_in_comes_out_and_tensors_go_beside() -> None:
    for value in PLAIN:
        found = decode(*encode(value, "the value"))
        assert (found, type(found)) == (value, type(value))
    both = {"a": torch.arange(3), "b": [torch.ones(2, 2)]}
    encoded, tensors = encode(both, "the value")
    assert encoded == {"dict": {"a": {"tensor": 0}, "b": [{"tensor": 1}]}}
    assert tensors == [both["a"], both["b"][0]]
    assert decode(encoded, tensors)["b"][0] is both["b"][0]


class Odd:
    pass


def test_anything_else_is_refused_by_its_place() -> None:
    odd: list[Any] = [
        Odd(),
        {1: 2},
        {1},
        b"",
        lambda: 0,
        torch.eye(2).to_sparse(),
        torch.zeros(1, dtype=torch.complex64),
    ]
    words = r"the value\['a'\]\[1\] is a .* cannot return that"
    all_refused(lambda part: encode({"a": [0, part]}, "the value"), [(part, words) for part in odd])


def test_what_encode_never_wrote_is_refused() -> None:
    wrong = [{"tensor": 1}, {"tensor": -1}, {"tuple": 1}, {"dict": []}, {"other": 1}, {"a": 1, "b": 2}, {}]
    cases = [(encoded, "cannot be read") for encoded in wrong]
    all_refused(lambda encoded: decode(encoded, [torch.zeros(1)]), cases, ManyhandsError)
