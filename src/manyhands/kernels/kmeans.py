"""Mini-batch k-means: centres that move to the rows nearest to them.

Sources: Web-Scale K-Means Clustering, D. Sculley, 2010, https://doi.org/10.1145/1772690.1772862 (the steps). k-means++: The
Advantages of Careful Seeding, David Arthur, Sergei Vassilvitskii, 2007 (how centres may begin).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from manyhands.data.batch import describe
from manyhands.errors import BadInput, is_whole
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Arrays, Kernel, KernelModel, Measures, check_whole, columns_of
from manyhands.sparse.rows import Rows

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KMeans(Kernel):
    """Data: an array [rows, dim], or a dict with such a column `points`.

    The nearest centres of a mini-batch are found first. Then its rows move them, one after the other, by rate / count of
    the way, where count is how many rows a centre has moved for. With rate 1, the paper's, a centre is the mean of these.
    """

    initial: Array
    """[clusters, dim]: how centres begin (`sampled`, `plus_plus`)."""
    minibatch: int = 1024
    """Rows whose nearest centres are found before one of them moves a centre."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        initial = np.asarray(self.initial)
        if initial.ndim != 2 or 0 in initial.shape or initial.dtype.kind not in "iuf":
            raise BadInput(
                f"kernel KMeans: initial must be numbers [clusters, dim], not {describe(self.initial)}: sampled(points, clusters, seed), for example"
            )
        if not np.isfinite(initial).all():
            raise BadInput("kernel KMeans: initial must be finite numbers")
        check_whole(self, "minibatch")
        object.__setattr__(self, "initial", np.ascontiguousarray(initial, self.dtype))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KMeans) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @override
    def __repr__(self) -> str:
        """With a digest of the numbers: kernels that begin otherwise read otherwise."""
        clusters, dim = self.initial.shape
        digest = hashlib.blake2b(self.initial.tobytes(), digest_size=8).hexdigest()
        return f"KMeans(clusters={clusters}, dim={dim}, initial={digest}, minibatch={self.minibatch}, dtype={self.dtype!r})"

    @override
    def tables(self) -> dict[str, Rows]:
        clusters, dim = self.initial.shape
        return {
            "centres": Rows(rows=clusters, dim=dim, dtype=self.dtype),
            "counts": Rows(rows=clusters, dtype=self.dtype),
        }

    @override
    def initial_rows(self, table: str, keys: NDArray[np.int64] | range, seed: int) -> Array:
        return self.initial[np.asarray(keys)] if table == "centres" else super().initial_rows(table, keys, seed)

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        points = columns_of(batch, ("points",), self)["points"] if isinstance(batch, Mapping) else _array(batch)
        dim = self.initial.shape[1]
        if points.dtype.kind not in "iuf" or points.ndim != 2 or points.shape[1] != dim:
            raise BadInput(
                f"kernel KMeans takes rows of {dim} numbers, as its initial centres have: an array [rows, {dim}], alone or as the column "
                f"'points' of a dict, not {describe(batch)}"
            )
        return {"points": np.ascontiguousarray(points, self.dtype)}

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        centres, counts, points = rows["centres"], rows["counts"].reshape(-1), batch["points"]
        loss = 0.0
        for start in range(0, len(points), self.minibatch):
            some = points[start : start + self.minibatch]
            nearest = nearest_centres(centres, some)
            loss += float(_squared_distances(centres, some, nearest))
            _move(centres, counts, some, nearest, centres.dtype.type(rate))
        return loss

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Measures:
        """loss: the mean squared distance to the nearest centre."""
        centres, points = rows["centres"], batch["points"]
        nearest = nearest_centres(centres, points)
        return {"loss": (float(_squared_distances(centres, points, nearest)) / len(points), len(points))}

    @override
    def module(self, seed: int) -> KMeansModel:
        return KMeansModel(self, seed)


