"""A small kernel for tests, in NumPy: each row has a user, an item and a number that their rows' product is to be."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from manyhands.sparse.kernel import Kernel, check_keys, columns_of
from manyhands.sparse.rows import Rows
from manyhands.testing.kernel_suite import KERNEL_SUITE, KernelCase

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Products(Kernel):
    """Squared loss, row by row; how often a row of a table was moved is counted beside it."""

    users: int = 40
    items: int = 30
    rank: int = 3
    dtype: str = "float64"

    paired: ClassVar[bool] = True

    def tables(self) -> dict[str, Rows]:
        users, items = ({"fields": (field,), "dtype": self.dtype} for field in ("user", "item"))
        return {
            "users": Rows(rows=self.users, dim=self.rank, initial="normal:0.3", **users),
            "items": Rows(rows=self.items, dim=self.rank, initial="normal:0.3", **items),
            "user_moves": Rows(rows=self.users, **users),
            "item_moves": Rows(rows=self.items, **items),
        }

    def prepare(self, batch: Any, random: int) -> dict[str, NDArray[Any]]:
        found = columns_of(batch, ("user", "item", "number"), self)
        check_keys(found["user"], self.users, "user", self)
        check_keys(found["item"], self.items, "item", self)
        return found

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        losses = 0.0
        users, items = rows["users"], rows["items"]
        for u, i, number in zip(batch["user"], batch["item"], batch["number"], strict=True):
            off = users[u] @ items[i] - number
            losses += off * off + 0 * rows["user_moves"][u, 0] * rows["item_moves"][i, 0]  # NaN where one of them is
            users[u], items[i] = users[u] - rate * off * items[i], items[i] - rate * off * users[u]
            rows["user_moves"][u] += 1
            rows["item_moves"][i] += 1
        return losses

    def measure(self, rows: Arrays, batch: Arrays) -> dict[str, tuple[float, float]]:
        off = (rows["users"][batch["user"]] * rows["items"][batch["item"]]).sum(1) - batch["number"]
        return {"loss": (float((off * off).mean()), float(len(off)))}


def rows_of_products(rows: int = 400, seed: int = 0, users: int = 40, items: int = 30) -> dict[str, NDArray[Any]]:
    """Of planted tables; some users and items are far more frequent than others."""
    random = np.random.default_rng(seed)
    planted = np.random.default_rng(1)
    left, right = planted.normal(size=(users, 3)), planted.normal(size=(items, 3))
    user = np.minimum(random.geometric(0.1, rows) - 1, users - 1)
    item = np.minimum(random.geometric(0.15, rows) - 1, items - 1)
    return {"user": user, "item": item, "number": (left[user] * right[item]).sum(1)}


def conforms(**case: Any) -> None:
    """A kernel and what it is run on passes the suite. A failing check is named by its function."""
    for check in KERNEL_SUITE.values():
        check(KernelCase(**case))
