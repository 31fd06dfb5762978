"""The conformance suite of kernels: a kernel of NumPy passes it, and broken ones do not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from products import Products, rows_of_products

from manyhands.sparse.kernel import Kernel
from manyhands.sparse.rows import Rows
from manyhands.testing.group_suite import CheckFailed
from manyhands.testing.kernel_suite import KERNEL_SUITE, KernelCase
from refusals import refused

Arrays = Mapping[str, np.ndarray[Any, Any]]


def reference(kernel: Kernel, rows: Arrays, batch: Arrays, rate: float) -> float:
    """One number after the other."""
    losses, rank = 0.0, rows["users"].shape[1]
    for u, i, number in zip(batch["user"], batch["item"], batch["number"], strict=True):
        off = sum(rows["users"][u, k] * rows["items"][i, k] for k in range(rank)) - number
        losses += off**2
        for k in range(rank):
            user, item = rows["users"][u, k], rows["items"][i, k]
            rows["users"][u, k] -= rate * off * item
            rows["items"][i, k] -= rate * off * user
        rows["user_moves"][u] += 1
        rows["item_moves"][i] += 1
    return losses


def case_of(kernel: Kernel) -> KernelCase:
    batch = {name: column[:20] for name, column in rows_of_products().items()}
    return KernelCase(kernel=kernel, batch=batch, reference=reference, rate=0.05)


def test_a_kernel_passes() -> None:
    for check in KERNEL_SUITE.values():
        check(case_of(Products()))


@dataclass(frozen=True, kw_only=True)
class Draws(Products):
    """Draws in step."""

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        return super().step(rows, batch, rate * np.random.default_rng().random())


@dataclass(frozen=True, kw_only=True)
class OtherRows(Products):
    """Moves a row that no key names."""

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        rows["users"][np.setdiff1d(np.arange(40), batch["user"])[0]] += 1
        return super().step(rows, batch, rate)


@dataclass(frozen=True, kw_only=True)
class Tells(Products):
    """Does otherwise where it has a part of a table."""

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        return super().step(rows, batch, rate * len(rows["users"]))


@dataclass(frozen=True, kw_only=True)
class Measures(Products):
    """A measure that trains."""

    def measure(self, rows: Arrays, batch: Arrays) -> dict[str, tuple[float, float]]:
        self.step(rows, batch, 0.1)
        return super().measure(rows, batch)


@dataclass(frozen=True, kw_only=True)
class Undeclared(Products):
    """Names a field that it does not prepare."""

    def tables(self) -> dict[str, Rows]:
        return super().tables() | {"more": Rows(rows=3, fields=("nowhere",))}


@dataclass(frozen=True, kw_only=True)
class Hides(Products):
    """A loss that hides what is not finite."""

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        return float(np.nan_to_num(super().step(rows, batch, rate)))


def test_a_broken_kernel_does_not() -> None:
    for kernel, check in [
        (Draws(), "every_draw_is_made_by_prepare"),
        (Draws(), "a_step_is_the_reference"),
        (OtherRows(), "other_rows_stay"),
        (Tells(), "a_kernel_cannot_tell_which_rows_it_has"),
        (Measures(), "a_measure_changes_nothing"),
        (Undeclared(), "keys_stand_in_the_fields_that_tables_name"),
        (Hides(), "what_is_not_finite_is_found"),
    ]:
        refused("", KERNEL_SUITE[check], case_of(kernel), kind=CheckFailed, case=(kernel, check))
