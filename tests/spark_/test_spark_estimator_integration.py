"""The Estimator in Spark ML: fit, transform, evaluate, pipelines, cross-validation, and what lies on disk."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spark_models import Classes, adam, line
from torch.nn import functional as F

import manyhands as mh
from manyhands.errors import BadInput

pytestmark = pytest.mark.slow


def squares(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    features, label = batch
    return F.mse_loss(model(features)[:, 0], label)


@pytest.fixture(scope="module")
def plane(spark: Any) -> Any:
    """1000 rows of y = 3.14 a + 1.618 b."""
    own = random.Random(1234)
    pairs = [(own.random(), own.random()) for _ in range(1000)]
    return spark.createDataFrame([(a, b, 3.14 * a + 1.618 * b) for a, b in pairs], "a double, b double, y double")


@pytest.fixture(scope="module")
def halves(spark: Any) -> Any:
    """400 rows of two classes, which x[0] + x[1] > 0 tells apart; x as an array, v as a vector, w a weight."""
    from pyspark.ml.functions import array_to_vector

    own = np.random.default_rng(0)
    x = own.normal(size=(400, 2))
    rows = [(i, row.tolist(), int(row.sum() > 0), float(1 + i % 3)) for i, row in enumerate(x)]
    table = spark.createDataFrame(rows, "key long, x array<double>, label int, w double")
    return table.withColumn("v", array_to_vector("x"))


@pytest.fixture(scope="module")
def fitted(halves: Any) -> Any:
    make = partial(Classes, 2, classes=2)
    return mh.spark.Estimator(
        model=make,
        optimizer=adam,
        features_col="v",
        weight_col="w",
        epochs=6,
        batch_size=32,
        validation_fraction=0.2,
        early_stopping=2,
    ).fit(halves)


def test_all_rows_of_a_plane(plane: Any) -> None:
    """CASE 20: one linear unit, Adam 0.2, a row a worker and step: 4.758 at (1, 1)."""
    task = mh.Task(model=line, loss=squares, optimizer=adam, train_data=[0], batch_size_per_worker=1)
    model = mh.spark.Estimator(task, features_col=["a", "b"], label_col="y").fit(plane)
    assert model.module(torch.ones(1, 2)).item() == pytest.approx(4.758, abs=0.005)
    assert model.run.rows == {"total": 1000, "workers": [500, 500], "unused": 0}
    found = model.transform(plane).selectExpr("max(abs(prediction - y))").first()[0]
    assert found < 0.01


def test_predictions_stay_with_their_row(fitted: Any, halves: Any) -> None:
    from pyspark.sql import functions as F_

    many = halves.withColumn("copy", F_.explode(F_.sequence(F_.lit(0), F_.lit(4)))).orderBy(F_.rand()).repartition(7)
    rows = fitted.transform(many).select("key", "x", "label", "prediction").collect()
    assert len(rows) == 2_000
    with torch.no_grad():
        right = fitted.module.eval()(torch.tensor([row["x"] for row in rows])).argmax(1).tolist()
    assert [int(row["prediction"]) for row in rows] == right
    assert sum(row["prediction"] == row["label"] for row in rows) > 1_900


def test_it_validated_apart_and_distributed_evaluate_is_local_evaluate(fitted: Any, halves: Any) -> None:
    trained = fitted.run.rows["total"] / (fitted.run.history[-1]["epoch"] + 1)
    assert 280 <= trained <= 360
    assert trained == int(trained)
    found = fitted.evaluate(halves)
    rows = halves.collect()
    x, y, w = (torch.tensor([row[name] for row in rows]) for name in ("x", "label", "w"))
    with torch.no_grad():
        logits = fitted.module.eval()(x.float())
    loss = (F.cross_entropy(logits, y, reduction="none") * w).sum() / w.sum()
    assert found["loss"] == pytest.approx(float(loss), abs=1e-6)
    assert found["accuracy"] == pytest.approx(float(((logits.argmax(1) == y) * w).sum() / w.sum()), abs=1e-6)


def test_a_pipeline_is_saved_without_pickle(fitted: Any, halves: Any, tmp_path: Path) -> None:
    from pyspark.ml import PipelineModel

    PipelineModel([fitted]).write().overwrite().save(str(tmp_path / "pipeline"))
    files = [path for path in (tmp_path / "pipeline").rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix == ".safetensors"] == ["model.safetensors"]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".bin")]
    again = PipelineModel.load(str(tmp_path / "pipeline"))
    both = [model.transform(halves).select("key", "prediction").orderBy("key").collect() for model in (fitted, again)]
    assert both[0] == both[1]
    assert again.stages[0].uid == fitted.uid
    with pytest.raises(BadInput, match="a loaded model has no metrics"):
        again.stages[0].evaluate(halves)


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")  # Spark's own
def test_a_search_tries_params_and_is_saved(halves: Any, tmp_path: Path) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel

    make, runs = partial(Classes, 2), str(tmp_path / "runs")
    estimator = mh.spark.Estimator(model=make, optimizer=adam, features_col="x", epochs=1, batch_size=32, run_dir=runs)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [2]).build()
    judge = MulticlassClassificationEvaluator(metricName="accuracy")
    search = TrainValidationSplit(estimator=estimator, estimatorParamMaps=grid, evaluator=judge, seed=1)
    best = search.fit(halves.select("x", "label"))
    assert max(best.validationMetrics) > 0.8
    assert best.bestModel.run.info["epochs"] == 2
    assert len(list((tmp_path / "runs").iterdir())) == 2
    best.save(str(tmp_path / "search"))
    again = TrainValidationSplitModel.load(str(tmp_path / "search"))
    assert again.validationMetrics == best.validationMetrics
    x = torch.randn(4, 2)
    assert torch.equal(again.bestModel.module.eval()(x), best.bestModel.module.eval()(x))
    with pytest.raises(BadInput, match="this loaded one has no model"):
        again.getEstimator().fit(halves)


def test_validation_rows_by_a_column(halves: Any) -> None:
    marked = halves.selectExpr("*", "key < 100 as judged")
    model = mh.spark.Estimator(
        model=partial(Classes, 2), features_col="x", validation_indicator_col="judged", output="array", batch_size=50
    ).fit(marked)
    assert model.run.rows["total"] == 300
    assert {name for row in model.run.history for name in row} >= {"loss"}
    assert len(model.transform(halves).first()["prediction"]) == 2


def test_what_cannot_be(spark: Any, plane: Any) -> None:
    with pytest.raises(BadInput, match="give either a task, or a class or function"):
        mh.spark.Estimator()
    with pytest.raises(BadInput, match="early_stopping needs rows to validate on"):
        mh.spark.Estimator(model=line, early_stopping=2)
    with pytest.raises(BadInput, match="no column 'c'; it has a, b, y"):
        mh.spark.Estimator(model=line, features_col=["a", "c"], label_col="y").fit(plane)
    with pytest.raises(BadInput, match="column 'a' holds string, not numbers"):
        mh.spark.frame(plane.selectExpr("'x' as a", "y"), features="a", label="y")
    with pytest.raises(BadInput, match="another process cannot import"):
        mh.spark.Model(lambda: None, line()).write().saveImpl("nowhere")


def test_a_compiled_keras_model(halves: Any, keras: Any, tmp_path: Path) -> None:
    """Its own loss, optimizer and metrics; fit leaves it as it was, whatever is fitted is saved as Keras saves it."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    net.compile(keras.optimizers.Adam(0.1), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    before = [weight.copy() for weight in net.get_weights()]
    estimator = mh.spark.Estimator(model=net, features_col="x", epochs=3, batch_size=32, seed=1)
    model = estimator.fit(halves)
    assert all((a == b).all() for a, b in zip(before, net.get_weights(), strict=True))
    trained = model.module.keras
    rows = halves.collect()
    x, y = np.array([row["x"] for row in rows], "float32"), np.array([row["label"] for row in rows])
    right = [float(p > 0.5) for p in trained.predict(x, verbose=0)[:, 0]]
    assert [row["prediction"] for row in model.transform(halves).select("prediction").collect()] == right
    assert sum(p == label for p, label in zip(right, y, strict=True)) > 380

    found, expected = model.evaluate(halves), trained.evaluate(x, y, verbose=0, return_dict=True)
    assert found == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}
    model.write().overwrite().save(str(tmp_path / "model"))
    again = mh.spark.Model.load(str(tmp_path / "model"))
    assert (again.module.keras.predict(x, verbose=0) == trained.predict(x, verbose=0)).all()
