"""data/csr.py and data/sparse_text.py: sparse rows from scipy, libsvm and libffm text."""

import bz2
import gzip
import random

import numpy as np
import pytest

from manyhands.data.csr import Csr
from refusals import refused

LIBSVM = b"""# a comment alone
1 1:0.5 3:-2e-1 # and one behind

-1 qid:7 2:1\t4:.25\r
+1
0 4:1e2"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="rows.svm"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rows_of(csr):
    return [(row["targets"], dict(zip(row["keys"], row["values"], strict=True))) for row in csr]


def test_libsvm_text(written):
    rows = Csr.libsvm(written(LIBSVM))
    fifth = float(np.float32(-0.2))
    assert rows_of(rows) == [(1, {0: 0.5, 2: fifth}), (-1, {1: 1, 3: 0.25}), (1, {}), (0, {3: 100})]
    assert (rows.features, rows.fields) == (4, None)
    assert (rows.keys.dtype, rows.values.dtype, rows.targets.dtype) == (np.uint32, np.float32, np.float32)
    assert rows_of(Csr.libsvm(written("1 0:1 2:3\n"), zero_based=True)) == [(1, {0: 1, 2: 3})]


def test_libffm_text(written):
    rows = Csr.libffm(written("1 0:7:1 1:3:0.5\n0 1:3:2 0:0:1 1:4:1\n"))
    assert rows_of(rows) == [(1, {7: 1, 3: 0.5}), (0, {3: 2, 0: 1, 4: 1})]
    assert [row["fields"] for row in rows] == [[0, 1], [1, 0, 1]]
    assert (rows.features, rows.field_count) == (8, 2)
    assert Csr.libffm(written("1 0:7:1\n"), fields=5, features=9).field_count == 5


def test_several_files_patterns_and_compression(written, tmp_path):
    paths = [written(gzip.compress(b"1 1:1\n"), "a.svm.gz"), written(bz2.compress(b"0 2:1"), "b.svm.bz2")]
    for given in (paths, str(tmp_path / "*.svm.*")):
        assert rows_of(Csr.libsvm(given)) == [(1, {0: 1}), (0, {1: 1})]


def test_rows_that_lie_across_chunks(written, monkeypatch):
    lines = [f"{i % 2} " + " ".join(f"{k}:{i * k}" for k in range(1, 2 + i % 40)) for i in range(300)]
    good, bad = written("\n".join(lines)), written("\n".join([*lines, "1 1:x"]), "bad.svm")
    for chunk in (16, 64, 1 << 20):
        monkeypatch.setattr("manyhands.data.sparse_text._CHUNK_BYTES", chunk)
        wanted = [(i % 2, {k - 1: i * k for k in range(1, 2 + i % 40)}) for i in range(300)]
        assert rows_of(Csr.libsvm(good)) == wanted, chunk
        refused("line 301, column 5", Csr.libsvm, bad, case=chunk)


def numbers():
    """Texts of numbers: short, long, with exponents, and such that are a hair off the middle of two float32."""
    draw = random.Random(0)
    texts = ["0", "-0", "1", "1.", ".5", "-.5e3", "0.1", "000001.5", "9007199254740993", "3.4028235e38"]
    texts += ["1E+2", "1e22", "1e23", "1e-22", "1e-45", "7e-46", "1e-400"]
    for _ in range(3000):
        digits = "".join(draw.choices("0123456789", k=draw.randint(1, 25)))
        point = draw.randint(0, len(digits))
        texts.append(f"{draw.choice(['', '-', '+'])}{digits[:point]}.{digits[point:]}e{draw.randint(-60, 12)}")
        texts.append(repr(draw.uniform(-1, 1)))
    for _ in range(300):
        low = np.float32(draw.uniform(0, 1))
        middle = (float(low) + float(np.nextafter(low, np.float32(2)))) / 2
        above, below = np.nextafter(middle, 2), np.nextafter(middle, 0)
        texts += [f"{middle:.60f}", f"{middle:.60f}1", f"{above:.60f}", f"{below:.60f}"]
    return texts


def test_numbers_are_what_float_reads(written, monkeypatch):
    from manyhands.data import sparse_text

    texts = numbers()
    rows = [texts[start : start + 7] for start in range(0, len(texts), 7)]
    lines = (f"{row[0]} " + " ".join(f"{i}:{value}" for i, value in enumerate(row, 1)) for row in rows)
    path = written("\n".join(lines))
    wanted = np.array([float(value) for value in texts], np.float32)
    for hard in (1, 3, 1 << 12):
        monkeypatch.setattr("manyhands.data.sparse_text._MOST_HARD", hard)  # fewer than one row has
        read = Csr.libsvm(path)
        assert np.array_equal(read.values.view(np.uint32), wanted.view(np.uint32)), hard  # the sign of zero, too
        assert np.array_equal(read.targets, wanted[::7]), hard
    # only what lies within 1e-15 of the middle of two float32 is left to Python
    powers, zero = sparse_text._POWERS_OF_TEN, np.uint64(0)
    states = [sparse_text._number(np.frombuffer(f"{text} ".encode(), np.uint8), zero, powers)[2] for text in texts]
    assert set(states) == {0, 1}
    assert np.mean(np.array(states[:6017]) == 1) < 0.001


def test_text_of_another_form(written):
    for text, why in [
        ("1 1:1\n1 2:1 2:3\n", "line 2, column 7: index 2 stands twice"),
        ("1 5:1 3:1\n", "line 1, column 7: index 3 comes after a greater one"),
        ("1 abc:1\n", "line 1, column 3: expected index:value"),
        ("1 3\n", "column 3: expected index:value"),
        ("1 -3:1\n", "column 3: expected index:value"),
        ("1 3:4:5\n", "column 5: the value behind the colon must be a number, not '4:5'"),
        ("1 3:x\n", "column 5: the value .* not 'x'"),
        ("1 3:\n", "column 5: the value .* not the end of the line"),
        ("1 3: 4\n", "column 5: the value"),
        ("1 3:1e\n", "column 5: the value"),
        ("1 0:1\n", "column 3: the index is 0, and libsvm counts .* zero_based=True"),
        ("1 4294967297:1\n", "index 4294967297 is out of range"),
        ("x 1:1\n", "line 1, column 1: a target must be a number, not 'x'"),
        ("1,2 1:1\n", "column 1: a target must be a number, not '1,2'"),
        ("3:1 4:1\n", "column 1: a row begins with its target"),
        ("1 3:nan\n", "column 5: the value"),
        ("1 3:1e39\n", "column 5: '1e39' is not finite"),
        ("1 3:1e999\n", "column 5: '1e999' is not finite"),
        ("1 3:3.4028235677973366e38\n", "is not finite"),  # float() reads it, and it rounds to what float32 lacks
        ("1e99 1:1\n", "column 1: '1e99' is not finite"),
        ("1 qid:x 1:1\n", "column 3: expected a whole number behind qid:"),
        ("1 qi\n", "column 3: expected index:value"),
        ("1 1:1 qid:3\n", "column 7: expected index:value"),
        ("", "has no rows"),
        ("\n# a comment\n\n", "has no rows"),
    ]:
        assert "rows.svm" in str(refused(why, Csr.libsvm, written(text), case=text))
    for text, why in [
        ("1 0:1:1\n0 2:1:1\n", "line 2, column 3: field 2 is out of range: there are 2 fields"),
        ("1 1:1\n", "column 3: expected field:index:value"),
        ("1 x:1:1\n", "column 3: expected field:index:value"),
        ("1 0:x:1\n", "column 3: expected field:index:value"),
        ("1 0:1:x\n", "column 7: the value"),
    ]:
        refused(why, lambda path: Csr.libffm(path, fields=2), written(text), case=text)
    assert Csr.libsvm(written("1 3:1\n"), features=3).features == 3
    four = written("1 4:1\n")
    refused("column 3: index 4 .*: there are 3 features, from 1", lambda: Csr.libsvm(four, features=3))
    refused("index 4 .*: there are 4 features, from 0", lambda: Csr.libsvm(four, features=4, zero_based=True))


def test_files_that_cannot_be_read(written, tmp_path):
    for path in (tmp_path / "none.svm", tmp_path / "none*.svm"):
        refused("none", Csr.libsvm, path)
    for data in (b"1 1:1\n", gzip.compress(b"1 1:1\n" * 100)[:-10]):
        refused("rows.svm.gz cannot be read", Csr.libsvm, written(data, "rows.svm.gz"))


def test_of_scipy_sorts_the_indices():
    sparse = pytest.importorskip("scipy.sparse")
    values, indices, offsets = np.array([1.0, 2.0, 3.0]), np.array([2, 0, 1]), np.array([0, 2, 3])
    rows = Csr.of(sparse.csr_matrix((values, indices, offsets), shape=(2, 5)), [1, 0])
    assert rows_of(rows) == [(1, {0: 2, 2: 1}), (0, {1: 3})]
    assert rows.features == 5


def test_degrees_count_the_rows_of_each_feature():
    rows = Csr([0, 2, 3, 3], [0, 2, 2], [1.0] * 3, [1, 0, 1], features=4)
    assert rows.degrees().tolist() == [1, 0, 2, 0]
    assert rows.take([1, 2]).degrees().tolist() == [0, 0, 1, 0]


def test_targets_of_two_classes():
    def check(*targets):
        Csr([*[0] * len(targets), 1], [0], [1.0], targets).check_binary()

    check(1, 0, 1)
    check(1, -1)
    refused(r"row 2 \(from 0\) has 3", check, 1, 0, 3)
    refused("rows with 0 and rows with -1", check, 0, -1, 1)


def test_arrays_that_do_not_fit_together():
    good = {"offsets": [0, 3], "keys": [0, 1, 2], "values": [1.0] * 3, "targets": [1]}
    assert len(Csr(**good)) == 1
    for changes, why in [
        ({"offsets": [0, 2]}, "offsets end with 2"),
        ({"offsets": [1, 3]}, "begin with 0"),
        ({"offsets": [0, 2, 1, 3]}, "never fall"),
        ({"targets": [1, 2]}, "1 rows, and another number"),
        ({"values": [1.0]}, "other numbers of entries"),
        ({"keys": [0, 1, 2.5]}, "whole numbers"),
        ({"keys": [0, 1, -2]}, "at least 0"),
        ({"features": 2}, "below 2, and one is 2"),
        ({"fields": [0, 1, 4], "field_count": 3}, "fields must be below 3"),
    ]:
        refused(why, lambda changes: Csr(**{**good, **changes}), changes)
