"""Lines of the user's files."""

import functools
from pathlib import Path

import planted
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.source_locations import SourceLocation

HERE = __file__


def line_of(mark: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.endswith(f"# {mark}"))


def make(width: int = 3) -> nn.Module:  # make
    return nn.Sequential(
        nn.Linear(2, width),
        nn.BatchNorm1d(width),  # first norm
        nn.Sequential(nn.ReLU(), nn.BatchNorm1d(width)),  # second norm
    )


class Held(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(2, 2),
            nn.Dropout(0.1),
            nn.Dropout(0.2),  # second dropout
        )


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make()
        self.layers = nn.ModuleList([nn.Dropout(p) for p in (0.1, 0.2)])  # listed
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1)  # encoder


both = lambda m: nn.Dropout(), lambda x: nn.BatchNorm1d(2)  # two lambdas


def test_layers_in_functions_and_classes() -> None:
    wide = functools.partial(make, width=4)
    assert source_locations.of_module(make(), "1", make) == SourceLocation(HERE, line_of("first norm"), "1")
    assert source_locations.of_module(make(), "2.1", wide) == SourceLocation(HERE, line_of("second norm"), "2.1")
    assert source_locations.of_module(Held(), "2") == SourceLocation(HERE, line_of("second dropout"), "2")
    planted_norm = SourceLocation(planted.__file__, planted.line_of("batch-norm"), "norm")
    assert source_locations.of_module(planted.Normed(), "norm") == planted_norm
    assert source_locations.of_module(nn.Sequential(nn.Linear(1, 1)), "0") is None
    outer = Outer()
    assert source_locations.of_module(outer, "layers.1") == SourceLocation(HERE, line_of("listed"), "layers.1")
    assert source_locations.of_module(outer, "encoder.layers.0.dropout1").line == line_of("encoder")
    # of several lambdas in a line the one with these arguments
    assert source_locations._made_in(both[1], "", "BatchNorm1d", 0) == SourceLocation(HERE, line_of("two lambdas"))
    assert source_locations._made_in(both[0], "", "BatchNorm1d", 0) is None


class Counting:
    def __getitem__(self, i: int) -> int:  # item
        x = i
        self.counts[i] += 1  # counted
        return x

    def __iter__(self):  # iteration
        yield 1


def test_functions_methods_what_wraps_them_and_the_line_that_changes_the_object() -> None:
    line = line_of("make")
    for given in (make, functools.partial(make, 3), functools.partial(functools.partial(make))):
        found = source_locations.of_function(given)
        assert (found.file, found.line) == (HERE, line)
    assert source_locations.of_function(planted.Normed()).file == planted.__file__
    for library in (torch.relu, F.cross_entropy, mh.Task.supervised):
        assert source_locations.of_function(library) is None
    method = source_locations.of_method(Counting(), "__len__", "__iter__")
    assert method == SourceLocation(HERE, line_of("iteration"), "Counting.__iter__")
    assert source_locations.of_change(Counting(), "__getitem__").line == line_of("counted")
    assert source_locations.of_change(Counting(), "__iter__").line == line_of("iteration")
    assert source_locations.of_change(3, "__getitem__") is None


def test_a_file_that_is_no_python_has_no_lines_and_places_are_shown_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cell.py"
    path.write_text("%magic\ndef make(): return nn.Dropout()\n")
    namespace: dict[str, object] = {"nn": nn}
    exec(compile("\ndef make(): return nn.Dropout()\n", str(path), "exec"), namespace)
    assert source_locations._made_in(namespace["make"], "", "Dropout", 0) is None
    assert source_locations.of_function(namespace["make"]).line == 2
    monkeypatch.chdir(tmp_path)
    assert str(SourceLocation(str(tmp_path / "net.py"), 3, "norm")) == "net.py:3 (norm)"
    assert str(SourceLocation("/elsewhere/net.py", 3)) == "/elsewhere/net.py:3"


def test_lines_of_errors_here_and_in_the_text_of_other_processes() -> None:
    with pytest.raises(IndexError) as raised:
        F.cross_entropy(torch.ones(2, 2), torch.tensor([0, 5]))  # raises
    assert source_locations.of_error(raised.value) == SourceLocation(HERE, line_of("raises"))
    outer = RuntimeError("outer")
    outer.__cause__ = raised.value
    assert source_locations.of_error(outer) == SourceLocation(HERE, line_of("raises"))
    text = f'File "{HERE}", line 3, in f\n  File "{torch.__file__}", line 9, in g\n'
    assert source_locations.in_text(text) == SourceLocation(HERE, 3)
    assert source_locations.in_text("nothing") is None
