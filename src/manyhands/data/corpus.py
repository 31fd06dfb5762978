"""Text as numbers of words: a vocabulary, and lines in columns that are mapped from a file without a name."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from manyhands import units
from manyhands.data.ragged import Array, Ragged, mapped
from manyhands.data.shards.stored_file import filesystem
from manyhands.errors import BadInput, is_whole

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 1 << 24
"""Bytes of text, or numbers of words, that are worked on at once."""

_NONE = np.uint32(0xFFFFFFFF)  # a word that is left out
_WHITE = b" \n\t\r\v\f"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Vocabulary:
    """Words and how often each occurs, the most frequent first, those equally frequent by alphabet."""

    def __init__(self, words: Iterable[str], counts: Any) -> None:
        """words: each once, as many as counts [words], which never rise. BadInput otherwise."""
        self.words = tuple(words)
        self.counts: NDArray[np.int64] = np.ascontiguousarray(counts, np.int64)
        self._numbers: dict[str, int] | None = None
        if not self.words or self.counts.shape != (len(self.words),):
            raise BadInput(
                f"a vocabulary has at least one word and a count for each: got {len(self.words):,} words and counts of shape {list(self.counts.shape)}"
            )
        if self.counts[-1] < 1 or (np.diff(self.counts) > 0).any():
            raise BadInput("the counts of a vocabulary are above 0 and never rise: sort its words by falling count")

    @property
    def numbers(self) -> dict[str, int]:
        """{word: its number}"""
        if self._numbers is None:
            self._numbers = {word: number for number, word in enumerate(self.words)}
        return self._numbers

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.words == other.words and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        return hash((len(self.words), self.words[0], int(self.counts.sum())))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}

    def __repr__(self) -> str:
        return f"Vocabulary of {len(self):,} words, {self.counts.sum():,} in all"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What became of a text."""

    lines: int
    """That the text has."""
    words: int
    """That it has in all."""
    rare: int
    """Of these, words that are not in the vocabulary, and were left out."""
    empty: int
    """Lines that have none of the vocabulary's words, and were left out."""
    split: int
    """Lines longer than `line_words`, each of which is now several rows."""

    def __str__(self) -> str:
        return (
            f"{units.count(self.words, 'word')} in {units.count(self.lines, 'line')}; left out: {units.count(self.rare, 'rare word')}, "
            f"{self.empty:,} lines without others; {units.count(self.split, 'long line')} split"
        )


