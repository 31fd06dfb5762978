"""Word vectors as a model: neighbours, and files of word2vec's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands import units
from manyhands.data.corpus import Vocabulary
from manyhands.errors import BadInput, UnknownName, is_whole
from manyhands.sparse.kernel import KernelModel

Array = NDArray[Any]


class WordVectors(KernelModel):
    """The vectors of a vocabulary, a model of a kernel that has one in its field `vocabulary`."""

    @property
    def vocabulary(self) -> Vocabulary:
        found = getattr(self.kernel, "vocabulary", None)
        if found is None:
            raise BadInput(
                f"kernel {self.kernel.name} was given no vocabulary, so that words have numbers alone: give it the corpus's, vocabulary=corpus.vocabulary"
            )
        assert isinstance(found, Vocabulary)
        return found

    def vectors(self) -> Array:
        """[words, dim], in the order of the vocabulary: the table `words`."""
        return self.tables()["words"]

    def vector(self, word: str) -> Array:
        """[dim]. UnknownName for a word that the vocabulary lacks."""
        vector: Array = self.vectors()[self._number(word)]
        return vector

    def similarity(self, one: str, other: str) -> float:
        """The cosine of two words' vectors."""
        a, b = (self.vector(word).astype(np.float64) for word in (one, other))
        return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))

    def most_similar(
        self, positive: str | Sequence[str], negative: str | Sequence[str] = (), topn: int = 10
    ) -> list[tuple[str, float]]:
        """The words nearest by cosine to a word, or to the sum of some minus that of others, each of length 1; these are
        left out. [(word, cosine)], the nearest first.

        "Paris is to France as … to Italy" is most_similar(["Paris", "Italy"], ["France"]).
        """
        add, take = ([given] if isinstance(given, str) else list(given) for given in (positive, negative))
        if not add + take or not is_whole(topn):
            raise BadInput("most_similar needs at least one word, and topn of at least 1")
        asked = [self._number(word) for word in add + take]
        unit = self.unit_vectors()
        wanted = np.where(np.arange(len(asked)) < len(add), 1, -1).astype(unit.dtype) @ unit[asked]
        cosines = unit @ (wanted / max(float(np.linalg.norm(wanted)), 1e-30))
        cosines[asked] = -np.inf
        count = min(topn, len(cosines) - len(set(asked)))
        nearest = np.argpartition(-cosines, min(count, len(cosines) - 1))[:count]
        nearest = nearest[np.lexsort((nearest, -cosines[nearest]))]
        return [(self.vocabulary.words[i], float(cosines[i])) for i in nearest]

    def unit_vectors(self) -> Array:
        """[words, dim]: each of length 1."""
        words = self.vectors()
        unit: Array = words / np.maximum(np.linalg.norm(words, axis=1, keepdims=True), 1e-30)
        return unit

    def save(self, path: str | Path, binary: bool = False) -> None:
        """Write a file of word2vec's format, text or binary, the most frequent word first.

        gensim's KeyedVectors.load_word2vec_format reads both, and so do most programs that take word vectors.
        """
        words, vectors = self.vocabulary.words, self.vectors()
        if spaced := next((word for word in words if len(word.split()) != 1), None):
            raise BadInput(
                f"word2vec's format separates words by white space, and {spaced!r} has some: join its parts by _ before training"
            )
        with open(path, "wb") as file:
            file.write(f"{len(words)} {vectors.shape[1]}\n".encode())
            row = " ".join(["%.9g" if vectors.dtype == np.float32 else "%.17g"] * vectors.shape[1])
            for word, vector in zip(words, vectors, strict=True):
                if binary:
                    file.write(word.encode() + b" " + vector.astype("<f4").tobytes() + b"\n")
                else:
                    file.write(f"{word} {row % tuple(vector.tolist())}\n".encode())

    def _number(self, word: str) -> int:
        number = self.vocabulary.numbers.get(word)
        if number is None:
            raise UnknownName(
                f"no word {word!r} among the {units.count(len(self.vocabulary), 'word')} of this model{_nearest(word, self.vocabulary)}"
            )
        return number


def _nearest(word: str, vocabulary: Vocabulary) -> str:
    """The nearest spellings, as the end of an error."""
    import difflib

    alike = [other for other in vocabulary.words[:100_000] if abs(len(other) - len(word)) < 3]
    close = difflib.get_close_matches(str(word), alike, n=3)
    return f": the nearest spellings are {', '.join(close)}" if close else "; none is spelt nearly so"
