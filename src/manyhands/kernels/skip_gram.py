"""Word vectors: skip-gram and continuous bag of words, with negative sampling or hierarchical softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.corpus import Corpus, Vocabulary
from manyhands.errors import BadInput, is_number, is_whole
from manyhands.kernels.word_vectors import WordVectors
from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.initial import GOLDEN, mix64
from manyhands.sparse.kernel import Arrays, Kernel, check_whole
from manyhands.sparse.rows import Rows
from manyhands.sparse.simd import add, every, fma, lanes, load, store, total, zeros

Array = NDArray[Any]

OUTPUTS = 6
"""Of a group: their inner products with one input, and what these move, are computed together."""


@dataclass(frozen=True, kw_only=True)
class SkipGram(Kernel):
    """A vector for each word, from which the words around it can be told.

    Sources: Efficient Estimation of Word Representations in Vector Space, Mikolov, Chen, Corrado, Dean, 2013 (both
    models); Distributed Representations of Words and Phrases and their Compositionality, Mikolov, Sutskever, Chen,
    Corrado, Dean, 2013 (sampling); the program word2vec.c, for what the papers leave open; Parallelizing Word2Vec in
    Shared and Distributed Memory, Ji, Satish, Li, Dubey, 2016 (shared negatives).

    For each line, as word2vec.c does:
    1. A word that makes up the share f of the text stays with probability min(1, sqrt(s / f) + s / f), s = `sample`.
    2. Each word that stayed is a centre once. Its contexts are the words at most b places before and behind it among
       those that stayed, b drawn from 1 to `window`.
    3. Its outputs are the centre itself, and `negative` words drawn with a probability proportional to count^0.75; or,
       hierarchical, the inner nodes on the centre's path in a Huffman tree of the counts.
    4. Each context's vector is an input h (`cbow`: the mean of them all is the only one). With y = 1 for the centre, 0
       for a drawn word, 1 - code for a node: o += rate · (y - sigmoid(h · o)) · h, and h likewise by the outputs as
       they were; what moves a mean moves each of its vectors by as much.

    Deviations: all contexts of a centre share its drawn words, and move as one step: inner products and steps thus run
    over groups of up to six outputs (`shared=False` draws for each pair of centre and context, and each pair is a step).
    Outputs beyond six are a second step. A drawn word that is the centre, or was drawn for it already, is left out;
    word2vec.c leaves out the centre alone. The sigmoid is computed, not looked up, and no inner product is too large.
    """

    vocabulary: Vocabulary
    dim: int = 100
    """Numbers of a vector."""
    window: int = 5
    """Words before and behind the centre, at most. Smaller: words that stand for each other; larger: of one topic."""
    negative: int | None = None
    """Words drawn beside each centre. Default: 5; 0 if hierarchical. Raise it for a small text."""
    cbow: bool = False
    """The mean of the contexts predicts the centre: several times as fast, less good for rare words."""
    hierarchical: bool = False
    """Outputs are the nodes of a Huffman tree: no words are drawn. Better for rare words."""
    sample: float = 1e-3
    """Frequent words are left out at random: lower it where they drown the others. 0: none are."""
    shared: bool = True
    """False: words are drawn for each pair. Slower; for texts far too short."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        negative = self.negative if self.negative is not None else 0 if self.hierarchical else 5
        object.__setattr__(self, "negative", negative)
        if not isinstance(self.vocabulary, Vocabulary):
            raise BadInput(f"kernel SkipGram: vocabulary must be a corpus's, not a {type(self.vocabulary).__name__}")
        check_whole(self, "dim", "window")
        if not is_whole(negative, 0) or self.hierarchical != (negative == 0):
            raise BadInput(
                f"kernel SkipGram: either hierarchical=True, which draws no words, or negative of at least 1; got hierarchical={self.hierarchical}, "
                f"negative={self.negative!r}"
            )
        if not (is_number(self.sample) and 0 <= self.sample <= 1):
            raise BadInput(f"kernel SkipGram: sample must be a number from 0 to 1, not {self.sample!r}")

    @override
    def tables(self) -> dict[str, Rows]:
        words = len(self.vocabulary)
        outputs = max(1, words - 1) if self.hierarchical else words
        return {
            "words": Rows(
                fields=("contexts",), rows=words, dim=self.dim, initial=f"uniform:{0.5 / self.dim!r}", dtype=self.dtype
            ),
            "outputs": Rows(fields=("outputs",), rows=outputs, dim=self.dim, dtype=self.dtype),
        }

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        """contexts: uint32 [pairs], of one centre after another.

        By group: outputs uint32 [groups, OUTPUTS], where a group with fewer repeats its first; signs int8, alike: 1 for
        an output that is right, -1 for a wrong one, 0 for a repeated one; begins and ends int64 [groups]: its contexts.
        examples: int64 [1], their number.
        """
        if not isinstance(batch, Corpus):
            raise BadInput(
                f"kernel SkipGram takes text: give train_data as a Corpus, not what gives batches of {type(batch).__name__}"
            )
        if len(batch.vocabulary) != len(self.vocabulary):
            raise BadInput(
                f"kernel SkipGram has a vocabulary of {len(self.vocabulary):,} words, and its text one of {len(batch.vocabulary):,}: give it the text's own"
            )
        for_windows, for_words = (np.uint64((random + i) % 2**64) for i in range(2))
        centres, begins, ends, contexts = _windows(
            batch.numbers(), batch.offsets, batch.words, self._stay, self.window, for_windows
        )
        examples = len(centres) if self.cbow else len(contexts)
        if not (self.shared or self.cbow):  # each pair is a centre of its own
            centres = np.repeat(centres, ends - begins)
            begins = np.arange(len(contexts))
            ends = begins + 1
        if self.hierarchical:
            groups = _path_groups(centres, *self._paths)
        else:
            groups = _drawn_groups(centres, self._noise, self.negative, for_words)
        outputs, signs, of = groups
        return {
            "contexts": contexts,
            "outputs": outputs,
            "signs": signs,
            "begins": begins[of],
            "ends": ends[of],
            "examples": np.array([examples]),
        }

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        return self._run(rows, batch, rate, True)

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        """loss: of a pair (`cbow`: of a centre), in nats, a sum over its outputs; with windows and words drawn by the
        batch's random number, which in evaluation is always the same."""
        examples = int(batch["examples"][0])
        return {"loss": (self._run(rows, batch, 0.0, False) / examples if examples else 0.0, examples)}

    @override
    def weight(self, batch: Arrays, rows: int) -> float:
        return float(batch["examples"][0])

    @override
    def module(self, seed: int) -> WordVectors:
        return WordVectors(self, seed)

    def _run(self, rows: Arrays, batch: Arrays, rate: float, moves: bool) -> float:
        words, outputs = rows["words"], rows["outputs"]
        groups = (batch["outputs"].ravel(), batch["signs"].ravel(), batch["begins"], batch["ends"])
        run = _bag_of_words if self.cbow else _skip_gram
        rate = words.dtype.type(rate)
        return float(
            run(words.ravel(), outputs.ravel(), np.uint64(words.shape[1]), batch["contexts"], *groups, rate, moves)
        )

    @cached_property
    def _stay(self) -> Array:
        """uint64 [words]: a word stays if 32 random bits are below this."""
        share = self.vocabulary.counts / self.vocabulary.counts.sum()
        ratio = self.sample / share if self.sample else np.full(len(share), 1.0)
        bound: Array = np.floor(np.minimum(np.sqrt(ratio) + ratio, 1) * 2.0**32).astype(np.uint64)
        return bound

    @cached_property
    def _noise(self) -> Array:
        """uint64 [words]: the table of words that are drawn, see `_alias`."""
        cells: Array = _alias(self.vocabulary.counts**0.75)
        return cells

    @cached_property
    def _paths(self) -> tuple[Array, Array, Array]:
        """(offsets, nodes, signs), see `_huffman`."""
        paths: tuple[Array, Array, Array] = _huffman(self.vocabulary.counts)
        return paths

    def __getstate__(self) -> dict[str, Any]:
        """Without the tables that follow from the vocabulary."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


# -- draws -----------------------------------------------------------------------------------------------------------


_bits = compiled(mix64)
"""64 random bits of a number that grows by GOLDEN from draw to draw: SplitMix64."""
_LOW = np.uint64(0xFFFFFFFF)


@compiled
def _windows(rows: Array, offsets: Array, words: Array, stay: Array, window: int, random: int) -> Any:
    """Centres uint32 [n], the begin and end of each one's contexts int64 [n], and these uint32 [pairs]."""
    most = 0
    for row in rows:
        most += offsets[row + 1] - offsets[row]
    line = np.empty(most, np.uint32)  # the words of one that stay
    centres, begins, ends = np.empty(most, np.uint32), np.empty(most, np.int64), np.empty(most, np.int64)
    contexts = np.empty(2 * most * window, np.uint32)
    state = _bits(random)
    widest = np.uint64(window)
    n, pairs = np.uint64(0), np.uint64(0)
    for row in rows:
        length = np.uint64(0)
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + 1])):
            state += GOLDEN
            line[length] = words[i]
            if _bits(state) >> np.uint64(32) < stay[words[i]]:
                length += np.uint64(1)
        for i in range(np.uint64(0), length):
            state += GOLDEN
            reach = np.uint64(1) + ((_bits(state) >> np.uint64(32)) * widest >> np.uint64(32))
            first = i - reach if i > reach else np.uint64(0)
            last = min(i + reach + np.uint64(1), length)
            if last - first < np.uint64(2):
                continue
            centres[n], begins[n] = line[i], pairs
            for j in range(first, last):
                contexts[pairs] = line[j]
                pairs += np.uint64(j != i)
            ends[n] = pairs
            n += np.uint64(1)
    return centres[:n], begins[:n], ends[:n], contexts[:pairs].copy()


