"""The tasks that read files, made by spec strings."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from manyhands.kernels.skip_gram import SkipGram
from manyhands.kernels.word_vectors import WordVectors
from manyhands.tasks import sparse_rows, table_file
from manyhands.tasks.finding import task_of
from manyhands.tasks.table_file import read_columns
from manyhands.tasks.word2vec_task import SLICE_WORDS
from refusals import refused


def ratings_of(count=4000):
    random = np.random.default_rng(0)
    users, items = random.integers(50, size=count), random.integers(40, size=count)
    p, q = random.normal(size=(50, 2)), random.normal(size=(40, 2))
    return {"user": users, "item": items, "rating": 3 + (p[users] * q[items]).sum(1)}


def write(path, columns):
    if path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    return path


def test_factors_of_a_file_whose_ratings_come_by_cells(tmp_path):
    ratings = ratings_of()
    rows = sorted(zip(*(ratings.values()), strict=True))
    options = "users=user,items=item,ratings=rating,held_out=0.1,rank=4,ridge=0.01,epochs=20,rate=0.3"
    for suffix in (".csv", ".npz", ".parquet"):
        path = write(tmp_path / f"ratings{suffix}", ratings | {"timestamp": np.arange(len(rows))})
        task = task_of(f"factors:path={path},{options}")
        assert (task.kernel.users, task.kernel.items, task.kernel.rank, task.kernel.ridge) == (50, 40, 4, 0.01)
        assert task.batch_size_per_worker == len(task.train_data["ratings"]) // 16
        assert 300 < len(task.validation_data["ratings"]) < 500
        parts = [[data[n] for n in ("users", "items", "ratings")] for data in (task.train_data, task.validation_data)]
        together = [np.concatenate(both) for both in zip(*parts, strict=True)]
        assert np.allclose(sorted(zip(*together, strict=True)), rows, rtol=1e-6), "all ratings, each once"
    run = mh.train(task, strategy="solo")
    assert run.metrics["validation_rmse"] < 0.4 < ratings["rating"].std()
    train = write(tmp_path / "train.csv", {"users": [0, 1, 2], "items": [0, 0, 1], "ratings": [1, 2, 3.5]})
    other = write(tmp_path / "valid.csv", {"users": [7], "items": [3], "ratings": [4]})  # a file of their own
    task = task_of(f"factors:path={train},validation_path={other},biases=false,seed=3,batch_size=2")
    assert (task.kernel.users, task.kernel.items, task.kernel.biases) == (8, 4, False)
    assert (task.kernel.mean, task.kernel.scale) == (np.mean([1, 2, 3.5]), np.std([1, 2, 3.5]))
    assert (task.seed, task.batch_size, task.shuffle) == (3, 2, False)
    users, items = np.arange(2000) % 2 * 100_000, np.arange(2000) // 2
    path = write(tmp_path / "train.npz", {"users": users, "items": items, "ratings": np.ones(2000)})
    given = task_of(f"factors:path={path}").train_data
    assert np.count_nonzero(np.diff(given["users"].astype(int))) == 1
    assert not np.array_equal(np.sort(given["items"][:1000]), given["items"][:1000])


def test_bad_files_of_ratings(tmp_path):
    good, keys = {"users": [1], "items": [1], "ratings": [2]}, "'users' must hold keys, whole numbers from 0"
    two = {"users": [1, 1], "items": [1, 1]}
    for columns, options, words in (
        ({"users": [1], "items": [1], "stars": [2]}, "", "no column ratings; it has users, items, stars: .*=NAME"),
        (good | {"users": ["a"]}, "", "'users' .* must hold numbers, and row 1 holds 'a'"),
        (good | {"users": [1.5]}, "", keys),
        (good | {"users": [-1]}, "", keys),
        (good | {"items": [10**9]}, "", "keys up to 1,000,000,000 in 1 rating"),
        (two | {"ratings": [2, "x"]}, "", "'ratings' .* row 2 holds 'x'"),
        (two | {"ratings": [2, "inf"]}, "", "'ratings' .* row 2 holds inf"),
        (good | {"ratings": [""]}, "", "'ratings' .* has missing values"),
        (good | {"ratings": ["3,4"]}, "", "cannot read .*ratings.csv: .*each line have a value"),
        (good, ",held_out=1.5", "held_out must be a share"),
    ):
        path = write(tmp_path / "ratings.csv", columns)
        refused(words, task_of, f"factors:path={path}{options}")
    for name in ("none.csv", "none.npz", "none.parquet", "ratings.xlsx"):
        refused(name, read_columns, str(tmp_path / name), {})


def test_kmeans_of_a_file(tmp_path):
    random = np.random.default_rng(0)
    points = np.array([[0, 0], [20, 0], [0, 20]])[random.integers(3, size=2000)] + random.normal(size=(2000, 2))
    np.save(tmp_path / "rows.npy", points)
    write(tmp_path / "rows.csv", {"x": points[:, 0], "y": points[:, 1]})
    for path in (tmp_path / "rows.npy", tmp_path / "rows.csv"):
        task = task_of(f"kmeans:path={path},validation_path={path},clusters=3,minibatch=50,epochs=2")
        run = mh.train(task, strategy="solo")
        assert sorted(run.model.tables()["centres"].round(-1).tolist()) == [[0, 0], [0, 20], [20, 0]]
        assert run.metrics["validation_loss"] == pytest.approx(2, rel=0.1)
    np.save(tmp_path / "flat.npy", np.zeros(3))
    write(tmp_path / "text.csv", {"x": [1, 2], "name": ["a", "b"]})
    for rows, clusters, words in (
        ("flat.npy", 1, r"flat.npy must hold an array \[rows, columns\], and holds one of shape \[3\]"),
        ("text.csv", 1, r"column 'name' .* row 1 holds 'a'"),
        ("rows.csv", 2001, "clusters must be a whole number from 1 to the number of rows, 2,000, not 2001"),
    ):
        refused(words, task_of, f"kmeans:path={tmp_path}/{rows},clusters={clusters}")


def test_glove_of_a_file(tmp_path):
    random = np.random.default_rng(0)
    path = tmp_path / "text"
    path.write_text("\n".join(" ".join(map(str, random.integers(30, size=50))) for _ in range(100)))
    task = task_of(f"glove:path={path},min_count=2,lower=true,window=3,dim=8,x_max=5,epochs=3")
    assert (task.kernel.words, task.kernel.dim, task.kernel.x_max, task.shuffle) == (30, 8, 5, False)
    assert len(task.train_data["counts"]) == 900
    assert task.train_data["counts"].sum() == pytest.approx(2 * 100 * (49 + 48 / 2 + 47 / 3), rel=1e-5)
    run = mh.train(task, strategy="solo")
    assert run.model.vectors().shape == (30, 8)
    assert len(run.model.most_similar("7", topn=3)) == 3
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    # a slice takes 10 ms, and an epoch 16 slices
    assert [table_file.slice_rows(rows, 50) for rows in (10**9, 1600, 3)] == [200_000, 100, 1]


def test_cuts_of_a_file(tmp_path):
    random = np.random.default_rng(0)
    planted = random.integers(0, 3, 200)
    u, v = random.integers(0, 200, (2, 3000))
    edges = {"from": u, "to": v, "cost": np.where(planted[u] == planted[v], 1.0, 0.05)}
    path = write(tmp_path / "edges.csv", edges)
    known = write(tmp_path / "known.csv", {"nodes": np.arange(20), "classes": planted[:20]})
    task = task_of(f"cuts:path={path},known_path={known},nodes=from,others=to,weights=cost")
    assert (task.kernel.classes, len(task.kernel.known)) == (3, 200)
    run = mh.train(task, strategy="solo")
    assert (run.model.tables()["points"].argmax(1) == planted).mean() > 0.95
    one = {"nodes": [0], "others": [1], "weights": [1]}
    for bad, classes, words in (
        (one | {"nodes": [0.5]}, {"nodes": [0], "classes": [0]}, "whole numbers"),
        (one, {"nodes": [0], "classes": [-1]}, "classes"),
        ({"nodes": [0], "others": [1]}, {"nodes": [0], "classes": [0]}, "weights"),
    ):
        paths = write(tmp_path / "bad.csv", bad), write(tmp_path / "classes.csv", classes)
        refused(words, task_of, f"cuts:path={paths[0]},known_path={paths[1]}")


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


def test_options_reach_the_kernel_and_a_slice_takes_10_ms(rows):
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
    rows = Csr(np.arange(100_001), np.zeros(100_000, int), np.ones(100_000), np.ones(100_000))
    assert sparse_rows.slice_rows(rows, 10_000) == 1_000
    assert sparse_rows.slice_rows(rows, 1) == 100_000 // 16
    assert sparse_rows.slice_rows(rows.take([0]), 1) == 1


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
        refused(why, task_of, spec.format(rows), kind=error)
    assert "squared" in str(task_of(f"fm:path={rows}/three.svm,loss=squared").kernel)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(f"w{i}" for i in random.zipf(1.5, 9) % 50) for _ in range(9000)))
    return path


def test_options_are_those_of_the_kernel_and_what_was_left_out_is_shown(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(f"word2vec:path={text},dim=7,window=2,negative=3,min_count=20,sample=0.1,epochs=2,seed=3")
    kernel = task.kernel
    assert isinstance(kernel, SkipGram)
    assert (kernel.dim, kernel.window, kernel.negative, kernel.sample) == (7, 2, 3, 0.1)
    assert min(kernel.vocabulary.counts) >= 20
    assert (task.epochs, task.seed, task.rate, task.last_rate) == (2, 3, 0.025, 0.0001)
    assert task.batch_size_per_worker == pytest.approx(SLICE_WORDS / 9, rel=0.1)
    assert task_of(f"word2vec:path={text},cbow=true").rate == 0.05
    assert task_of(f"word2vec:path={text},cbow=true,rate=0.1").rate == 0.1
    with caplog.at_level("WARNING"):
        task = task_of(f"word2vec:path={text},min_count=1000")
    assert task.train_data.counted.rare > 0
    assert f"{task.train_data.counted.rare:,} rare words" in caplog.text
    refused("word2vec needs path", task_of, "word2vec")
    refused("no file or folder", task_of, f"word2vec:path={tmp_path / 'none'}")


def test_it_learns(text: Path) -> None:
    run = mh.train(f"word2vec:path={text},dim=8,batch_size_per_worker=200", strategy="solo")
    assert isinstance(run.model, WordVectors)
    untrained = 6 * np.log(2)  # of a word beside another and five drawn ones, where all products are 0
    assert run.history[-1]["loss"] < 0.8 * untrained
    assert run.model.outputs.abs().max() > 0.1
