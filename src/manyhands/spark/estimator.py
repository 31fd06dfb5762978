"""A stage of a Spark ML pipeline: `Estimator.fit(df)` trains on the cluster, `Model.transform(df)` predicts there."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pyspark.ml import Estimator as SparkEstimator
from pyspark.ml import Model as SparkModel
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol, HasWeightCol
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from torch import nn
from torch.nn import functional as F
from typing_extensions import override

from manyhands.callbacks import EarlyStopping
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.errors import BadInput
from manyhands.recording.run import Run
from manyhands.spark import stored_model
from manyhands.spark.dataframe import frame, plain, split
from manyhands.spark.keras_models import is_keras, metrics_of, single_output_threshold
from manyhands.spark.predictions import OUTPUTS, Predict, column_of, evaluate
from manyhands.spark.weighted_loss import WeightedLoss, WeightedMetrics
from manyhands.task import Task
from manyhands.training.train import train

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Make = Callable[[], nn.Module]
T = TypeVar("T")
S = TypeVar("S", bound=MLReadable[Any])


def _param(name: str, about: str, convert: Callable[[Any], T]) -> Param[T]:
    return Param(Params._dummy(), name, about, convert)


class _Columns(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasWeightCol):
    """Params that an estimator and its model share."""

    features_cols: Param[list[str]] = _param(
        "features_cols", "feature columns, side by side; empty: featuresCol", TypeConverters.toListString
    )
    output: Param[str] = _param(
        "output",
        "what a prediction is: class (number of the largest output), value (the one output), array; auto: class where "
        "labels are whole numbers",
        TypeConverters.toString,
    )
    threshold: Param[float] = _param(
        "threshold", "a single output above it is class 1: 0 for logits, 0.5 for probabilities", TypeConverters.toFloat
    )
    dtype: Param[str] = _param("dtype", "torch's type of features and of fractional labels", TypeConverters.toString)

    def features(self) -> list[str]:
        """The feature columns, one or more."""
        several = self.getOrDefault(self.features_cols)
        return list(several) if several else [self.getFeaturesCol()]

    def _weight(self) -> str | None:
        return self.getWeightCol() if self.isDefined(self.weightCol) else None

    def framed(self, table: DataFrame) -> DistributedFrame:
        """The rows of a DataFrame as data of a task."""
        names = self.features()
        return frame(
            table,
            features=names[0] if len(names) == 1 else names,
            label=self.getLabelCol(),
            weight=self._weight(),
            dtype=self.getOrDefault(self.dtype),
        )


class Estimator(SparkEstimator["Model"], _Columns, MLWritable, MLReadable["Estimator"]):
    """Trains a PyTorch model on a DataFrame, with any strategy, in the executors.

        model = mh.spark.Estimator(model=Net, num_workers=4, strategy="local-sgd:period=8", epochs=5).fit(df)
        model.transform(df).select("prediction")

    task: a Task with your own loss, optimizer and metrics; its `train_data` is replaced. Batches are (features, label),
        or with weight_col (features, label, weight).
    model: instead of a task, a class or function that makes the module; then `criterion` (default: cross-entropy, for
        labels that are class numbers) and `optimizer` (default: Adam at torch's own rate) make the task. Or a compiled
        Keras model, with its own loss, optimizer and metrics (`mh.keras.task`); then `callbacks`, one of the fields,
        are Keras callbacks.
    features_col: a column of numbers, arrays or vectors, or a list of such. label_col, prediction_col, weight_col:
        columns. validation_indicator_col: a column of booleans; rows where it is true validate. validation_fraction:
        instead, this share of the rows validates, drawn with `seed`. early_stopping: end after so many validations in a
        row without a lower validation loss, and keep the best.
    num_workers, strategy, engine, run_dir: workers, strategy, engine and run_dir of `train`. Each fit has its own
        folder below run_dir, `Model.run.directory`.
    output: the kind of prediction: "class", "value", "array", or "auto", by the label's type. threshold: a single
        output above it is class 1; default: 0, for logits, and 0.5 for a Keras model whose loss takes probabilities.
    fields: any other field of Task (epochs, batch_size, seed, …).

    `fit` trains a copy and does not change its arguments, so it can be called any number of times.

    These are Params of Spark ML, for CrossValidator: numWorkers, epochs, batchSize, seed, strategy and all columns.
    """

    num_workers: Param[int] = _param("num_workers", "workers, one Spark task each", TypeConverters.toInt)
    strategy: Param[str] = _param("strategy", "how replicas agree, as a spec string", TypeConverters.toString)
    epochs: Param[int] = _param("epochs", "passes over the training rows", TypeConverters.toInt)
    batch_size: Param[int] = _param("batch_size", "rows a step of all workers together", TypeConverters.toInt)
    seed: Param[int] = _param("seed", "of initial parameters, order, dropout and split", TypeConverters.toInt)
    validation_indicator_col: Param[str] = _param(
        "validation_indicator_col", "rows where it is true validate", TypeConverters.toString
    )
    validation_fraction: Param[float] = _param(
        "validation_fraction", "share of the rows that validate", TypeConverters.toFloat
    )

    _SCALARS = ("epochs", "batch_size", "seed")

    def __init__(
        self,
        task: Task | None = None,
        *,
        model: Make | None = None,
        criterion: Callable[..., torch.Tensor] | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        features_col: str | Sequence[str] = "features",
        label_col: str = "label",
        prediction_col: str = "prediction",
        weight_col: str | None = None,
        validation_indicator_col: str | None = None,
        validation_fraction: float = 0.0,
        early_stopping: int | None = None,
        num_workers: int = 2,
        strategy: str = "allreduce",
        engine: Any = "spark",
        run_dir: str | None = None,
        output: str = "auto",
        threshold: float | None = None,
        dtype: str = "float32",
        **fields: Any,
    ) -> None:
        super().__init__()
        _check(task, model, output, validation_fraction, validation_indicator_col, early_stopping)
        if is_keras(model) and not (criterion is None and optimizer is None):
            raise BadInput("a compiled Keras model has its own loss and optimizer: leave criterion and optimizer out")
        self._task, self._make, self._criterion, self._optimizer = task, model, criterion, optimizer
        stored_model.remember(model if task is None else task.model)
        self._early_stopping, self._engine, self._run_dir = early_stopping, engine, run_dir
        self._fields = {name: value for name, value in fields.items() if name not in self._SCALARS}
        self._setDefault(features_cols=[], output="auto", dtype="float32", validation_fraction=0.0, threshold=0.0)
        several = [] if isinstance(features_col, str) else list(features_col)
        self._set(
            featuresCol=several[0] if several else features_col,
            features_cols=several if len(several) > 1 else [],
            labelCol=label_col,
            predictionCol=prediction_col,
            num_workers=num_workers,
            strategy=strategy,
            output=output,
            dtype=dtype,
            validation_fraction=validation_fraction,
            **{name: fields[name] for name in self._SCALARS if name in fields},
            **({} if weight_col is None else {"weightCol": weight_col}),
            **({} if threshold is None else {"threshold": threshold}),
            **({} if validation_indicator_col is None else {"validation_indicator_col": validation_indicator_col}),
        )

    # -- training ----------------------------------------------------------------------------------------------------

    @override
    def _fit(self, dataset: DataFrame) -> Model:
        if self._make is _not_saved:
            _not_saved()
        training, validation = self._split(dataset)
        fields: dict[str, Any] = {"train_data": training, "validation_data": validation, **self._fields}
        fields |= {name: self.getOrDefault(name) for name in self._SCALARS if self.isDefined(self.getParam(name))}
        task = self._declared(fields)
        if isinstance(task.model, nn.Module):
            task = task.with_fields(model=copy.deepcopy(task.model))
        options: dict[str, Any] = {}
        if self._early_stopping is not None:
            options = {"callbacks": [EarlyStopping(patience=self._early_stopping)], "keep": "best:validation_loss"}
        run = train(
            task,
            strategy=self.getOrDefault(self.strategy),
            engine=self._engine,
            workers=self.getOrDefault(self.num_workers),
            run_dir=None if self._run_dir is None else f"{self._run_dir}/{uuid.uuid4().hex[:12]}",
            **options,
        )
        model = Model(None if isinstance(task.model, nn.Module) else task.model, run.model, task.metrics)
        model.run = run
        self._copyValues(model)
        if self.getOrDefault(self.output) == "auto":
            whole = any(column.name == "label" and column.dtype == "int64" for column in training.columns)
            model._set(output="class" if whole else "value")
        if not model.isSet(model.threshold):
            model._set(threshold=single_output_threshold(run.model))
        return model

    def _split(self, table: DataFrame) -> tuple[DistributedFrame, DistributedFrame | None]:
        fraction = self.getOrDefault(self.validation_fraction)
        if self.isDefined(self.validation_indicator_col):
            return split(table, self.framed, indicator=self.getOrDefault(self.validation_indicator_col))
        if fraction:
            seed = self.getOrDefault(self.seed) if self.isDefined(self.seed) else 0
            return split(table, self.framed, fraction=fraction, seed=seed)
        return self.framed(table), None

    def _declared(self, fields: dict[str, Any]) -> Task:
        if self._task is not None:
            return self._task.with_fields(**fields)
        if is_keras(self._make):
            from manyhands.keras import task

            return task(self._make, fields.pop("train_data"), **fields)
        own = {"model": self._make, "optimizer": self._optimizer or _adam, **fields}
        criterion = self._criterion or F.cross_entropy
        if self._weight() is None:
            return Task.supervised(criterion=criterion, **own)
        weighted = {"loss": WeightedLoss(criterion), "evaluate": WeightedMetrics(criterion)}
        return Task(**{**weighted, **own})

    @override
    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    @override
    def read(cls) -> MLReader[Estimator]:
        return _Reader(lambda spark, path: Estimator(model=_not_saved))


class Model(SparkModel, _Columns, MLWritable, MLReadable["Model"]):
    """A trained model: `transform` adds the prediction column, `evaluate` computes the task's metrics over a DataFrame.

    module: the nn.Module. run: its training run; None for a loaded model.
    """

    run: Run | None = None

    def __init__(
        self, make: Make | None, module: nn.Module, metrics: Callable[[nn.Module, Any], Any] | None = None
    ) -> None:
        super().__init__()
        self._make, self.module, self._metrics = make, module, metrics
        self._setDefault(features_cols=[], output="value", dtype="float32", threshold=0.0)

    @override
    def _transform(self, dataset: DataFrame) -> DataFrame:
        """The rows with their predictions. Each prediction is computed with its row, so no join is needed."""
        from pyspark.sql.types import ArrayType, DoubleType

        output = self.getOrDefault(self.output)
        kind = ArrayType(DoubleType()) if output == "array" else DoubleType()
        threshold, dtype = self.getOrDefault(self.threshold), self.getOrDefault(self.dtype)
        predict = column_of(Predict(self.module, dtype, output, threshold), kind)
        return dataset.withColumn(self.getPredictionCol(), predict(*(plain(dataset, name) for name in self.features())))

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """{metric: weighted mean over all rows} of the task's metrics, the loss first, computed in the executors."""
        if self._metrics is None:
            raise BadInput(
                "a loaded model has no metrics, which are functions of the task: use a Spark ML evaluator on "
                "transform(df)"
            )
        return evaluate(self.module, self._metrics, self.framed(dataset))

    @override
    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    @override
    def read(cls) -> MLReader[Model]:
        return _Reader(_stored)

    @classmethod
    @override
    def load(cls, path: str, model: Make | None = None) -> Model:
        """Load a saved model.

        model: the class or function that makes its module, as in the Estimator (of a Keras model, its class). None: one
            that this process gave to an Estimator or to `mh.spark.register_model`. Raises BadInput for a folder that
            names anything else: code that a file names is not imported.
        """
        return _Reader(partial(_stored, make=model)).load(path)

    @override
    def copy(self, extra: Any = None) -> Model:
        made: Model = super().copy(extra)
        made.module, made.run = self.module, self.run
        return made


class _Writer(MLWriter):
    """Saves the Params, and of a Model its module. An Estimator's functions (model, loss, optimizer) cannot be saved
    without pickle."""

    def __init__(self, stage: Estimator | Model) -> None:
        super().__init__()
        self._stage = stage

    @override
    def saveImpl(self, path: str) -> None:
        stage = self._stage
        if isinstance(stage, Model):
            stored_model.check(stage._make, stage.module)
        DefaultParamsWriter.saveMetadata(stage, path, self.sc)
        if isinstance(stage, Model):
            stored_model.save(_module_folder(self.sparkSession, path), stage._make, stage.module)


class _Reader(MLReader[S]):
    """make: the stage in a folder, its Params apart."""

    def __init__(self, make: Callable[[SparkSession, str], S]) -> None:
        super().__init__()
        self._make = make

    @override
    def load(self, path: str) -> S:
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        stage: Any = self._make(self.sparkSession, path)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        found: S = stage
        return found


def _stored(spark: SparkSession, path: str, make: Any = None) -> Model:
    made_by, module = stored_model.load(_module_folder(spark, path), make)
    return Model(made_by, module, metrics_of(module))


def _not_saved() -> nn.Module:
    raise BadInput(
        "a saved Estimator holds only its Params, so this loaded one has no model: make a new Estimator with the "
        "model, and copy the Params to it"
    )


def _module_folder(spark: SparkSession, path: str) -> str:
    """The URL of the module's folder in a saved model, with Hadoop's default file system for a path without one."""
    place: Any = spark._jvm.org.apache.hadoop.fs.Path(path, "module")  # type: ignore[union-attr]
    url = str(place.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(place).toString())
    return url.replace("file:/", "file:///", 1) if url.startswith("file:/") and "//" not in url else url


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def _check(
    task: Task | None, model: Any, output: str, fraction: float, indicator: str | None, early_stopping: int | None
) -> None:
    if (task is None) == (model is None):
        raise BadInput("give either a task, or a class or function that makes the model (model=Net)")
    if output not in (*OUTPUTS, "auto"):
        raise BadInput(f"output must be auto or one of {', '.join(OUTPUTS)}, not {output!r}")
    if not 0 <= fraction < 1:
        raise BadInput(f"validation_fraction must be from 0 to below 1, not {fraction!r}")
    if fraction and indicator is not None:
        raise BadInput(
            "validation_fraction and validation_indicator_col both say which rows validate: give one of them"
        )
    if early_stopping is not None and not (fraction or indicator):
        raise BadInput("early_stopping needs rows to validate on: give validation_fraction or validation_indicator_col")
