"""data/corpus.py: what becomes of lines and words, whatever they come from, and what is refused."""

import bz2
import gzip
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.data import corpus as module
from manyhands.data.corpus import Corpus, Vocabulary
from manyhands.engines.local.serialization import deserialize, serialize
from refusals import refused

TEXT = "the cat  sat on the mat\n\n on the mat the dog\u00a0sat \nrare\nthe end"


def rows_of(corpus: Corpus) -> list[list[str]]:
    return [[corpus.vocabulary.words[number] for number in row["words"]] for row in corpus]


def by_hand(text: str, min_count: int, line_words: int) -> tuple[list[str], list[list[str]]]:
    """(vocabulary, rows)"""
    lines = [line.split() for line in text.split("\n")]
    counts = Counter(word for line in lines for word in line)
    words = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    kept = [[word for word in line if word in words] for line in lines]
    return words, [line[i : i + line_words] for line in kept for i in range(0, len(line), line_words)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_lines_without_their_rare_words_are_rows(file: Path) -> None:
    corpus = Corpus.read(file, min_count=2)
    assert corpus.vocabulary.words == ("the", "mat", "on", "sat")
    assert corpus.vocabulary.counts.tolist() == [5, 2, 2, 2]
    rows = [["the", "sat", "on", "the", "mat"], ["on", "the", "mat", "the", "sat"], ["the"]]
    assert rows_of(corpus) == rows
    counted = corpus.counted
    assert (counted.lines, counted.words, counted.rare, counted.empty, counted.split) == (5, 15, 4, 2, 0)
    assert "15 words" in repr(corpus)
    assert "4 rare words" in repr(corpus)
    batch = corpus.take([2, 0])  # a slice is a view
    assert np.shares_memory(batch.words, corpus.words)
    assert rows_of(batch) == [["the"], rows[0]]
    assert batch.vocabulary is corpus.vocabulary


def test_long_lines_are_split_and_lose_nothing() -> None:
    words = [f"w{i % 7}" for i in range(25)]
    corpus = Corpus.of_tokens([words, ["w1"] * 10, ["w2"]], min_count=1, line_words=10)
    assert [len(row) for row in rows_of(corpus)] == [10, 10, 5, 10, 1]
    assert sum(rows_of(corpus)[:3], []) == words
    assert corpus.counted.split == 1


@pytest.mark.parametrize("lines", ["short", "one"])
def test_chunks_change_nothing(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one line is longer than many chunks."""
    random = np.random.default_rng(5)
    ends = {"short": [" ", "  ", "\n", "\n\n", "\r\n", "\u3000", "\t"], "one": [" "]}[lines]
    text = "".join(f"ü{random.zipf(1.6) % 30}{random.choice(ends)}" for _ in range(900))
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    for line_words in (3, 1000):
        words, rows = by_hand(text, 3, line_words)
        for chunk in (64, 100, 1000, 1 << 24):
            monkeypatch.setattr(module, "CHUNK", chunk)
            corpus = Corpus.read(path, min_count=3, line_words=line_words)
            assert list(corpus.vocabulary.words) == words, (line_words, chunk)
            assert rows_of(corpus) == rows, (line_words, chunk)


def test_files_folders_lines_and_lists_give_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    lines = [f"a b c{i % 3}" for i in range(9)]
    (folder / "0.txt").write_text("\n".join(lines[:3]))
    (folder / "1.gz").write_bytes(gzip.compress("\n".join(lines[3:5]).encode()))
    (folder / "inner" / "2.bz2").write_bytes(bz2.compress("\n".join(lines[5:]).encode() + b"\n"))
    (folder / ".hidden").write_text("not this")
    files = [folder / "0.txt", folder / "1.gz", folder / "inner" / "2.bz2"]
    given = [Corpus.read(path, min_count=2) for path in (folder, str(folder), files, f"file://{folder}")]
    given.append(Corpus.of_lines(iter(lines), min_count=2))
    given.append(Corpus.of_tokens((line.split() for line in lines), min_count=2))
    for corpus in given:
        assert rows_of(corpus) == [line.split() for line in lines]
        assert corpus.vocabulary == given[0].vocabulary


def test_case_and_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    lines = ["The the B", "b a THE"]
    assert Corpus.of_lines(lines, min_count=1).vocabulary.words == ("B", "THE", "The", "a", "b", "the")
    corpus = Corpus.of_lines(lines, min_count=1, lower=True, max_words=2)
    assert corpus.vocabulary.words == ("the", "b")
    assert corpus.counted.rare == 1
    assert Corpus.of_tokens([["A", "a"]], min_count=2, lower=True).vocabulary.words == ("a",)
    (tmp_path / "text").write_text("word word", encoding="utf-8-sig")  # a mark of byte order is no letter
    assert Corpus.read(tmp_path / "text", min_count=2).vocabulary.words == ("word",)


def test_what_is_mapped_travels_out_of_band_and_can_be_written_to() -> None:
    corpus = Corpus.of_tokens([[f"w{i % 9}" for i in range(90_000)]], min_count=1)
    assert type(corpus.words) is type(corpus.offsets) is np.ndarray
    assert corpus.words.dtype == np.uint32
    buffers: list[Any] = []
    assert len(pickle.dumps(corpus, protocol=5, buffer_callback=buffers.append)) < 5000
    assert sum(buffer.raw().nbytes for buffer in buffers) >= corpus.words.nbytes
    fd = serialize(corpus, "the data")
    try:
        arrived = deserialize(fd, mapped=True)
    finally:
        os.close(fd)
    assert rows_of(arrived) == rows_of(corpus)
    assert arrived.vocabulary == corpus.vocabulary
    for one in (corpus, arrived):
        assert one.words.flags.writeable
        one.words[0] = 3
        assert one[:1].words[0] == 3


def test_no_temporary_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    seen = [list(folder.iterdir()) for _ in Corpus.of_lines((f"word {i}" for i in range(10)), min_count=1)]
    assert seen == [[]] * 10
    assert len(Corpus.read(file, min_count=1)) == 4
    assert not list(folder.iterdir())


def test_what_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    for name, data, words in [
        ("empty", b"", "empty: there is no word"),
        ("white", b" \n\n\t", "white: there is no word"),
        ("rare", b"a b c d d\n", "rare: all its 4 different words are rarer than min_count=5 .* 2 times"),
        ("latin", b"word \xe9t\xe9\n", "latin is not UTF-8: byte 5 is 0xe9"),
        ("late", b"word " * 400 + b"\xff", "late is not UTF-8: byte 2,000 is 0xff"),
        ("binary", b"x" * 3000, "binary: no white space in .* from byte 0"),
        ("text.gz", b"no gzip", "text.gz cannot be read"),
        ("cut.gz", gzip.compress(b"word " * 9999)[:-9], "cut.gz cannot be read"),
    ]:
        (tmp_path / name).write_bytes(data)
        refused(words, Corpus.read, tmp_path / name)
    (tmp_path / "folder").mkdir()
    refused("no file or folder .*none.txt", Corpus.read, tmp_path / "none.txt")
    refused("holds no files", Corpus.read, tmp_path / "folder")
    refused("no path", Corpus.read, [])


def test_wrong_arguments() -> None:
    refused(r"give \[text\]", Corpus.of_lines, "a text")
    refused("give texts to of_lines", Corpus.of_tokens, ["a text"])
    refused("must be texts", Corpus.of_lines, [1])
    refused("one of them is None", Corpus.of_tokens, [["a", None]])
    for option in ("min_count", "line_words", "max_words"):
        refused(f"{option} must be", lambda option: Corpus.of_lines(["a"], **{option: 0}), option)
    for words, counts in ((["a", "b"], [1, 2]), (["a"], [0]), ([], []), (["a"], [2, 1])):
        refused("vocabulary", Vocabulary, words, counts)
    assert Vocabulary(["a", "b"], [2, 1]) == Vocabulary(("a", "b"), np.array([2, 1]))
    assert Vocabulary(["a", "b"], [2, 1]) != Vocabulary(["a", "b"], [2, 2])
    assert "b" in Vocabulary(["a", "b"], [2, 1])
