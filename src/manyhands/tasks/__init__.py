"""Ready-made tasks by name: `digits`, `digits:batch_size=32,epochs=5`, `chars`, `word2vec:path=corpus.txt`. Loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.tasks.chars_task import chars as chars
    from manyhands.tasks.cuts_task import cuts as cuts
    from manyhands.tasks.digits_task import digits as digits
    from manyhands.tasks.factors_task import factors as factors
    from manyhands.tasks.ffm_task import ffm as ffm
    from manyhands.tasks.fm_task import fm as fm
    from manyhands.tasks.glove_task import glove as glove
    from manyhands.tasks.kmeans_task import kmeans as kmeans
    from manyhands.tasks.linear_task import linear as linear
    from manyhands.tasks.word2vec_task import word2vec as word2vec

CATALOGUE = {
    "digits": "manyhands.tasks.digits_task:digits",
    "chars": "manyhands.tasks.chars_task:chars",
    "linear": "manyhands.tasks.linear_task:linear",
    "fm": "manyhands.tasks.fm_task:fm",
    "ffm": "manyhands.tasks.ffm_task:ffm",
    "factors": "manyhands.tasks.factors_task:factors",
    "glove": "manyhands.tasks.glove_task:glove",
    "kmeans": "manyhands.tasks.kmeans_task:kmeans",
    "cuts": "manyhands.tasks.cuts_task:cuts",
    "word2vec": "manyhands.tasks.word2vec_task:word2vec",
}

SUMMARIES = {
    "digits": "a small CNN reads 1,797 handwritten digits (bundled): about 99 % test accuracy in seconds",
    "chars": "a small transformer predicts the next character of Python's standard library: bits per character",
    "linear": "logistic regression or a linear SVM on sparse rows of two classes: linear:path=rows.svm,loss=hinge",
    "fm": "a factorization machine on sparse rows, libsvm text: fm:path=rows.svm,k=8",
    "ffm": "a field-aware factorization machine on clicks, libffm text: ffm:path=clicks.ffm,k=4",
    "factors": "matrix factorisation of your ratings: path=ratings.csv",
    "glove": "word vectors of your text, from counts of words near each other: path=corpus.txt",
    "cuts": "nodes of your graph in classes, of which some are known: path=edges.csv,known_path=known.csv",
    "kmeans": "mini-batch k-means of your rows: path=rows.npy,clusters=100",
    "word2vec": "word vectors of your text, by skip-gram or continuous bag of words: path=corpus.txt",
}


def __getattr__(name: str) -> Any:
    if name not in CATALOGUE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: its tasks are {', '.join(CATALOGUE)}")
    module, _, attribute = CATALOGUE[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *CATALOGUE})