@compiled
def _drawn_groups(centres: Array, noise: Array, negative: int, random: int) -> Any:
    """Outputs [groups, OUTPUTS], signs alike, and the number of each group's centre: the centres, each before the words
    that are drawn for it."""
    each = (1 + negative + OUTPUTS - 1) // OUTPUTS  # groups of one centre
    outputs = np.empty((len(centres) * each, OUTPUTS), np.uint32)
    signs = np.zeros((len(centres) * each, OUTPUTS), np.int8)
    flat, flat_signs = outputs.ravel(), signs.ravel()
    state = _bits(random)
    words = np.uint64(len(noise))
    for i in range(np.uint64(len(centres))):
        base = i * np.uint64(each * OUTPUTS)
        for k in range(np.uint64(0), np.uint64(each * OUTPUTS)):
            at = base + k
            if k == np.uint64(0):
                flat[at], flat_signs[at] = centres[i], 1
            elif k <= np.uint64(negative):
                state += GOLDEN
                bits = _bits(state)
                cell = (bits >> np.uint64(32)) * words >> np.uint64(32)
                entry = noise[cell]
                key = np.uint32(cell if bits & _LOW < entry >> np.uint64(32) else entry & _LOW)
                sign = -1
                for other in range(base, at):
                    if flat[other] == key:
                        sign = 0
                flat[at], flat_signs[at] = key, sign
            else:
                flat[at] = centres[i]
            if flat_signs[at] == 0:
                flat[at] = flat[at - at % np.uint64(OUTPUTS)]
    return outputs, signs, np.arange(len(centres) * each) // each


@compiled
def _path_groups(centres: Array, offsets: Array, nodes: Array, path_signs: Array) -> Any:
    """As _drawn_groups: the nodes of each centre's path, from the root on."""
    count = 0
    for centre in centres:
        count += (offsets[centre + 1] - offsets[centre] + OUTPUTS - 1) // OUTPUTS
    outputs, signs = np.empty((count, OUTPUTS), np.uint32), np.zeros((count, OUTPUTS), np.int8)
    of = np.empty(count, np.int64)
    group = 0
    for i in range(len(centres)):
        end = offsets[centres[i] + 1]
        for start in range(offsets[centres[i]], end, OUTPUTS):
            for k in range(OUTPUTS):
                there = start + k < end
                outputs[group, k] = nodes[start + k if there else start]
                signs[group, k] = path_signs[start + k] if there else 0
            of[group] = i
            group += 1
    return outputs, signs, of


@compiled
def _alias(weights: Array) -> Any:
    """uint64 [n], for draws of i in proportion to weights[i]: draw a cell, and 32 bits. Where these are below the cell's
    upper half, the cell is the answer, else its lower half.

    Source: An Efficient Method for Generating Discrete Random Variables with General Distributions, A. J. Walker, 1977.
    """
    n = len(weights)
    share = weights * (n / weights.sum())
    low, high = np.empty(n, np.int64), np.empty(n, np.int64)
    lows, highs = 0, 0
    cells = np.empty(n, np.uint64)
    for i in range(n):
        cells[i] = (_LOW << np.uint64(32)) | np.uint64(i)
        if share[i] < 1:
            low[lows] = i
            lows += 1
        else:
            high[highs] = i
            highs += 1
    while lows and highs:
        lows -= 1
        small, large = low[lows], high[highs - 1]
        cells[small] = (np.uint64(share[small] * 2.0**32) << np.uint64(32)) | np.uint64(large)
        share[large] -= 1 - share[small]
        if share[large] < 1:
            highs -= 1
            low[lows] = large
            lows += 1
    return cells


