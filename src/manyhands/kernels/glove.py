"""GloVe: vectors of words whose inner products are the logarithms of how often the words stand near each other.

Source: GloVe: Global Vectors for Word Representation, Jeffrey Pennington, Richard Socher, Christopher D. Manning, 2014,
https://aclanthology.org/D14-1162/. Where the paper leaves a choice, this is the authors' program: sums that begin with 1
and take squares of rate · gradient, and vectors that are the sum of a word's two rows.

Deviations: of the program, biases begin with 0, and no gradient is clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.corpus import Vocabulary
from manyhands.errors import BadInput
from manyhands.kernels.word_vectors import WordVectors
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Arrays, Kernel, Measures, check_above_0, check_keys, check_whole, columns_of
from manyhands.sparse.rows import Rows

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Glove(Kernel):
    """Data: a dict of the columns `rows` and `columns` (numbers of words) and `counts` (above 0), such as `Cooccurrences` has."""

    words: int | None = None
    """How many words there are. Default: as many as the vocabulary has."""
    vocabulary: Vocabulary | None = None
    """The corpus's, by which the model finds words; without it, they have numbers alone."""
    dim: int = 100
    """Numbers a vector."""
    x_max: float = 100.0
    """From this count on a pair weighs 1. Lower it for a small corpus, in which few pairs come so often."""
    alpha: float = 0.75
    """A rarer pair weighs (count / x_max) ** alpha."""
    dtype: str = "float32"

    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.words is None and self.vocabulary is not None:
            object.__setattr__(self, "words", len(self.vocabulary))
        if self.vocabulary is not None and self.words != len(self.vocabulary):
            raise BadInput(f"kernel Glove: its vocabulary has {len(self.vocabulary):,} words, not words={self.words!r}")
        check_whole(self, "words", "dim")
        check_above_0(self, "x_max", "alpha")

    @override
    def tables(self) -> dict[str, Rows]:
        """`word_sums` and `context_sums` hold AdaGrad's sum for each number of a row, and last for its bias."""
        found = {}
        for one, field in (("word", "rows"), ("context", "columns")):
            shape: dict[str, Any] = {"fields": (field,), "rows": self.words, "dtype": self.dtype}
            found[f"{one}s"] = Rows(dim=self.dim, initial=f"uniform:{0.5 / self.dim}", **shape)
            found[f"{one}_bias"] = Rows(**shape)
            found[f"{one}_sums"] = Rows(dim=self.dim + 1, initial="constant:1", **shape)
        return found

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        """`logs`: the logarithms of the counts; `weights`: f(count) of the paper."""
        found = columns_of(batch, ("rows", "columns", "counts"), self)
        assert self.words is not None
        check_keys(found["rows"], self.words, "rows", self)
        check_keys(found["columns"], self.words, "columns", self)
        counts = found.pop("counts").astype(self.dtype, copy=False)
        if len(counts) and not (least := counts.min()) > 0:
            raise BadInput(f"kernel Glove: counts must be above 0, and one is {least}: leave such pairs out")
        logs = np.log(counts)
        weights = np.minimum(1, np.exp(self.alpha * (logs - math.log(self.x_max))), dtype=logs.dtype)
        return {**found, "logs": logs, "weights": weights}

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        tables = (rows[name].reshape(-1) for name in self.tables())
        return float(_step(*tables, *batch.values(), np.dtype(self.dtype).type(rate), self.dim))

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Measures:
        """loss: the mean cost of a pair, ½ f(X) (w · c + b + d - log X)²."""
        tables = (rows[name].reshape(-1) for name in ("words", "word_bias", "contexts", "context_bias"))
        n = len(batch["logs"])
        return {"loss": (float(_measure(*tables, *batch.values(), self.dim)) / n, n)}

    @override
    def module(self, seed: int) -> GloveVectors:
        return GloveVectors(self, seed)


class GloveVectors(WordVectors):
    """The vectors that GloVe has found."""

    @override
    def vectors(self) -> Array:
        """[words, dim]: a word's row among the words and that among the contexts, added."""
        tables = self.tables()
        return tables["words"] + tables["contexts"]  # type: ignore[no-any-return]


@compiled
def _step(
    words: Array,
    word_bias: Array,
    word_sums: Array,
    contexts: Array,
    context_bias: Array,
    context_sums: Array,
    rows: Array,
    columns: Array,
    logs: Array,
    weights: Array,
    rate: Any,
    dim: int,
) -> float:
    """Tables flat: number d of word w is words[w · dim + d], its sum word_sums[w · (dim + 1) + d]."""
    k, one = np.uint64(dim), np.uint64(1)
    number = words.dtype.type
    cost = 0.0
    for n in range(np.uint64(len(logs))):
        word, context = np.uint64(rows[n]), np.uint64(columns[n])
        at_word, at_context = word * k, context * k
        word_sum, context_sum = word * (k + one), context * (k + one)
        inner = number(0)
        for d in range(k):
            inner += words[at_word + d] * contexts[at_context + d]
        error = inner + word_bias[word] + context_bias[context] - logs[n]
        slope = weights[n] * error
        cost += slope * error / 2
        slope *= rate
        for d in range(k):
            w, c = words[at_word + d], contexts[at_context + d]
            word_move, context_move = slope * c, slope * w
            word_squares, context_squares = word_sums[word_sum + d], context_sums[context_sum + d]
            words[at_word + d] = w - word_move / math.sqrt(word_squares)
            contexts[at_context + d] = c - context_move / math.sqrt(context_squares)
            word_sums[word_sum + d] = word_squares + word_move * word_move
            context_sums[context_sum + d] = context_squares + context_move * context_move
        word_bias[word] -= slope / math.sqrt(word_sums[word_sum + k])
        context_bias[context] -= slope / math.sqrt(context_sums[context_sum + k])
        word_sums[word_sum + k] += slope * slope
        context_sums[context_sum + k] += slope * slope
    return cost


@compiled
def _measure(
    words: Array,
    word_bias: Array,
    contexts: Array,
    context_bias: Array,
    rows: Array,
    columns: Array,
    logs: Array,
    weights: Array,
    dim: int,
) -> float:
    k = np.uint64(dim)
    number = words.dtype.type
    cost = 0.0
    for n in range(np.uint64(len(logs))):
        word, context = np.uint64(rows[n]), np.uint64(columns[n])
        at_word, at_context = word * k, context * k
        inner = number(0)
        for d in range(k):
            inner += words[at_word + d] * contexts[at_context + d]
        error = inner + word_bias[word] + context_bias[context] - logs[n]
        cost += weights[n] * error * error / 2
    return cost


def reference_step(kernel: Glove, rows: dict[str, Array], batch: Arrays, rate: float) -> float:
    """The same step, pair by pair, in NumPy: each line is of all `dim` numbers at once."""
    cost = 0.0
    for word, context, log, weight in zip(
        *(batch[name] for name in ("rows", "columns", "logs", "weights")), strict=True
    ):
        w, c = rows["words"][word].copy(), rows["contexts"][context].copy()  # [dim]
        error = w @ c + rows["word_bias"][word, 0] + rows["context_bias"][context, 0] - log
        cost += weight * error**2 / 2
        for one, row, other in (("word", word, c), ("context", context, w)):
            vector, bias, sums = rows[f"{one}s"][row], rows[f"{one}_bias"][row], rows[f"{one}_sums"][row]
            move = rate * weight * error * np.append(other, 1)  # [dim + 1]: of the vector, and of the bias
            vector -= move[:-1] / np.sqrt(sums[:-1])
            bias -= move[-1:] / np.sqrt(sums[-1:])
            sums += move**2
    return float(cost)
