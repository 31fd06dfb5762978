"""A declared table: what its fields may be, and how its rows begin."""

from typing import Any

import numpy as np

import manyhands as mh
from manyhands.sparse.initial import initial_rows, mix64
from manyhands.sparse.rows import Rows
from refusals import refused


def test_what_cannot_be_is_refused() -> None:
    for fields, error, text in [
        ({"rows": 0}, mh.BadInput, "rows"),
        ({"rows": None}, mh.BadInput, "number of rows"),
        ({"rows": 3, "dim": 1.5}, mh.BadInput, "dim"),
        ({"rows": 3, "dtype": "float16"}, mh.UnknownName, "float16"),
        ({"rows": 3, "initial": "gaussian:1"}, mh.UnknownName, "gaussian"),
        ({"rows": 3, "initial": "zeros:1"}, mh.UnknownName, "zeros:1"),
        ({"rows": 3, "initial": "uniform"}, mh.UnknownName, "uniform"),
        ({"rows": 3, "initial": "uniform:x"}, mh.BadInput, "uniform:x"),
        ({"rows": 3, "initial": "normal:-1"}, mh.BadInput, "normal:-1"),
    ]:
        refused(text, lambda fields: Rows(**fields), fields, kind=error)


def test_rows_begin_as_their_declaration_says() -> None:
    def begin(initial: str, dim: int = 4) -> Any:
        return initial_rows(Rows(rows=5000, dim=dim, initial=initial), "t", 0, range(5000))

    assert not begin("zeros").any()
    assert (begin("constant:-1.5") == -1.5).all()
    uniform, normal = begin("uniform:2"), begin("normal:2")
    assert -2 <= uniform.min() < -1.99
    assert 1.99 < uniform.max() < 2
    assert abs(uniform.mean()) < 0.03
    assert abs(uniform.std() - 2 / 3**0.5) < 0.03
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 2) < 0.05
    assert 0.67 < (abs(normal) < 2).mean() < 0.70  # a normal distribution's share within one deviation


def test_a_number_depends_on_seed_table_key_and_column_alone() -> None:
    rows = Rows(rows=100, dim=6, initial="uniform:1")
    whole = initial_rows(rows, "t", 3, range(100))
    keys = np.array([99, 0, 41, 41])
    assert np.array_equal(initial_rows(rows, "t", 3, keys), whole[keys])
    narrow = Rows(rows=100, dim=2, initial="uniform:1")
    assert np.array_equal(initial_rows(narrow, "t", 3, range(100)), whole[:, :2])
    others = [initial_rows(rows, *other, range(100)) for other in (("u", 3), ("t", 4))]
    assert all(not np.isin(other, whole).any() for other in others)
    assert len(np.unique(whole)) == whole.size  # neighbours have nothing in common
    # SplitMix64 from the seed 0: the first output of its reference implementation
    assert int(mix64(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF
