"""A Spark ML pipeline with a PyTorch model in it: handwritten digits, trained on two workers in the executors.

python examples/spark_digits.py                                              Spark on this machine, two cores
python examples/spark_digits.py --strategy local-sgd:period=8                workers that seldom talk
python examples/spark_digits.py --master spark://HOST:7077                   a cluster

It needs Java and `pip install 'manyhands[spark]'`, on a cluster the same versions on all executors.
"""

import argparse
import os
import sys

from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from torch import nn

import manyhands as mh
from manyhands.tasks.digits_task import load


def network() -> nn.Module:
    """64 pixels -> a logit for each digit."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


parser = argparse.ArgumentParser()
parser.add_argument("--master", default="local[2]")
parser.add_argument("--strategy", default="allreduce")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

if args.master.startswith("local"):
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # this environment's, also where none is activated
spark = SparkSession.builder.appName("digits").master(args.master).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

scans, digits = load()
table = [(Vectors.dense(scan), digit) for scan, digit in zip(scans.flatten(1).tolist(), digits.tolist(), strict=True)]
df = spark.createDataFrame(table, ["pixels", "label"])
train, test = df.randomSplit([0.8, 0.2], seed=0)

scale = StandardScaler(inputCol="pixels", outputCol="features", withMean=True)
learn = mh.spark.Estimator(
    model=network, num_workers=2, strategy=args.strategy, epochs=args.epochs, batch_size=32, seed=0
)
model = Pipeline(stages=[scale, learn]).fit(train)

print(model.stages[-1].run.summary())
predicted = model.transform(test)
predicted.select("label", "prediction").show(5)
accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
print(f"test accuracy: {accuracy:.1%}")
spark.stop()
