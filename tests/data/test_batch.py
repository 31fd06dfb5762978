"""data/batch.py: rows of nested structures."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.data.batch import describe, first_rows, row_at, rows_of, slice_rows, to_device
from refusals import refused

Pair = namedtuple("Pair", "x y")


@dataclass
class Labelled:
    x: torch.Tensor
    names: list
    scale: float = 2.0


def test_rows_of_every_kind_of_structure():
    x = torch.arange(12.0).view(4, 3)
    for batch in (
        x,
        x.numpy(),
        [x, x],
        (x, x[:, 0]),
        {"a": {"b": x}},
        Pair(x, x),
        Labelled(x, list("abcd")),
        UserDict(a=x),
        ["a", "b", "c", "d"],
    ):
        assert rows_of(batch) == 4, batch
    refused(r"\['x'\]: 4, \['y'\]\[0\]: 3", rows_of, {"x": torch.zeros(4), "y": [torch.zeros(3)]})
    for batch in (None, {}, torch.tensor(1.0), [], object()):
        refused("first dimension counts rows", rows_of, batch)


def test_slices_keep_the_structure_and_are_views():
    x = torch.arange(12.0).view(4, 3)
    whole = {"pair": Pair(x, x.numpy()), "list": [x, ("p", "q", "r", "s")], "labelled": Labelled(x, [1, 2, 3, 4])}
    cut = slice_rows(whole, 1, 3)
    assert isinstance(cut["pair"], Pair)
    assert cut["list"][1] == ("q", "r")
    assert (cut["labelled"].names, cut["labelled"].scale) == ([2, 3], 2.0)
    assert cut["pair"].x.data_ptr() == x[1:].data_ptr()
    assert torch.equal(cut["list"][0], x[1:3])
    row = row_at((torch.arange(6).view(3, 2), np.array(["a", "b", "c"])), 1)
    assert (row[0].tolist(), row[1]) == ([2, 3], "b")


def test_what_belongs_to_the_whole_batch_is_neither_counted_nor_cut():
    batch = {"x": torch.zeros(5, 2), "temperature": torch.tensor(0.5), "kind": "train", "nothing": None}
    assert rows_of(batch) == 5
    cut = slice_rows(batch, 0, 2)
    assert cut["temperature"] is batch["temperature"]
    assert cut["kind"] == "train"


def test_mappings_keep_their_class():
    cut = first_rows(OrderedDict(b=torch.arange(4), a=torch.arange(4)), 1)
    assert type(cut) is OrderedDict
    assert list(cut) == ["b", "a"]
    assert type(first_rows(UserDict(a=torch.arange(4)), 2)) is UserDict


def test_to_device_moves_tensors_and_what_moves_itself():
    class Graph:
        device = None

        def to(self, device):
            self.device = device
            return self

    batch = {"x": torch.zeros(3), "names": ["a", "b", "c"], "graph": Graph(), "array": np.zeros(3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["names"] == ["a", "b", "c"]
    assert moved["graph"].device == torch.device("meta")
    assert moved["array"] is batch["array"]
    x = torch.zeros(3)
    assert to_device((x,), torch.device("cpu"))[0] is x


def test_descriptions():
    assert describe({"a": 1}) == "dict with keys a"
    assert describe(torch.zeros(2, 3)) == "Tensor of shape [2, 3]"
    assert describe([1, "a"]) == "list of int, str"
    assert describe(3) == "int"
