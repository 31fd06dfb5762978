"""GloVe: the rule by hand, the reference, and its vectors."""

import math

import numpy as np
import pytest
import torch
from products import conforms

from manyhands import kernels
from manyhands.data.corpus import Vocabulary
from manyhands.errors import BadInput
from refusals import refused

BATCH = {
    "rows": torch.tensor([3, 0, 3, 5, 0, 6, 3], dtype=torch.uint32),
    "columns": torch.tensor([1, 1, 4, 0, 5, 4, 1], dtype=torch.uint32),
    "counts": torch.tensor([4.0, 250.0, 0.5, 1.0, 3.0, 100.0, 2.0]),
}


def test_it_is_a_kernel() -> None:
    from manyhands.kernels.glove import reference_step

    for options in ({"words": 8, "dim": 5}, {"words": 7, "dim": 1, "x_max": 10, "alpha": 0.5}):
        conforms(kernel=kernels.Glove(dtype="float64", **options), batch=BATCH, reference=reference_step)


def test_one_pair_by_hand() -> None:
    """w = 2, c = .5, b = .2, d = -.1; a count of e, x_max = 16 e, alpha = .5: f = 1/4. The error is 1 + .1 - 1 = .1."""
    kernel = kernels.Glove(words=2, dim=1, x_max=16 * math.e, alpha=0.5, dtype="float64")
    rows = {
        "words": np.array([[2.0], [9.0]]),
        "word_bias": np.array([[0.2], [9.0]]),
        "word_sums": np.array([[4.0, 1.0], [9.0, 9.0]]),
        "contexts": np.array([[9.0], [0.5]]),
        "context_bias": np.array([[9.0], [-0.1]]),
        "context_sums": np.array([[9.0, 9.0], [16.0, 25.0]]),
    }
    batch = kernel.prepare({"rows": [0], "columns": [1], "counts": [math.e]}, 0)
    cost = 0.25 * 0.1**2 / 2
    assert kernel.measure(rows, batch) == {"loss": (pytest.approx(cost), 1)}
    assert kernel.step(rows, batch, 0.4) == pytest.approx(cost)
    move = 0.4 * 0.25 * 0.1  # rate · f · error, times the other number
    assert rows["words"].ravel() == pytest.approx([2 - move * 0.5 / 2, 9])
    assert rows["contexts"].ravel() == pytest.approx([9, 0.5 - move * 2 / 4])
    assert rows["word_bias"].ravel() == pytest.approx([0.2 - move, 9])
    assert rows["context_bias"].ravel() == pytest.approx([9, -0.1 - move / 5])
    assert rows["word_sums"][0] == pytest.approx([4 + (move * 0.5) ** 2, 1 + move**2])
    assert rows["context_sums"][1] == pytest.approx([16 + (move * 2) ** 2, 25 + move**2])


def test_a_pair_weighs_as_the_paper_says() -> None:
    kernel = kernels.Glove(words=1, x_max=100, alpha=0.75)
    counts = [0.01, 1, 99.9, 100, 101, 1e6]
    batch = kernel.prepare({"rows": [0] * 6, "columns": [0] * 6, "counts": counts}, 0)
    assert batch["weights"] == pytest.approx([(x / 100) ** 0.75 if x < 100 else 1 for x in counts], rel=1e-5)
    assert batch["logs"] == pytest.approx(np.log(counts), rel=1e-6)


def test_vectors_are_of_words_and_contexts() -> None:
    model = kernels.Glove(words=5, dim=3).module(0)
    tables = model.tables()
    assert np.array_equal(model.vectors(), tables["words"] + tables["contexts"])
    with pytest.raises(BadInput, match="vocabulary"):  # its words are numbers
        model.most_similar("word")


def test_a_vocabulary_names_the_words() -> None:
    kernel = kernels.Glove(vocabulary=Vocabulary(["the", "of", "and"], [5, 4, 4]), dim=4)
    assert kernel.words == 3
    model = kernel.module(0)
    assert {word for word, _ in model.most_similar("the")} == {"of", "and"}
    with pytest.raises(BadInput, match="3 words"):
        kernels.Glove(vocabulary=kernel.vocabulary, words=4)


def test_what_is_refused() -> None:
    kernel = kernels.Glove(words=8, dim=5)
    for change, words in [
        ({"rows": [8]}, "field 'rows' must be from 0 to 7"),
        ({"columns": [9]}, "field 'columns' must be from 0 to 7"),
        ({"counts": [0.0]}, "counts must be above 0, and one is 0.0"),
        ({"counts": [math.nan]}, "counts must be above 0, and one is nan"),
        ({"counts": None}, "no field counts; it has rows, columns"),
    ]:
        batch = {"rows": [0], "columns": [0], "counts": [1.0]} | change
        given = {name: np.asarray(column) for name, column in batch.items() if column is not None}
        refused(words, kernel.prepare, given, 0)
    for name, value in [("words", 0), ("dim", 2.5), ("x_max", 0), ("alpha", math.inf)]:
        refused(name, lambda name, value: kernels.Glove(**{"words": 3} | {name: value}), name, value)
