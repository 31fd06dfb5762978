"""The task `glove`: word vectors of a text, from how often words stand near each other."""

from __future__ import annotations

import logging

from manyhands.data.cooccurrence import count_cooccurrences
from manyhands.data.corpus import Corpus
from manyhands.kernels.glove import Glove
from manyhands.task import Task
from manyhands.tasks.table_file import slice_rows

NS_A_NUMBER = 1.0  # of a pair's vectors

_LOG = logging.getLogger("manyhands")


def glove(
    path: str,
    *,
    dim: int = 100,
    window: int = 15,
    symmetric: bool = True,
    min_count: int = 5,
    lower: bool = False,
    max_words: int | None = None,
    x_max: float = 100.0,
    alpha: float = 0.75,
    memory: int = 1 << 30,
    **fields: object,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.05 and epochs=25 stand there at first.

    path: a file of text or a folder of such files. min_count, lower, max_words: see `Corpus`. window, symmetric, memory:
    see `count_cooccurrences`. dim, x_max, alpha: of the kernel `Glove`.

    Pairs come in the order of `Cooccurrences`, which is one for training: shuffle=False.
    """
    corpus = Corpus.read(path, min_count=min_count, lower=lower, max_words=max_words)
    _LOG.info("%s: %r", path, corpus)
    pairs = count_cooccurrences(corpus, window=window, symmetric=symmetric, memory=memory, progress=_report)
    _LOG.info("%s: %r", path, pairs)
    task = Task(
        name="glove",
        kernel=Glove(vocabulary=corpus.vocabulary, dim=dim, x_max=x_max, alpha=alpha),
        rate=0.05,
        train_data=pairs.data(),
        shuffle=False,
        batch_size_per_worker=slice_rows(len(pairs.counts), dim * NS_A_NUMBER),
        epochs=25,
    )
    return task.with_fields(**fields)


def _report(done: int, words: int) -> None:
    _LOG.info("co-occurrences: %s of %s words counted", f"{done:,}", f"{words:,}")
