"""How full vectors [D'] lie on the shards: contiguous ranges, cut and joined here for every kind of client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import slice_of
from manyhands.comm.codecs import Codec, codec_of
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.base import Encoded, ServerSpec, ServerState
from manyhands.server.rules import make_rule
from manyhands.server.store import Store


def shards_of(spec: ServerSpec, shards: int) -> int:
    """How many shards a server of this spec has where `shards` are asked for."""
    if shards < 1:
        raise BadInput(f"a server must have at least one shard; got {shards}")
    return 1 if spec.one_shard else shards


def make_stores(spec: ServerSpec, workers: int, shards: int = 1) -> list[Store]:
    """The stores of all shards, in order; BadInput where the spec names no rule, or options it does not take."""
    if workers < 1:
        raise BadInput(f"a server must have at least one worker; got {workers}")
    return [Store(make_rule(spec), workers, spec.bound) for _ in range(shards_of(spec, shards))]


def parts_of(vector: Tensor, shards: int) -> list[Tensor]:
    """Views of [D'], one a shard."""
    return [vector[slice(*slice_of(shard, shards, len(vector)))] for shard in range(shards)]


def lengths_of(update: Encoded) -> list[int]:
    """Elements of each shard's part."""
    shards = len(update.parts)
    return [stop - start for start, stop in (slice_of(shard, shards, update.n) for shard in range(shards))]


def check_encoded(codec: Codec, update: Encoded, shards: int) -> None:
    """BadInput unless there is a payload for each shard, of a length that the codec gives."""
    if len(update.parts) != shards:
        raise BadInput(f"an encoded push has a payload for each of {shards} shards; got {len(update.parts)}")
    for part, n in zip(update.parts, lengths_of(update), strict=True):
        codec.check_length(len(part), n, update.dtype)


def codec_for(spec: ServerSpec) -> Codec:
    """The codec of encoded pushes; BadInput where the spec has none."""
    codec = codec_of(spec.compress)
    if codec is None:
        raise BadInput('this server takes no encoded pushes: its ServerSpec says compress="none"')
    return codec


def joined(captured: Sequence[tuple[dict[str, Tensor], dict[str, Any]]]) -> ServerState:
    """One snapshot from what each shard's `capture` gave; one shard's own vectors become part of it.

    The numbers are the first shard's, and the newest version: a worker that died between two shards leaves them apart.
    """
    names = [sorted(vectors) for vectors, _ in captured]
    if any(own != names[0] for own in names):
        raise ManyhandsError(
            f"the server's shards captured different vectors ({names}): use the same version of manyhands on all hosts"
        )
    vectors = captured[0][0]
    if len(captured) > 1:
        vectors = {name: torch.cat([vectors[name] for vectors, _ in captured]) for name in vectors}
    numbers = {**captured[0][1], "version": max(numbers["version"] for _, numbers in captured)}
    return ServerState(vectors=vectors, numbers=numbers)


def cut(snapshot: ServerState, shards: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What each shard's `restore` takes; the vectors are views."""
    pieces = {name: parts_of(vector, shards) for name, vector in snapshot.vectors.items()}
    return [({name: parts[shard] for name, parts in pieces.items()}, snapshot.numbers) for shard in range(shards)]