class Corpus(Ragged):
    """Lines of words: row i has the words words[offsets[i]:offsets[i + 1]], as numbers of the vocabulary.

    A row is a line without its rare words. A line that has none left is no row; a line of more than `line_words` is
    several. A batch of it is a Corpus again, with the same arrays and the numbers of its rows.

    The text is read once, CHUNK bytes at a time; the columns lie in files without names in the folder for temporary
    files (TMPDIR), and are mapped. Memory thus holds a chunk, and each different word once.

    min_count: words that occur less often are left out. max_words: so are all but so many, the most frequent.
    lower: words are made lower case.
    """

    def __init__(self, offsets: Array, words: Array, vocabulary: Vocabulary, counted: Counted) -> None:
        """offsets: int64 [rows + 1]. words: uint32 [words]."""
        super().__init__(offsets, {"words": words})
        self.vocabulary, self.counted = vocabulary, counted

    @classmethod
    def read(
        cls,
        paths: str | Path | Sequence[str | Path],
        *,
        min_count: int = 5,
        lower: bool = False,
        max_words: int | None = None,
        line_words: int = 1000,
    ) -> Self:
        """Of a file of UTF-8 text, a folder of such files, or several of these; also by URLs that fsspec knows.

        A folder's files are read in the order of their paths, those in folders of it, too; hidden ones are not. Files
        whose names end in .gz, .bz2, .xz or .zst are decompressed. Words stand between white space, lines between line
        feeds. Raises BadInput for what cannot be read.
        """
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        parts = (part for file in _files(given) for part in _text(file, lower))
        return cls._of(parts, units.listed([str(path) for path in given], 3), min_count, max_words, line_words)

    @classmethod
    def of_lines(
        cls,
        lines: Iterable[str],
        *,
        min_count: int = 5,
        lower: bool = False,
        max_words: int | None = None,
        line_words: int = 1000,
    ) -> Self:
        """Of texts, each of which is one line."""
        if isinstance(lines, str):
            raise BadInput("of_lines takes many lines, such as a list of texts, and got one text: give [text]")
        return cls._of(_lines(lines, lower), "what of_lines was given", min_count, max_words, line_words)

    @classmethod
    def of_tokens(
        cls,
        lists: Iterable[Sequence[str]],
        *,
        min_count: int = 5,
        lower: bool = False,
        max_words: int | None = None,
        line_words: int = 1000,
    ) -> Self:
        """Of lists of words, each of which is one line."""
        return cls._of(_token_lists(lists, lower), "what of_tokens was given", min_count, max_words, line_words)

    @classmethod
    def _of(cls, parts: Iterable[_Part], what: str, min_count: int, max_words: int | None, line_words: int) -> Self:
        for name, value in (("min_count", min_count), ("max_words", max_words), ("line_words", line_words)):
            if not (is_whole(value) or (name == "max_words" and value is None)):
                raise BadInput(f"Corpus: {name} must be a whole number of at least 1, not {value!r}")
        with tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as ends:
            text = _Text(words, ends)
            for part in parts:
                text.add(part)
            if not text.words:
                raise BadInput(f"{what}: there is no word in it, and a corpus needs some: check the path")
            vocabulary, renumbered = text.vocabulary(what, min_count, max_words)
            return cls(*_compacted(text, vocabulary, renumbered, line_words))

    @property
    def words(self) -> Array:
        """uint32 [words] of the whole data: numbers of the vocabulary."""
        return self.flat["words"]

    def __repr__(self) -> str:
        return f"Corpus of {len(self):,} rows, {len(self.vocabulary):,} different words ({self.counted})"


# -- reading: lists of words, chunk by chunk -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A piece of a text."""

    words: pa.StringArray  # [n]
    ends: NDArray[np.int64]  # [lines that end in this part]: the number of words before each end, never falling


def _files(given: Sequence[str | Path]) -> list[str]:
    """Paths or URLs of all files, each folder's in order."""
    if not given:
        raise BadInput("Corpus.read was given no path: give a file of text, a folder of such files, or several")
    return [file for path in given for file in _found(str(path))]


def _found(path: str) -> list[str]:
    url = "://" in path
    fs, place = filesystem(path if url else str(Path(path).expanduser()))
    if not fs.exists(place):
        raise BadInput(
            f"there is no file or folder {path!r}" + ("" if url else f" (the current folder is {Path.cwd()})")
        )
    if not fs.isdir(place):
        return [path if url else place]
    base = len(place.rstrip("/")) + 1
    inside = sorted(file for file in fs.find(place) if not any(part[:1] == "." for part in file[base:].split("/")))
    if not inside:
        raise BadInput(f"folder {path!r} holds no files: give a folder of text files")
    return [fs.unstrip_protocol(file) if url else file for file in inside]


def _text(file: str, lower: bool) -> Iterator[_Part]:
    """The parts of a file of text. A line that is longer than a chunk goes on in the next part."""
    import fsspec

    try:
        with fsspec.open(file, "rb", compression="infer") as stream:
            yield from _chunks(stream, file, lower)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} cannot be read: {error}. Check that it is a whole file of text") from error