@compiled
def _huffman(counts: Array) -> Any:
    """Paths from the root to each word, as offsets int64 [words + 1], nodes uint32 and signs int8 of all: 1 where the
    path goes on to the less frequent half, whose code is 0, else -1.

    counts: never rising. Source: A Method for the Construction of Minimum-Redundancy Codes, D. A. Huffman, 1952.
    """
    n = len(counts)
    inner = max(1, n - 1)
    weight = np.zeros(n + inner, np.int64)
    weight[:n] = counts
    parent, code = np.zeros(n + inner, np.int64), np.zeros(n + inner, np.int8)
    word, node = n - 1, n  # the least words and inner nodes that have no parent yet
    for made in range(n, 2 * n - 1):
        for child in range(2):  # first the lesser, whose code is 0
            if word >= 0 and (node >= made or weight[word] < weight[node]):
                least = word
                word -= 1
            else:
                least = node
                node += 1
            weight[made] += weight[least]
            parent[least], code[least] = made, child
    root = 2 * n - 2
    offsets = np.zeros(n + 1, np.int64)
    for i in range(n):
        at, length = i, 0
        while at != root:
            at = parent[at]
            length += 1
        offsets[i + 1] = offsets[i] + max(1, length)
    nodes, signs = np.zeros(offsets[n], np.uint32), np.ones(offsets[n], np.int8)
    for i in range(n):
        at, place = i, offsets[i + 1]
        while at != root:
            place -= 1
            signs[place] = 1 - 2 * code[at]
            at = parent[at]
            nodes[place] = at - n
    return offsets, nodes, signs


# -- steps -----------------------------------------------------------------------------------------------------------
# Tables are flat. A group's outputs begin at r0 to r5 in theirs. Where an output is there for the first one again, its
# slope is 0, and what the first one becomes is stored last.


@compiled
def _skip_gram(
    words: Array,
    outputs: Array,
    dim: int,
    contexts: Array,
    keys: Array,
    signs: Array,
    begins: Array,
    ends: Array,
    rate: float,
    moves: bool,
) -> float:
    """Go through the groups; the sum of losses."""
    most = 1
    for group in range(len(begins)):
        most = max(most, ends[group] - begins[group])
    dots = np.empty(most * OUTPUTS, words.dtype)
    slopes, right = np.empty_like(dots), np.empty_like(dots)
    loss, product = 0.0, 1.0
    for group in range(np.uint64(len(begins))):
        _prefetch(outputs, keys, group + np.uint64(1), dim)
        begin, end = np.uint64(begins[group]), np.uint64(ends[group])
        at = np.uint64(0)
        for context in range(begin, end, np.uint64(2)):
            second = min(context + np.uint64(1), end - np.uint64(1))
            row, other = np.uint64(contexts[context]) * dim, np.uint64(contexts[second]) * dim
            _dots(words, row, other, outputs, keys, group, dim, dots, at, (second - begin) * np.uint64(OUTPUTS))
            at += np.uint64(2 * OUTPUTS)
        _slopes(dots, signs, group, end - begin, rate, slopes, right)
        for i in range(np.uint64(0), (end - begin) * np.uint64(OUTPUTS), np.uint64(OUTPUTS)):
            product *= _product(right, i)
            if product < 1e-200:
                loss -= math.log(product)
                product = 1.0
        if moves:
            _move(words, contexts, begin, end, outputs, keys, group, dim, slopes)
    return loss - math.log(product)


