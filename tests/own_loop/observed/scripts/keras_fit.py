"""A Keras model that is compiled and fitted, on the torch backend."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dump", help="a file for the history and the weights")
args = parser.parse_args()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(203, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, validation_split=0.2)
print("evaluated", model.evaluate(x, y, verbose=0))
torch.save({"history": dict(history.history), "weights": [torch.tensor(w) for w in model.get_weights()]}, args.dump)
