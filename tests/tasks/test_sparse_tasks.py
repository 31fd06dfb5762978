"""The tasks linear, fm and ffm: made from files, by spec strings."""

import numpy as np
import pytest

import manyhands as mh
from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from manyhands.tasks.finding import task_of
from manyhands.tasks.sparse_rows import slice_rows


@pytest.fixture
def rows(tmp_path):
    random = np.random.default_rng(0)
    for name, count in (("train", 900), ("valid", 100)):
        libsvm, libffm = [], []
        for _ in range(count):
            keys = [random.integers(5), 5 + random.integers(5)]  # of the fields 0 and 1
            target = int((keys[0] < 2) == (keys[1] < 7))
            libsvm.append(f"{2 * target - 1} " + " ".join(f"{key + 1}:1" for key in keys))
            libffm.append(f"{target} " + " ".join(f"{field}:{key}:1" for field, key in enumerate(keys)))
        (tmp_path / f"{name}.svm").write_text("\n".join(libsvm))
        (tmp_path / f"{name}.ffm").write_text("\n".join(libffm))
    return tmp_path


def test_a_task_by_its_name_learns(rows):
    """Targets are a matter of pairs: what has no pairs (linear) gets them no better than chance."""
    files = "path={0}/train.{1},validation_path={0}/valid.{1}"
    for name, kind, options, low, high in (
        ("linear", "svm", "loss=hinge,ridge=0.1,bias=false", 0.3, 0.93),
        ("fm", "svm", "k=4,rate=0.5", 0.95, 1),
        ("ffm", "ffm", "k=2,epochs=20", 0.95, 1),
    ):
        task = task_of(f"{name}:{files.format(rows, kind)},{options}")
        assert low <= mh.train(task, strategy="solo", workers=1).metrics["validation_accuracy"] <= high, name


def test_options_reach_the_kernel_and_validation_rows_may_have_more_features(rows):
    task = task_of(f"linear:path={rows}/train.svm,loss=hinge,ridge=0.1,bias=false,merge_every=7,rate_decay=0.9")
    kernel = task.kernel
    assert (kernel.loss, kernel.ridge, kernel.bias, kernel.merge_every) == ("hinge", 0.1, False, 7)
    assert (task.rate, task.rate_decay, task.batch_size_per_worker) == (0.1, 0.9, 900 // 16)
    assert kernel.degrees.sum() == 1800
    assert task_of(f"ffm:path={rows}/train.ffm,field_count=9,features=50").kernel.fields == 9
    (rows / "valid.svm").write_text("1 12:1\n")
    task = task_of(f"linear:path={rows}/train.svm,validation_path={rows}/valid.svm,ridge=0.5")
    assert task.kernel.features == 12
    assert len(task.kernel.degrees) == 12


def test_a_slice_takes_10_ms_and_an_epoch_16_slices():
    rows = Csr(np.arange(100_001), np.zeros(100_000, int), np.ones(100_000), np.ones(100_000))
    assert slice_rows(rows, 10_000) == 1_000
    assert slice_rows(rows, 1) == 100_000 // 16
    assert slice_rows(rows.take([0]), 1) == 1


def test_bad_input_is_known_before_training(rows):
    (rows / "three.svm").write_text("3 1:1\n")
    for spec, error, why in (
        ("linear", BadInput, "needs path"),
        ("linear:path={0}/none.svm", BadInput, "none.svm"),
        ("linear:path={0}/train.svm,los=hinge", UnknownName, "no option 'los'"),
        ("linear:path={0}/three.svm", BadInput, "targets must be 0 and 1"),
        ("fm:path={0}/three.svm", BadInput, "targets must be 0 and 1"),
        ("ffm:path={0}/train.svm", BadInput, "line 1, column .: expected field:index:value"),
        ("ffm:path={0}/train.ffm,field_count=1", BadInput, "field 1 is out of range"),
    ):
        with pytest.raises(error, match=why):
            task_of(spec.format(rows))
    assert "squared" in str(task_of(f"fm:path={rows}/three.svm,loss=squared").kernel)
