"""The tasks factors, kmeans and glove: made from files, by spec strings."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.tasks.finding import task_of
from manyhands.tasks.table_file import read_columns, slice_rows


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


def test_factors_of_a_file(tmp_path):
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


def test_ratings_come_by_cells(tmp_path):
    """Two users far from each other are in two cells: rows of a cell stand together, and in a random order."""
    users, items = np.arange(2000) % 2 * 100_000, np.arange(2000) // 2
    path = write(tmp_path / "train.npz", {"users": users, "items": items, "ratings": np.ones(2000)})
    given = task_of(f"factors:path={path}").train_data
    assert np.count_nonzero(np.diff(given["users"].astype(int))) == 1
    assert not np.array_equal(np.sort(given["items"][:1000]), given["items"][:1000])


def test_bad_files_of_ratings(tmp_path):
    good, keys = {"users": [1], "items": [1], "ratings": [2]}, "'users' must hold keys, whole numbers from 0"
    two = {"users": [1, 1], "items": [1, 1]}
    for columns, options, words in (
        (
            {"users": [1], "items": [1], "stars": [2]},
            "",
            "no column ratings; it has users, items, stars: .*ratings=NAME",
        ),
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
        with pytest.raises(BadInput, match=words):
            task_of(f"factors:path={path}{options}")
    for name in ("none.csv", "none.npz", "none.parquet", "ratings.xlsx"):
        with pytest.raises(BadInput, match=name):
            read_columns(str(tmp_path / name), {})


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


def test_bad_files_of_rows(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros(3))
    write(tmp_path / "text.csv", {"x": [1, 2], "name": ["a", "b"]})
    write(tmp_path / "few.csv", {"x": [1, 2]})
    for rows, clusters, words in (
        ("flat.npy", 1, r"flat.npy must hold an array \[rows, columns\], and holds one of shape \[3\]"),
        ("text.csv", 1, r"column 'name' .* row 1 holds 'a'"),
        ("few.csv", 3, "clusters must be a whole number from 1 to the number of rows, 2, not 3"),
    ):
        with pytest.raises(BadInput, match=words):
            task_of(f"kmeans:path={tmp_path}/{rows},clusters={clusters}")


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
    assert [slice_rows(rows, 50) for rows in (10**9, 1600, 3)] == [200_000, 100, 1]


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
        with pytest.raises(BadInput, match=words):
            task_of(f"cuts:path={paths[0]},known_path={paths[1]}")
