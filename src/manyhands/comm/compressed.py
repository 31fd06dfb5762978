"""The mean of a group through a codec: what travels are payloads."""

from __future__ import annotations

import math
import re
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import check_mean
from manyhands.comm.codecs.base import NO_HINTS, Codec, Hints, LinearCodec, computed
from manyhands.comm.group import Group, MeanResult
from manyhands.errors import ManyhandsError, is_whole


def compressed_mean_(
    group: Group,
    codec: Codec,
    vector: Tensor,
    weight: float = 1.0,
    bits: int = 0,
    hints: Hints = NO_HINTS,
    own: Tensor | None = None,
) -> MeanResult:
    """`Group.mean_`, of what the codec leaves of each rank's `vector` [n]. A collective.

    The same bits on every rank; a rank of weight 0 gets the others' mean, and what it held does not count; total weight
    0 leaves every vector as it was. With one rank nothing is encoded. `own` [n] gets what this rank put into the mean,
    for error feedback: what its payload stands for (zeros without weight), less what was lost where it rounded the
    mean. The weighted mean of all ranks' `own` is the mean; for a rank without weight, it counts as much as the others
    on average.

    Payloads of linear codecs are averaged as they travel. All others go to everybody, (size - 1) payloads from each
    rank, and are added up in rank order; those of no fixed length are padded to the longest, and what pads is sent too.
    """
    check_mean(vector, weight, bits)
    if group.size == 1:
        if own is not None:
            own.copy_(vector)
        return MeanResult(float(weight), bits)
    mean_ = codec.mean_ if isinstance(codec, LinearCodec) else partial(_gathered, codec)
    return mean_(group, vector, float(weight), bits, hints, own)


def _check(word: Any, rank: int, lengths: range) -> None:
    """ManyhandsError, naming the worker, unless it announced a weight, bits and a length that its payload can have."""
    weight, bits, length = word if isinstance(word, list) and len(word) == 3 else (None, None, None)
    right = isinstance(weight, int | float) and 0 <= weight < math.inf and is_whole(length, 0) and length in lengths
    if not right or not isinstance(bits, str) or not re.fullmatch("[0-9a-f]+", bits):
        raise ManyhandsError(
            f"worker {rank} announced {word!r:.80}, which does not fit the codec of this worker: use the same codec "
            "and the same version of manyhands on all workers"
        )


def _gathered(
    codec: Codec, group: Group, vector: Tensor, weight: float, bits: int, hints: Hints, own: Tensor | None
) -> MeanResult:
    payload = codec.encode(vector if weight else torch.zeros_like(vector), hints)
    group.encoded(codec.name, len(vector), len(payload))
    words = group.all_gather_json([weight, f"{bits:x}", len(payload)])
    for rank, word in enumerate(words):
        _check(word, rank, codec.lengths(len(vector), vector.dtype))
    total = MeanResult(sum(word[0] for word in words), reduce(or_, (int(word[1], 16) for word in words)))
    if own is not None:
        if weight:
            own.copy_(codec.decode(payload, len(vector), vector.dtype))
        else:
            own.zero_()
    if not total.weight:
        return total
    longest = max(word[2] for word in words)
    rows = group.all_gather(torch.nn.functional.pad(payload, (0, longest - len(payload))))
    mean: Tensor | None = None
    for row, (share, _, length) in zip(rows, words, strict=True):
        if share:
            part = computed(codec.decode(row[:length], len(vector), vector.dtype)).mul_(share / total.weight)
            mean = part if mean is None else mean.add_(part)
    assert mean is not None  # total.weight is positive
    vector.copy_(mean)
    counted = [length for share, _, length in words if share]
    group.decoded(codec.name, len(vector), sum(counted), len(counted))
    return total
