"""The task `word2vec`: word vectors of a text."""

from __future__ import annotations

import logging
from typing import Any

from manyhands.data.corpus import Corpus
from manyhands.kernels.skip_gram import SkipGram
from manyhands.task import Task

SLICE_WORDS = 20_000  # 10 ms and more
LAST_RATE = 1e-4

_LOG = logging.getLogger("manyhands")


def word2vec(
    path: str,
    dim: int = 100,
    window: int = 5,
    negative: int | None = None,
    cbow: bool = False,
    hierarchical: bool = False,
    sample: float = 1e-3,
    shared: bool = True,
    min_count: int = 5,
    lower: bool = False,
    max_words: int | None = None,
    epochs: int = 5,
    rate: float | None = None,
    **fields: Any,
) -> Task:
    """The task, with any of Task's fields changed. The rate falls in a line to LAST_RATE.

    path: a file of text or a folder of such files (see `Corpus.read`). dim to shared: see `SkipGram`. min_count, lower,
    max_words: see `Corpus`. rate: default 0.025, of cbow 0.05.
    """
    corpus = Corpus.read(path, min_count=min_count, lower=lower, max_words=max_words)
    _LOG.warning("%s: %r", path, corpus)  # what was left out of the text
    task = Task(
        name="word2vec",
        kernel=SkipGram(
            vocabulary=corpus.vocabulary,
            dim=dim,
            window=window,
            negative=negative,
            cbow=cbow,
            hierarchical=hierarchical,
            sample=sample,
            shared=shared,
        ),
        rate=rate if rate is not None else 0.05 if cbow else 0.025,
        last_rate=LAST_RATE,
        train_data=corpus,
        batch_size_per_worker=rows_of(corpus, SLICE_WORDS),
        epochs=epochs,
    )
    return task.with_fields(**fields)


def rows_of(corpus: Corpus, words: int) -> int:
    """How many rows have about so many words."""
    return max(1, min(len(corpus), round(words * len(corpus) / len(corpus.words))))
