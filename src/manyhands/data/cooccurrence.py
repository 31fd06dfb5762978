"""How often words stand near each other, counted in bounded memory: a hash table, sorted runs on disk, and their merge."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from manyhands.data.ragged import Ragged, mapped
from manyhands.errors import BadInput, ManyhandsError, is_whole
from manyhands.sparse.compile import compiled

Array = NDArray[Any]

_EMPTY = np.uint64(2**64 - 1)  # no pair: words are below 2^32 - 1
_UNIT = np.uint64(1 << 30)  # counts are in fixed point: their sums do not depend on the order
_SLOT_BYTES = 40  # of memory, for each slot of the table: key and count, and what sorting them takes
_WORDS_AT_ONCE = 1 << 22  # between two reports of progress
_PAIRS_AT_ONCE = 1 << 20  # of the merge


@dataclass(frozen=True)
class Cooccurrences:
    """Counts of pairs of words, and each pair once. The arrays lie in files without names, and may be written to: a process
    then has pages of its own.

    Pairs come in eight rounds. Each is an eighth of all, by cells of 2,048 x 2,048 words (a cell and its mirror image,
    where the counts are symmetric), in an order that looks random among cells and inside each. Training in this order
    finds many rows of its tables in the cache: 2.3 times as fast as in random order, at a cost 0.5 % above that order's.
    In one round, a cell that is seen late disturbs what was learned of an early one: 11 % above.
    """

    rows: Array
    """uint32 [pairs]: the word in the middle."""
    columns: Array
    """uint32 [pairs]: the other one."""
    counts: Array
    """float32 [pairs]: the sum of 1 / distance."""

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.columns) == len(self.counts)

    def data(self) -> dict[str, Array]:
        """By name: what a task with kernel Glove takes as its data."""
        return {"rows": self.rows, "columns": self.columns, "counts": self.counts}

    def __repr__(self) -> str:
        return f"Cooccurrences of {len(self.rows):,} pairs"


def count_cooccurrences(
    corpus: Ragged,
    *,
    window: int = 15,
    symmetric: bool = True,
    memory: int = 1 << 30,
    folder: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Cooccurrences:
    """Count the pairs of words of which one stands at most `window` words before the other in one text, as 1 / distance.

    corpus: rows of word numbers, uint32, in its column "words"; numbers below 2^32 - 1.
    symmetric: a pair counts for both words; False: for the later one, whose row it is in.
    memory: bytes that counting may take. What does not fit goes to `folder` (default: that of temporary files), as does
        the result: 16 bytes for each time that a pair's count left memory, and 12 for each pair.
    progress: called with (words done, words), now and then.

    The counts have the same bits for any `memory`: they are exact up to 2^-30 a time. Raises BadInput for a corpus
    without pairs, and ManyhandsError where the folder is full.
    """
    if not is_whole(window):
        raise BadInput(f"window must be a whole number of at least 1, not {window!r}")
    if not is_whole(memory):
        raise BadInput(f"memory must be a whole number of bytes, not {memory!r}")
    folder = folder or tempfile.gettempdir()
    try:
        with ExitStack() as files:
            runs, ends = _counted(corpus, window, symmetric, memory, _file(folder, files), progress)
            parts = [_file(folder, files) for _ in range(3)]
            for columns in _merged(runs, ends, symmetric):
                for part, column in zip(parts, columns, strict=True):
                    part.write(column.view(np.uint8).data)
            return Cooccurrences(*(map(mapped, parts, (np.uint32, np.uint32, np.float32))))
    except OSError as error:
        raise ManyhandsError(
            f"cannot write the counts of pairs of words to {folder}: {error.strerror}. Give folder=, one with more room"
        ) from error


def _file(folder: str, files: ExitStack) -> BinaryIO:
    return files.enter_context(tempfile.TemporaryFile(dir=folder, prefix="manyhands-"))


# -- counting --------------------------------------------------------------------------------------------------------


def _counted(
    corpus: Ragged,
    window: int,
    symmetric: bool,
    memory: int,
    file: BinaryIO,
    progress: Callable[[int, int], None] | None,
) -> tuple[Array, Array]:
    """(uint64 [pairs of all runs, 2]: key, count; int64 [runs + 1]: where each run ends)."""
    slots = 1 << max(4 * window, memory // _SLOT_BYTES, 16).bit_length() - 1  # most of them hold more than `window`
    keys, counts = np.full(slots, _EMPTY), np.zeros(slots, np.uint64)
    numbers, words = corpus.numbers(), corpus.flat["words"]
    weights = np.array([0, *(int(_UNIT) / d for d in range(1, window + 1))]).round().astype(np.uint64)
    most = slots * 3 // 4
    total = int((corpus.offsets[numbers + 1] - corpus.offsets[numbers]).sum())
    at, ends = np.zeros(4, np.int64), [0]  # at: text, place in it, slots in use, words done
    while at[0] < len(numbers):
        _count(numbers, corpus.offsets, words, weights, symmetric, keys, counts, most, _WORDS_AT_ONCE, at)
        if progress is not None:
            progress(int(at[3]), total)
        if at[0] == len(numbers) or at[2] + window > most:
            ends.append(ends[-1] + _spill(keys, counts, file))
            at[2] = 0
    if ends[-1] == 0:
        raise BadInput(
            f"no text of the corpus has two words of the vocabulary: there are no pairs to count in {len(corpus):,} texts"
        )
    return mapped(file, np.uint64).reshape(-1, 2), np.array(ends)


def _spill(keys: Array, counts: Array, file: BinaryIO) -> int:
    """Write the pairs of a table to the file, in their order, and empty it; returns how many there are."""
    used = keys != _EMPTY
    found = np.stack([keys[used], counts[used]], 1)
    found = found[np.argsort(_places(found[:, 0]))]
    file.write(found.view(np.uint8).data)
    keys.fill(_EMPTY)
    return len(found)


@compiled
def _count(
    numbers: Array,
    offsets: Array,
    words: Array,
    weights: Array,
    symmetric: bool,
    keys: Array,
    counts: Array,
    most: int,
    at_once: int,
    at: Array,
) -> None:
    """Go on from `at` until the table holds `most` pairs or nearly so, so many words are done, or the corpus ends."""
    window, last = len(weights) - 1, np.uint64(len(keys) - 1)
    text, place, used, done = at
    stop = done + at_once
    while text < len(numbers):
        begin, end = offsets[numbers[text]], offsets[numbers[text] + 1]
        for i in range(begin + place, end):
            if used + window > most or done == stop:
                at[0], at[1], at[2], at[3] = text, i - begin, used, done
                return
            word = np.uint64(words[i])
            for j in range(max(begin, i - window), i):
                other = np.uint64(words[j])
                if symmetric and other < word:
                    key = other << np.uint64(32) | word
                else:
                    key = word << np.uint64(32) | other
                slot = (key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & last
                while keys[slot] != key and keys[slot] != _EMPTY:
                    slot = slot + np.uint64(1) & last
                if keys[slot] == _EMPTY:
                    keys[slot], counts[slot] = key, np.uint64(0)
                    used += 1
                counts[slot] += weights[i - j]
            done += 1
        text, place = text + 1, 0
    at[0], at[1], at[2], at[3] = text, 0, used, done


# -- the order of pairs ----------------------------------------------------------------------------------------------


@compiled
def _place(key: Any) -> Any:
    """A pair's place in the order of all, a bijection of 64 bits: 3 of its round, 42 from its cell alone, 19 inside."""
    row, column = key >> np.uint64(32), key & np.uint64(0xFFFFFFFF)
    cell = row >> np.uint64(11) << np.uint64(21) | column >> np.uint64(11)
    cell = (cell ^ cell >> np.uint64(22)) * np.uint64(0xBF58476D1CE4E5B9) & np.uint64((1 << 42) - 1)
    cell = (cell ^ cell >> np.uint64(21)) * np.uint64(0x94D049BB133111EB) & np.uint64((1 << 42) - 1)
    inside = (row & np.uint64(2047)) << np.uint64(11) | column & np.uint64(2047)
    inside = (inside ^ inside >> np.uint64(12)) * np.uint64(0xBF58476D1CE4E5B9) & np.uint64((1 << 22) - 1)
    inside = (inside ^ inside >> np.uint64(11)) * np.uint64(0x94D049BB133111EB) & np.uint64((1 << 22) - 1)
    inside = inside ^ inside >> np.uint64(10)
    which, rest = inside >> np.uint64(19), inside & np.uint64((1 << 19) - 1)
    return which << np.uint64(61) | cell << np.uint64(19) | rest


