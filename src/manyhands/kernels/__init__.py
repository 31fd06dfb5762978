"""Kernels: algorithms that train tables without gradients, one a file. Loaded when asked for; each needs numba (extra
`sparse`). The contract is `sparse/kernel.py`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.kernels.cuts import Cuts as Cuts
    from manyhands.kernels.factors import Factors as Factors
    from manyhands.kernels.ffm import FFM as FFM
    from manyhands.kernels.fm import FM as FM
    from manyhands.kernels.glove import Glove as Glove
    from manyhands.kernels.kmeans import KMeans as KMeans
    from manyhands.kernels.linear import Linear as Linear
    from manyhands.kernels.skip_gram import SkipGram as SkipGram
    from manyhands.kernels.word_vectors import WordVectors as WordVectors

_WHERE = {
    "Cuts": "cuts",
    "FFM": "ffm",
    "FM": "fm",
    "Factors": "factors",
    "Glove": "glove",
    "KMeans": "kmeans",
    "Linear": "linear",
    "SkipGram": "skip_gram",
    "WordVectors": "word_vectors",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_WHERE)}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