@compiled
def _bag_of_words(
    words: Array,
    outputs: Array,
    dim: int,
    contexts: Array,
    keys: Array,
    signs: Array,
    begins: Array,
    ends: Array,
    rate: float,
    moves: bool,
) -> float:
    """Go through the groups; the sum of losses."""
    mean = np.empty(dim, words.dtype)
    dots = np.empty(OUTPUTS, words.dtype)
    slopes, right = np.empty_like(dots), np.empty_like(dots)
    loss, product = 0.0, 1.0
    for group in range(np.uint64(len(begins))):
        _prefetch(outputs, keys, group + np.uint64(1), dim)
        begin, end = np.uint64(begins[group]), np.uint64(ends[group])
        _mean(words, contexts, begin, end, dim, mean)
        _dots(mean, np.uint64(0), np.uint64(0), outputs, keys, group, dim, dots, np.uint64(0), np.uint64(0))
        _slopes(dots, signs, group, np.uint64(1), rate, slopes, right)
        product *= _product(right, np.uint64(0))
        if product < 1e-200:
            loss -= math.log(product)
            product = 1.0
        if moves:
            _move_all(words, contexts, begin, end, mean, outputs, keys, group, dim, slopes)
    return loss - math.log(product)


@compiled
def _row(keys: Array, group: int, k: int, dim: int) -> Any:
    """Where the k-th output of a group begins."""
    return np.uint64(keys[group * np.uint64(OUTPUTS) + np.uint64(k)]) * dim