@compiled
def _places(keys: Array) -> Array:
    places = np.empty(len(keys), np.uint64)
    for i in range(len(keys)):
        places[i] = _place(keys[i])
    return places


# -- the merge -------------------------------------------------------------------------------------------------------


def _merged(runs: Array, ends: Array, symmetric: bool) -> Iterator[tuple[Array, Array, Array]]:
    """(rows, columns, counts) of some pairs at a time, each pair once."""
    at = ends[:-1].copy()
    found = np.empty((_PAIRS_AT_ONCE, 2), np.uint64)
    while n := _merge(runs, at, ends, found):
        rows, columns = found[:n, 0] >> np.uint64(32), found[:n, 0] & np.uint64(0xFFFFFFFF)
        counts = found[:n, 1] / float(_UNIT)
        if symmetric:  # the other way round beside it; a word beside itself counts twice in one pair
            same = rows == columns
            counts[same] *= 2
            pairs = np.stack([rows, columns, columns, rows], 1).reshape(-1, 2)
            kept = np.stack([np.ones_like(same), ~same], 1).reshape(-1)
            (rows, columns), counts = pairs[kept].T, np.repeat(counts, 2)[kept]
        yield (
            np.ascontiguousarray(rows, np.uint32),
            np.ascontiguousarray(columns, np.uint32),
            counts.astype(np.float32),
        )