class KMeansModel(KernelModel):
    """Its tables: `centres` [clusters, dim], and `counts`."""

    def nearest(self, points: Any) -> NDArray[np.int64]:
        """int64 [rows]: the number of the centre nearest to each row of an array [rows, dim]."""
        return nearest_centres(self.tables()["centres"], self.kernel.prepare(points, 0)["points"])


def sampled(points: Any, clusters: int, seed: int) -> Array:
    """[clusters, dim]: centres that begin as rows drawn at random, none twice. BadInput where there are fewer rows."""
    found = _array(points)
    _check_clusters(clusters, found)
    return found[np.random.default_rng(seed).choice(len(found), clusters, replace=False)]


def plus_plus(points: Any, clusters: int, seed: int, sample: int = 20_000) -> Array:
    """[clusters, dim]: each centre begins as a row drawn with a probability that grows with the squared distance from those
    before it. Among `sample` rows or 10 a cluster, whichever is more. BadInput where there are fewer rows than clusters.
    """
    found = _array(points)
    _check_clusters(clusters, found)
    some = sampled(found, min(len(found), max(sample, 10 * clusters)), seed).astype(np.float64)
    random = np.random.default_rng(seed)
    chosen = [int(random.integers(len(some)))]
    distances = np.full(len(some), math.inf)
    for _ in range(clusters - 1):
        distances = np.minimum(distances, ((some - some[chosen[-1]]) ** 2).sum(1))
        total = distances.sum()
        chosen.append(int(random.choice(len(some), p=distances / total if total > 0 else None)))
    return some[chosen].astype(found.dtype)


def nearest_centres(centres: Array, points: Array) -> NDArray[np.int64]:
    """int64 [rows]. The squared distance is |x|² - 2 (x · c - ½ |c|²): least where what stands in brackets is greatest."""
    halves = -(centres**2).sum(1) / 2
    scores = torch.addmm(torch.from_numpy(halves), torch.from_numpy(points), torch.from_numpy(centres).T)
    return scores.argmax(1).numpy()


def _check_clusters(clusters: int, points: Array) -> None:
    if not is_whole(clusters) or clusters > len(points):
        raise BadInput(
            f"clusters must be a whole number from 1 to the number of rows, {len(points):,}, not {clusters!r}"
        )


def _array(points: Any) -> Array:
    found = points.numpy() if isinstance(points, Tensor) else np.asarray(points)
    if found.ndim != 2:
        raise BadInput(f"k-means takes an array [rows, dim], not {describe(points)}")
    return found


@compiled
def _squared_distances(centres: Array, points: Array, nearest: Array) -> float:
    """Of each point from its centre, summed."""
    total = 0.0
    for n in range(np.uint64(len(points))):
        center = np.uint64(nearest[n])
        for d in range(np.uint64(points.shape[1])):
            difference = points[n, d] - centres[center, d]
            total += difference * difference
    return total


@compiled
def _move(centres: Array, counts: Array, points: Array, nearest: Array, rate: Any) -> None:
    for n in range(np.uint64(len(points))):
        center = np.uint64(nearest[n])
        counts[center] += 1
        share = rate / counts[center]
        for d in range(np.uint64(points.shape[1])):
            centres[center, d] += share * (points[n, d] - centres[center, d])


def reference_step(kernel: KMeans, rows: dict[str, Array], batch: Arrays, rate: float) -> float:
    """The same step, row by row, in NumPy."""
    loss = 0.0
    for start in range(0, len(batch["points"]), kernel.minibatch):
        some = batch["points"][start : start + kernel.minibatch]
        squares = (some[:, None] - rows["centres"]) ** 2  # [rows, clusters, dim]
        nearest = squares.sum(2).argmin(1)
        loss += float(squares.sum(2).min(1).sum())
        for point, center in zip(some, nearest, strict=True):
            rows["counts"][center] += 1
            share = rate / rows["counts"][center, 0]
            rows["centres"][center] = (1 - share) * rows["centres"][center] + share * point
    return loss
