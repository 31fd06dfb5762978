"""Graph cuts: nodes of a graph share out to classes, so that few heavy edges run between classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Arrays, Kernel, TouchedKeys, check_keys, check_whole, columns_of
from manyhands.sparse.rows import Rows

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts(Kernel):
    """The linear relaxation of a cut into several classes: each node has a point of the simplex, and an edge of weight w
    between u and v costs w · |x_u - x_v|, the sum of absolute differences. Nodes whose class is known stay where they are.

    Source: the third problem of Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Feng Niu,
    Benjamin Recht, Christopher Ré, Stephen J. Wright, 2011, section 2.

    Data: a dict of the columns `nodes` and `others` (keys, the ends of an edge) and `weights`, equally long. For each edge
    both ends take a step along the negative subgradient, and are projected on the simplex.
    """

    known: Any
    """int64 [nodes]: a node's class, -1 where it is to be found."""
    classes: int = 2
    dtype: str = "float32"

    def __post_init__(self) -> None:
        known = np.ascontiguousarray(self.known, np.int64)
        object.__setattr__(self, "known", known)
        check_whole(self, "classes", least=2)
        if known.ndim != 1 or not len(known) or known.min() < -1 or known.max() >= self.classes:
            raise BadInput(
                f"kernel Cuts: known must hold a class from 0 to {self.classes - 1} for each node, or -1 where it is to be found"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cuts):
            return NotImplemented
        same = (self.classes, self.dtype) == (other.classes, other.dtype)
        return same and np.array_equal(self.known, other.known)

    __hash__ = None  # type: ignore[assignment]

    @override
    def tables(self) -> dict[str, Rows]:
        share = f"constant:{1 / self.classes!r}"
        fields = ("nodes", "others")
        return {"points": Rows(fields=fields, rows=len(self.known), dim=self.classes, initial=share, dtype=self.dtype)}

    @override
    def initial_rows(self, table: str, keys: NDArray[np.int64] | range, seed: int) -> NDArray[Any]:
        found = super().initial_rows(table, keys, seed)
        known = self.known[np.asarray(keys)]
        corners = np.eye(self.classes, dtype=self.dtype)
        found[known >= 0] = corners[known[known >= 0]]
        return found

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        found = columns_of(batch, ("nodes", "others", "weights"), self)
        for field in ("nodes", "others"):
            check_keys(found[field], len(self.known), field, self)
        free = {f"{field}_free": self.known[found[field]] < 0 for field in ("nodes", "others")}
        found["weights"] = np.ascontiguousarray(found["weights"], self.dtype)
        return found | free

    @override
    def touched(self, batch: Any) -> TouchedKeys:
        """Both ends of an edge, which are nodes of one table."""
        arrays = self.prepare(batch, 0)
        ends = np.stack([arrays["nodes"], arrays["others"]], 1).astype(np.uint32)
        return TouchedKeys(ends.ravel(), len(self.known), 2)

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        points = rows["points"]
        scratch = np.empty(self.classes, self.dtype)
        return float(_step(points, *batch.values(), points.dtype.type(rate), scratch))

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        """loss: the mean cost of an edge; cut: the share of weight whose ends have other nearest classes."""
        one, other = rows["points"][batch["nodes"]], rows["points"][batch["others"]]
        weights = batch["weights"].astype(np.float64)
        loss = float((weights * np.abs(one - other).sum(1)).mean())
        cut = float((weights * (one.argmax(1) != other.argmax(1))).sum() / weights.sum())
        return {"loss": (loss, float(len(weights))), "cut": (cut, float(weights.sum()))}


@compiled
def cost_of_edge(points: Array, u: Any, v: Any, weight: Any) -> Any:
    """What the edge costs now."""
    total = points.dtype.type(0)
    for d in range(np.uint64(points.shape[1])):
        total += abs(points[u, d] - points[v, d])
    return weight * total


@compiled
def step_of_edge(points: Array, u: Any, v: Any, move: Any, u_free: bool, v_free: bool, scratch: Array) -> None:
    """Both ends, where they are free, move toward each other and are projected."""
    classes = np.uint64(points.shape[1])
    for d in range(classes):
        off = points[u, d] - points[v, d]
        slope = move if off > 0 else (-move if off < 0 else points.dtype.type(0))
        if u_free:
            points[u, d] -= slope
        if v_free:
            points[v, d] += slope
    if u_free:
        project(points, u, classes, scratch)
    if v_free:
        project(points, v, classes, scratch)


@compiled
def project(points: Array, row: Any, classes: Any, scratch: Array) -> None:
    """A row becomes the nearest point of the simplex.

    Source: Efficient Projections onto the l1-Ball for Learning in High Dimensions, John Duchi, Shai Shalev-Shwartz, Yoram
    Singer, Tushar Chandra, 2008, figure 1.
    """
    for d in range(classes):
        value, at = points[row, d], np.uint64(d)
        while at > 0 and scratch[at - np.uint64(1)] < value:  # sorted, falling
            scratch[at] = scratch[at - np.uint64(1)]
            at -= np.uint64(1)
        scratch[at] = value
    total, least = points.dtype.type(0), points.dtype.type(0)
    for d in range(classes):
        total += scratch[d]
        shift = (total - 1) / points.dtype.type(d + np.uint64(1))
        if scratch[d] - shift > 0:
            least = shift
    for d in range(classes):
        points[row, d] = max(points[row, d] - least, points.dtype.type(0))


@compiled
def _step(
    points: Array,
    nodes: Array,
    others: Array,
    weights: Array,
    nodes_free: Array,
    others_free: Array,
    rate: Any,
    scratch: Array,
) -> float:
    losses = 0.0
    for i in range(np.uint64(len(nodes))):
        u, v = np.uint64(nodes[i]), np.uint64(others[i])
        losses += cost_of_edge(points, u, v, weights[i])
        step_of_edge(points, u, v, rate * weights[i], nodes_free[i], others_free[i], scratch)
    return losses


def reference_step(kernel: Cuts, rows: dict[str, Array], batch: Arrays, rate: float) -> float:
    """The same step, edge by edge, in NumPy."""
    points, losses = rows["points"], 0.0
    for i, (u, v, weight) in enumerate(zip(batch["nodes"], batch["others"], batch["weights"], strict=True)):
        off = points[u] - points[v]
        losses += weight * np.abs(off).sum()
        for node, sign, free in ((u, -1, batch["nodes_free"][i]), (v, 1, batch["others_free"][i])):
            if free:
                points[node] += sign * rate * weight * np.sign(off)
        for node, free in ((u, batch["nodes_free"][i]), (v, batch["others_free"][i])):
            if free:
                falling = np.sort(points[node])[::-1]
                shifts = (np.cumsum(falling) - 1) / np.arange(1, kernel.classes + 1)
                points[node] = np.maximum(points[node] - shifts[np.flatnonzero(falling - shifts > 0)[-1]], 0)
    return float(losses)
