"""Counts of pairs of words: equal to a dict's, whatever the memory."""

import os
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from manyhands.data.ragged import Ragged
from manyhands.errors import ManyhandsError
from refusals import refused


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """numba takes a second to import."""
    global SLOT, cooccurrence, count_cooccurrences
    from manyhands.data import cooccurrence
    from manyhands.data.cooccurrence import _SLOT_BYTES as SLOT
    from manyhands.data.cooccurrence import count_cooccurrences


def corpus_of(*texts: Any) -> Ragged:
    offsets = np.cumsum([0, *map(len, texts)])
    return Ragged(offsets, {"words": np.concatenate([np.asarray(text, np.uint32) for text in texts])})


def counted(found: Any) -> dict[tuple[int, int], float]:
    pairs = list(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a pair comes once"
    return dict(zip(pairs, found.counts.tolist(), strict=True))


def by_dict(corpus: Ragged, window: int, symmetric: bool) -> dict[tuple[int, int], float]:
    counts: defaultdict[tuple[int, int], float] = defaultdict(float)
    for row in corpus:
        words = row["words"]
        for i, word in enumerate(words):
            for j in range(max(0, i - window), i):
                counts[word, words[j]] += 1 / (i - j)
                if symmetric:
                    counts[words[j], word] += 1 / (i - j)
    return dict(counts)


@pytest.fixture(scope="module")
def texts() -> Ragged:
    random = np.random.default_rng(0)
    lengths = [0, 1, 2, 350, 3, 0, 150, 1]
    return corpus_of(*(np.minimum(random.zipf(1.3, n), 600) - 1 for n in lengths))


def test_three_words_by_hand() -> None:
    found = count_cooccurrences(corpus_of([7, 300, 7], [300, 7]), window=2)
    # 7-300 stand beside each other in the first text twice, in the second once; 7 and 7 two apart, for both of them
    assert counted(found) == {(7, 300): 3, (300, 7): 3, (7, 7): 1}
    later = count_cooccurrences(corpus_of([7, 300, 7], [300, 7]), window=2, symmetric=False)
    assert counted(later) == {(300, 7): 1, (7, 300): 2, (7, 7): 0.5}


@pytest.mark.parametrize("symmetric", [True, False])
def test_they_are_those_of_a_dict(texts: Ragged, symmetric: bool) -> None:
    for window in (1, 15):
        exact = by_dict(texts, window, symmetric)
        for memory in (1, 64 * SLOT, 1000 * SLOT, 1 << 24):
            found = counted(count_cooccurrences(texts, window=window, symmetric=symmetric, memory=memory))
            assert found == pytest.approx(exact, rel=1e-6), (window, memory)
    part = texts.take([6, 3])
    assert counted(count_cooccurrences(part, window=3)) == pytest.approx(by_dict(part, 3, True), rel=1e-6)


def test_the_bits_do_not_depend_on_the_memory(texts: Ragged, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[int] = []
    spill = cooccurrence._spill
    monkeypatch.setattr(cooccurrence, "_spill", lambda *given: spilled.append(spill(*given)) or spilled[-1])
    whole = count_cooccurrences(texts)
    assert len(spilled) == 1
    monkeypatch.setattr(cooccurrence, "_PAIRS_AT_ONCE", 7)  # pairs of several runs meet where a piece of the merge ends
    monkeypatch.setattr(cooccurrence, "_WORDS_AT_ONCE", 10)
    parts = count_cooccurrences(texts, memory=128 * SLOT)
    assert len(spilled) > 25
    for name, column in whole.data().items():
        assert np.array_equal(column, parts.data()[name]), name


def test_pairs_come_in_rounds_of_cells() -> None:
    random = np.random.default_rng(1)
    found = count_cooccurrences(corpus_of(random.integers(8000, size=100_000)), symmetric=False)
    cells = (found.rows >> 11).astype(np.int64) * 4 + (found.columns >> 11)
    changes = np.flatnonzero(np.diff(cells)) + 1
    visits = cells[[0, *changes]].reshape(8, 16)
    assert (visits == visits[0]).all(), "each of 8 rounds goes through the 16 cells"
    assert len(np.unique(visits[0])) == 16
    assert (np.diff(visits[0]) < 0).any(), "cells come in another order than their numbers"
    lengths = np.diff([0, *changes, len(cells)])
    assert lengths.min() > 0.85 * lengths.mean(), "of a cell, each round has an eighth"
    for inside in np.split((found.rows & 2047).astype(float), changes):
        assert abs(np.corrcoef(inside, np.arange(len(inside)))[0, 1]) < 0.05, "and pairs in a cell come as if at random"
    both = count_cooccurrences(corpus_of(random.integers(8000, size=20_000)))
    low, high = np.minimum(both.rows, both.columns) >> 11, np.maximum(both.rows, both.columns) >> 11
    assert np.count_nonzero(np.diff(low * 4 + high)) == 8 * 10 - 1, "a cell and its mirror image come together"


def test_arrays_are_writeable_and_leave_no_file(texts: Ragged, tmp_path: Any) -> None:
    found = count_cooccurrences(texts, folder=str(tmp_path), memory=64 * SLOT)
    before = found.counts.copy()
    found.counts[0] = 5
    assert found.counts[0] == 5
    assert np.array_equal(found.counts[1:], before[1:])
    assert (found.rows.dtype, found.columns.dtype, found.counts.dtype) == (np.uint32, np.uint32, np.float32)
    assert os.listdir(tmp_path) == []


def test_progress(texts: Ragged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooccurrence, "_WORDS_AT_ONCE", 200)
    seen: list[tuple[int, int]] = []
    count_cooccurrences(texts, progress=lambda done, words: seen.append((done, words)))
    assert seen == [(200, 507), (400, 507), (507, 507)]


def test_bad_input(texts: Ragged, tmp_path: Any) -> None:
    refused("no text of the corpus has two words", count_cooccurrences, corpus_of([3], [], [4]))
    refused("window must be .* not 0", lambda: count_cooccurrences(texts, window=0))
    refused("memory must be .* not '1GB'", lambda: count_cooccurrences(texts, memory="1GB"))
    folder = str(tmp_path / "none")
    words = "cannot write .* to .*: No such file or directory. Give folder="
    refused(words, lambda: count_cooccurrences(texts, folder=folder), kind=ManyhandsError)