@compiled
def _merge(runs: Array, at: Array, ends: Array, found: Array) -> int:
    """Fill `found` with the next pairs of all runs, which go on at `at`, and add the counts of equal ones; returns how many.

    `heap` holds the runs that have pairs left: a parent's next pair comes before those of its children.
    """
    heap, size = np.empty(len(at), np.int64), 0
    first = np.empty(len(at), np.uint64)  # of each run: the place of its next pair
    for run in range(len(at)):
        if at[run] < ends[run + 1]:
            first[run] = _place(runs[at[run], 0])
            child, size = size, size + 1
            while child > 0 and first[heap[(child - 1) // 2]] > first[run]:
                heap[child] = heap[(child - 1) // 2]
                child = (child - 1) // 2
            heap[child] = run
    n = 0
    while size > 0:
        run = heap[0]
        key = runs[at[run], 0]
        if n > 0 and found[n - 1, 0] == key:
            found[n - 1, 1] += runs[at[run], 1]
        elif n == len(found):
            break
        else:
            found[n, 0], found[n, 1] = key, runs[at[run], 1]
            n += 1
        at[run] += 1
        if at[run] < ends[run + 1]:
            first[run] = _place(runs[at[run], 0])
        else:
            size -= 1
            run = heap[size]
        parent = 0
        while 2 * parent + 1 < size:
            child = 2 * parent + 1
            if child + 1 < size and first[heap[child + 1]] < first[heap[child]]:
                child += 1
            if first[heap[child]] >= first[run]:
                break
            heap[parent] = heap[child]
            parent = child
        if size > 0:
            heap[parent] = run
    return n
