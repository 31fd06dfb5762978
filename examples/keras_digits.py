"""A Keras model on several workers: handwritten digits, with its own optimizer, metrics and early stopping.

python examples/keras_digits.py                                              two workers
python examples/keras_digits.py --workers 1                                  what model.fit does
python examples/keras_digits.py --strategy local-sgd:period=8                workers that seldom talk
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from numpy.typing import NDArray

import manyhands as mh
from manyhands.tasks.digits_task import split

Rows = tuple[NDArray[np.float32], NDArray[np.int64]]


def digits() -> tuple[Rows, Rows, Rows]:
    """Training, validation and test scans [rows, 8, 8, 1] with the digits that they show [rows]."""
    parts = [(x.numpy().reshape(-1, 8, 8, 1), y.numpy()) for x, y in split()]
    return parts[0], parts[1], parts[2]


def convolutional() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.AdamW(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--strategy", default="allreduce")
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

keras.utils.set_random_seed(0)
model, (train, validation, test) = convolutional(), digits()
early = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
task = mh.keras.task(
    model, *train, validation_data=validation, test_data=test, batch_size=32, epochs=args.epochs, callbacks=[early]
)
run = mh.train(task, strategy=args.strategy, workers=args.workers)
print(run.summary())
print(f"best epoch {early.best_epoch + 1} of {args.epochs}; the model itself on the test scans:")
model.evaluate(*test, verbose=2)