@compiled
def _prefetch(outputs: Array, keys: Array, group: int, dim: int) -> None:
    """Bring the outputs of a group into the cache."""
    if group * np.uint64(OUTPUTS) < np.uint64(len(keys)):
        for k in range(OUTPUTS):
            row = _row(keys, group, k, dim)
            for j in range(np.uint64(0), dim, np.uint64(64 // outputs.itemsize)):
                prefetch(outputs, row + j)


@compiled
def _dots(
    inputs: Array,
    row: int,
    other: int,
    outputs: Array,
    keys: Array,
    group: int,
    dim: int,
    dots: Array,
    at: int,
    other_at: int,
) -> None:
    """The inner products of two inputs (or one, given twice) with six outputs, to dots[at:] and dots[other_at:]."""
    r0, r1, r2 = _row(keys, group, 0, dim), _row(keys, group, 1, dim), _row(keys, group, 2, dim)
    r3, r4, r5 = _row(keys, group, 3, dim), _row(keys, group, 4, dim), _row(keys, group, 5, dim)
    a0, a1, a2, a3, a4, a5 = zeros(dots), zeros(dots), zeros(dots), zeros(dots), zeros(dots), zeros(dots)
    b0, b1, b2, b3, b4, b5 = zeros(dots), zeros(dots), zeros(dots), zeros(dots), zeros(dots), zeros(dots)
    for j in range(np.uint64(0), dim, lanes(dots)):
        n = dim - j
        x, y = load(inputs, row + j, n), load(inputs, other + j, n)
        o = load(outputs, r0 + j, n)
        a0, b0 = fma(x, o, a0), fma(y, o, b0)
        o = load(outputs, r1 + j, n)
        a1, b1 = fma(x, o, a1), fma(y, o, b1)
        o = load(outputs, r2 + j, n)
        a2, b2 = fma(x, o, a2), fma(y, o, b2)
        o = load(outputs, r3 + j, n)
        a3, b3 = fma(x, o, a3), fma(y, o, b3)
        o = load(outputs, r4 + j, n)
        a4, b4 = fma(x, o, a4), fma(y, o, b4)
        o = load(outputs, r5 + j, n)
        a5, b5 = fma(x, o, a5), fma(y, o, b5)
    _put(dots, at, total(a0), total(a1), total(a2), total(a3), total(a4), total(a5))
    _put(dots, other_at, total(b0), total(b1), total(b2), total(b3), total(b4), total(b5))


@compiled
def _put(numbers: Array, at: int, x0: float, x1: float, x2: float, x3: float, x4: float, x5: float) -> None:
    numbers[at], numbers[at + np.uint64(1)], numbers[at + np.uint64(2)] = x0, x1, x2
    numbers[at + np.uint64(3)], numbers[at + np.uint64(4)], numbers[at + np.uint64(5)] = x3, x4, x5


@compiled
def _slopes(dots: Array, signs: Array, group: int, inputs: int, rate: float, slopes: Array, right: Array) -> None:
    """By inner product of [inputs, OUTPUTS]: rate · (y - sigmoid), and the probability of what is right.

    With margin m = sign · dot the latter is 1 / (1 + exp(-m)), where exp is the 64th power of a polynomial: 1e-7 exact
    for margins up to 40, beyond which they count as 40.
    """
    number = dots.dtype.type
    c2, c3, c4, c5 = number(1 / 2), number(1 / 6), number(1 / 24), number(1 / 120)
    c6, c7, c8, c9 = number(1 / 720), number(1 / 5040), number(1 / 40320), number(1 / 362880)
    one, most = number(1), number(40)
    first = group * np.uint64(OUTPUTS)
    for i in range(np.uint64(0), inputs * np.uint64(OUTPUTS), np.uint64(OUTPUTS)):
        for k in range(np.uint64(0), np.uint64(OUTPUTS)):
            slopes[i + k] = number(signs[first + k])
    for i in range(np.uint64(0), inputs * np.uint64(OUTPUTS)):
        sign = slopes[i]
        margin = sign * dots[i]
        margin = most if margin > most else margin  # what is no number stays so
        margin = -most if margin < -most else margin
        x = margin * number(-1 / 64)
        z = x * x
        even = one + z * (c2 + z * (c4 + z * (c6 + z * c8)))
        odd = one + z * (c3 + z * (c5 + z * (c7 + z * c9)))
        e = even + x * odd
        e = e * e
        e = e * e
        e = e * e
        e = e * e
        e = e * e
        e = e * e
        share = one / (one + e)
        slopes[i] = rate * sign * (e * share)
        right[i] = share if sign != 0 else one


@compiled
def _product(right: Array, i: int) -> Any:
    """Of the probabilities of six outputs; at least 1e-105."""
    three = np.float64(right[i]) * right[i + np.uint64(1)] * right[i + np.uint64(2)]
    return three * (np.float64(right[i + np.uint64(3)]) * right[i + np.uint64(4)] * right[i + np.uint64(5)])


@compiled
def _move(
    words: Array,
    contexts: Array,
    begin: int,
    end: int,
    outputs: Array,
    keys: Array,
    group: int,
    dim: int,
    slopes: Array,
) -> None:
    """Each context by the outputs as they were; the outputs by all contexts. Columns of one vector at a time."""
    r0, r1, r2 = _row(keys, group, 0, dim), _row(keys, group, 1, dim), _row(keys, group, 2, dim)
    r3, r4, r5 = _row(keys, group, 3, dim), _row(keys, group, 4, dim), _row(keys, group, 5, dim)
    for j in range(np.uint64(0), dim, lanes(words)):
        n = dim - j
        o0, o1, o2 = load(outputs, r0 + j, n), load(outputs, r1 + j, n), load(outputs, r2 + j, n)
        o3, o4, o5 = load(outputs, r3 + j, n), load(outputs, r4 + j, n), load(outputs, r5 + j, n)
        a0, a1, a2, a3, a4, a5 = o0, o1, o2, o3, o4, o5
        at = np.uint64(0)
        for context in range(begin, end):
            row = np.uint64(contexts[context]) * dim + j
            h = load(words, row, n)
            moved = h
            slope = every(slopes, at)
            moved, a0 = fma(slope, o0, moved), fma(slope, h, a0)
            slope = every(slopes, at + np.uint64(1))
            moved, a1 = fma(slope, o1, moved), fma(slope, h, a1)
            slope = every(slopes, at + np.uint64(2))
            moved, a2 = fma(slope, o2, moved), fma(slope, h, a2)
            slope = every(slopes, at + np.uint64(3))
            moved, a3 = fma(slope, o3, moved), fma(slope, h, a3)
            slope = every(slopes, at + np.uint64(4))
            moved, a4 = fma(slope, o4, moved), fma(slope, h, a4)
            slope = every(slopes, at + np.uint64(5))
            moved, a5 = fma(slope, o5, moved), fma(slope, h, a5)
            store(words, row, moved, n)
            at += np.uint64(OUTPUTS)
        store(outputs, r5 + j, a5, n)
        store(outputs, r4 + j, a4, n)
        store(outputs, r3 + j, a3, n)
        store(outputs, r2 + j, a2, n)
        store(outputs, r1 + j, a1, n)
        store(outputs, r0 + j, a0, n)


@compiled
def _mean(words: Array, contexts: Array, begin: int, end: int, dim: int, mean: Array) -> None:
    for j in range(np.uint64(0), dim, lanes(words)):
        added = zeros(words)
        for context in range(begin, end):
            added = add(added, load(words, np.uint64(contexts[context]) * dim + j, dim - j))
        store(mean, j, added, dim - j)
    share = words.dtype.type(1) / words.dtype.type(end - begin)
    for j in range(dim):
        mean[j] *= share


@compiled
def _move_all(
    words: Array,
    contexts: Array,
    begin: int,
    end: int,
    mean: Array,
    outputs: Array,
    keys: Array,
    group: int,
    dim: int,
    slopes: Array,
) -> None:
    """All contexts alike, by the outputs as they were; the outputs by the contexts' mean."""
    for j in range(np.uint64(0), dim, lanes(words)):
        h, change = load(mean, j, dim - j), zeros(words)
        for k in range(OUTPUTS - 1, -1, -1):
            row = _row(keys, group, k, dim) + j
            slope, o = every(slopes, np.uint64(k)), load(outputs, row, dim - j)
            change = fma(slope, o, change)
            store(outputs, row, fma(slope, h, o), dim - j)
        for context in range(begin, end):
            row = np.uint64(contexts[context]) * dim + j
            store(words, row, add(load(words, row, dim - j), change), dim - j)


# -- the reference ---------------------------------------------------------------------------------------------------


def reference_step(kernel: Kernel, rows: Mapping[str, Array], batch: Mapping[str, Array], rate: float) -> float:
    """The same step in NumPy, group by group."""
    assert isinstance(kernel, SkipGram)
    words, outputs = rows["words"], rows["outputs"]
    loss = 0.0
    for keys, signs, begin, end in zip(batch["outputs"], batch["signs"], batch["begins"], batch["ends"], strict=True):
        contexts, own = batch["contexts"][begin:end], keys[signs != 0]
        y = signs[signs != 0] > 0
        inputs = words[contexts].mean(0, keepdims=True) if kernel.cbow else words[contexts]
        right = 1 / (1 + np.exp(-(inputs @ outputs[own].T)))  # [inputs, outputs]
        loss -= float(np.log(np.where(y, right, 1 - right)).sum())
        slopes = rate * (y - right)
        before = outputs[own]
        if kernel.cbow:
            outputs[own] += slopes.T @ inputs
            np.add.at(words, contexts, slopes @ before)
        else:  # a word may be a context twice
            for context, slope in zip(contexts, slopes, strict=True):
                outputs[own] += np.outer(slope, words[context])
                words[context] += slope @ before
    return loss