def _chunks(stream: BinaryIO, file: str, lower: bool) -> Iterator[_Part]:
    at, left = 0, b""  # bytes of the file before `left`, which was read and not yet split
    in_line = False  # whether the last one before `left` belongs to a line that goes on
    while read := stream.read(CHUNK):
        data = left + read
        if at == 0 and data.startswith(_BYTE_ORDER_MARK):
            data = b"   " + data[len(_BYTE_ORDER_MARK) :]
        cut = max(data.rfind(bytes([white])) for white in _WHITE) + 1
        if not cut and len(data) > CHUNK:
            raise BadInput(
                f"{file}: no white space in {units.size(len(data))} from byte {at:,} on: words stand between white space. Is it text?"
            )
        if cut:
            yield _split(_valid(data[:cut], file, at), lower, ended=False)
            in_line = data[cut - 1 : cut] != b"\n"
        at, left = at + cut, data[cut:]
    if left or in_line:
        yield _split(_valid(left, file, at), lower, ended=True)


def _valid(data: bytes, file: str, at: int) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{file} is not UTF-8: byte {at + error.start:,} is 0x{data[error.start]:02x} ({error.reason}). Convert it: iconv -f latin1 -t utf-8, for example"
        ) from None
    return data


def _split(data: bytes, lower: bool, ended: bool) -> _Part:
    """ended: what stands behind the last line feed is a whole line, too."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(data)], np.int32)), pa.py_buffer(data))
    part = _words_of(pc.split_pattern(whole, "\n").flatten(), lower)
    return part if ended else _Part(part.words, part.ends[:-1])


def _words_of(lines: pa.StringArray, lower: bool) -> _Part:
    import pyarrow.compute as pc

    lines = pc.utf8_trim_whitespace(lines)  # the split reads beyond a line that ends with white space (Arrow 26)
    lists = pc.utf8_split_whitespace(pc.utf8_lower(lines) if lower else lines)
    return _Part(lists.flatten(), lists.offsets.to_numpy()[1:].astype(np.int64) - lists.offsets[0].as_py())


def _lines(lines: Iterable[str], lower: bool) -> Iterator[_Part]:
    import pyarrow as pa

    for some in _batches(lines, len):
        yield (
            _words_of(_strings(some, "lines"), lower)
            if some
            else _Part(pa.array([], pa.string()), np.empty(0, np.int64))
        )


def _token_lists(lists: Iterable[Sequence[str]], lower: bool) -> Iterator[_Part]:
    import pyarrow.compute as pc

    for some in _batches(lists, lambda words: 8 * len(words)):
        if text := next((words for words in some if isinstance(words, str)), None):
            raise BadInput(f"of_tokens takes lists of words, and got the text {text[:40]!r}: give texts to of_lines")
        words = _strings([word for words in some for word in words], "words")
        yield _Part(pc.utf8_lower(words) if lower else words, np.cumsum([len(words) for words in some], dtype=np.int64))


def _batches(items: Iterable[Any], size: Any) -> Iterator[list[Any]]:
    """Items of about CHUNK bytes together."""
    some: list[Any] = []
    held = 0
    for item in items:
        some.append(item)
        held += size(item) if hasattr(item, "__len__") else 1
        if held >= CHUNK:
            yield some
            some, held = [], 0
    if some:
        yield some


def _strings(texts: list[Any], what: str) -> pa.StringArray:
    import pyarrow as pa

    try:
        array = pa.array(texts, pa.string())
    except (pa.ArrowTypeError, pa.ArrowInvalid, UnicodeEncodeError) as error:
        raise BadInput(f"the {what} of a corpus must be texts: {error}") from None
    if array.null_count:
        raise BadInput(f"the {what} of a corpus must be texts, and one of them is None")
    return array


# -- numbering: first as words come, then by how often they do -------------------------------------------------------


class _Text:
    """What was read: numbers of words, in the order in which each word was first seen, and the ends of lines."""

    def __init__(self, words: Any, ends: Any) -> None:
        """words, ends: open files, empty."""
        self._words, self._ends = words, ends
        self._known: dict[str, int] = {}
        self._counts = np.zeros(0, np.int64)
        self.words = self.lines = 0

    def add(self, part: _Part) -> None:
        encoded = part.words.dictionary_encode()
        different, indices = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        ends = part.ends
        if "" in different:  # of lines without words, Arrow's split makes one
            real = indices != different.index("")
            before = np.concatenate([[0], np.cumsum(real, dtype=np.int64)])
            indices, ends = indices[real], before[ends]
        occur = np.bincount(indices, minlength=len(different))
        known = self._known
        ids = np.fromiter(
            (known.setdefault(word, len(known)) if n else 0 for word, n in zip(different, occur.tolist(), strict=True)),
            np.uint32,
            len(different),
        )
        self._counts = np.concatenate([self._counts, np.zeros(len(known) - len(self._counts), np.int64)])
        some = occur > 0
        self._counts[ids[some]] += occur[some]
        self._words.write(np.ascontiguousarray(ids[indices]).data)
        self._ends.write(np.ascontiguousarray(self.words + ends).data)
        self.words += len(indices)
        self.lines += len(ends)

    def vocabulary(self, what: str, min_count: int, max_words: int | None) -> tuple[Vocabulary, NDArray[np.uint32]]:
        """With [words seen]: the number in the vocabulary of each, _NONE for what is left out."""
        words, counts = np.array(list(self._known), object), self._counts
        often = np.flatnonzero(counts >= min_count)
        if not len(often):
            raise BadInput(
                f"{what}: all its {units.count(len(counts), 'different word')} are rarer than min_count={min_count} (the most frequent occurs "
                f"{int(counts.max()):,} times): lower min_count, or give more text"
            )
        by_word = often[np.argsort(words[often], kind="stable")]
        chosen = by_word[np.argsort(-counts[by_word], kind="stable")][:max_words]
        numbers = np.full(len(counts), _NONE)
        numbers[chosen] = np.arange(len(chosen), dtype=np.uint32)
        return Vocabulary(words[chosen], counts[chosen]), numbers

    def columns(self) -> tuple[Array, Array]:
        """(words uint32 [words], ends int64 [lines])"""
        return mapped(self._words, np.uint32), mapped(self._ends, np.int64)


def _compacted(
    text: _Text, vocabulary: Vocabulary, numbers: NDArray[np.uint32], line_words: int
) -> tuple[Array, Array, Vocabulary, Counted]:
    """What a Corpus is made of: words of the vocabulary alone, and the offsets of rows of at most `line_words`."""
    words, ends = text.columns()
    kept, done, empty, split = 0, 0, 0, 0  # words kept, and lines that ended, before this chunk
    began = 0  # the number of words kept before the line that has not yet ended
    with tempfile.TemporaryFile() as own_words, tempfile.TemporaryFile() as offsets:
        offsets.write(np.zeros(1, np.int64).data)
        for start in range(0, len(words), CHUNK):
            found = numbers[words[start : start + CHUNK]]
            real = found != _NONE
            before = kept + np.concatenate([[0], np.cumsum(real, dtype=np.int64)])  # [n + 1]
            last = done + int(np.searchsorted(ends[done:], start + len(found), "right"))
            own_ends = before[ends[done:last] - start]
            lengths = np.diff(own_ends, prepend=began)
            pieces = -(-lengths // line_words)
            piece = np.arange(1, pieces.sum() + 1) - np.repeat(
                np.cumsum(pieces) - pieces, pieces
            )  # 1, 2, … of its line
            row_ends = np.minimum(
                np.repeat(own_ends - lengths, pieces) + piece * line_words, np.repeat(own_ends, pieces)
            )
            own_words.write(found[real].data)
            offsets.write(np.ascontiguousarray(row_ends).data)
            kept, done, began = int(before[-1]), last, int(own_ends[-1]) if len(own_ends) else began
            empty += int((pieces == 0).sum())
            split += int((pieces > 1).sum())
        counted = Counted(lines=text.lines, words=text.words, rare=text.words - kept, empty=empty, split=split)
        return mapped(offsets, np.int64), mapped(own_words, np.uint32), vocabulary, counted
