"""How the server's full vectors [D'] lie on its shards: contiguous ranges, cut and joined here for every kind of client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import slice_of
from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec, Snapshot
from manyhands.server.rules import make_rule
from manyhands.server.store import Store


def shards_of(spec: ServerSpec, shards: int) -> int:
    """How many shards a server of this spec has where `shards` are asked for."""
    if shards < 1:
        raise BadInput(f"a server has at least one shard; got {shards}")
    return 1 if spec.one_shard else shards


def make_stores(spec: ServerSpec, workers: int, shards: int = 1) -> list[Store]:
    """The stores of all shards, in order; BadInput where the spec names no rule, or options it does not take."""
    if workers < 1:
        raise BadInput(f"a server has at least one worker; got {workers}")
    return [Store(make_rule(spec), workers, spec.bound) for _ in range(shards_of(spec, shards))]


def parts_of(vector: Tensor, shards: int) -> list[Tensor]:
    """Views of [D'], one a shard."""
    return [vector[slice(*slice_of(shard, shards, len(vector)))] for shard in range(shards)]


def joined(captured: Sequence[tuple[dict[str, Tensor], dict[str, Any]]]) -> Snapshot:
    """One snapshot, in memory of its own, from what each shard's `capture` gave.

    The numbers are the first shard's, and the newest version: a worker that died between two shards leaves them apart.
    """
    vectors = {name: torch.cat([vectors[name] for vectors, _ in captured]) for name in captured[0][0]}
    numbers = {**captured[0][1], "version": max(numbers["version"] for _, numbers in captured)}
    return Snapshot(vectors=vectors, numbers=numbers)


def cut(snapshot: Snapshot, shards: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What each shard's `restore` takes; the vectors are views."""
    pieces = {name: parts_of(vector, shards) for name, vector in snapshot.vectors.items()}
    return [({name: parts[shard] for name, parts in pieces.items()}, snapshot.numbers) for shard in range(shards)]
