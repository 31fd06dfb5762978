"""The conformance suite of kernels: the guarantees of `Kernel`, as checks for any implementation.

Run every check of `KERNEL_SUITE`, in any order:

    for name, check in KERNEL_SUITE.items():
        check(case)

A check raises CheckFailed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.sparse.kernel import Kernel, Measures, Summed
from manyhands.testing.group_suite import checks_of, expect

TOLERANCE = 1e-7
SEED, RANDOM = 3, 17

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A kernel whose tables are float64, and what it is run on."""

    kernel: Kernel
    batch: Any
    """Of a task's data: few rows, which leave some keys of the tables out."""
    reference: Callable[[Kernel, Arrays, Mapping[str, NDArray[Any]], float], float]
    """(kernel, rows, prepared batch, rate): the same step, number by number, in NumPy."""
    rate: float = 0.1


def check_tables_begin_as_the_seed_says(case: KernelCase) -> None:
    first, second, other = (case.kernel.module(seed).tables() for seed in (SEED, SEED, SEED + 1))
    expect(first.keys() == case.kernel.tables().keys(), f"the model has the tables {list(first)}")
    for name, rows in case.kernel.tables().items():
        expect(first[name].shape == (rows.rows, rows.dim), f"{name} has the shape {first[name].shape}")
        expect(np.array_equal(first[name], second[name]), f"{name} begins otherwise with the same seed")
        if rows.initial_number()[0] in ("uniform", "positive", "normal"):
            expect(not np.array_equal(first[name], other[name]), f"{name} begins alike with another seed")
        some = np.arange(rows.rows)[::-3]
        expect(
            np.array_equal(case.kernel.initial_rows(name, some, SEED), first[name][some]),
            f"{name} depends on more than keys",
        )


def check_every_draw_is_made_by_prepare(case: KernelCase) -> None:
    one, other = _prepared(case), _prepared(case)
    expect(one.keys() == other.keys(), "two preparations with one random number have other fields")
    expect(all(np.array_equal(one[name], other[name]) for name in one), "one random number prepares other arrays")
    first, second = _tables(case), _tables(case)
    losses = case.kernel.step(first, one, case.rate), case.kernel.step(second, other, case.rate)
    expect(losses[0] == losses[1], f"the same step has the losses {losses}")
    expect(all(np.array_equal(first[name], second[name]) for name in first), "the same step ends with other bits")


def check_keys_stand_in_the_fields_that_tables_name(case: KernelCase) -> None:
    batch = _prepared(case)
    for name, rows in case.kernel.tables().items():
        for field in rows.fields:
            expect(field in batch, f"table {name} names the field {field!r}, and a prepared batch has {list(batch)}")
            keys = batch[field]
            expect(keys.dtype.kind in "iu", f"field {field!r} holds {keys.dtype}, not keys")
            expect(
                bool(len(keys)) and int(keys.min()) >= 0 and int(keys.max()) < rows.rows, f"{field!r} is out of range"
            )


def check_a_step_is_the_reference(case: KernelCase) -> None:
    batch, rows, theirs = _prepared(case), _tables(case), _tables(case)
    for _ in range(2):  # the second one from rows that have moved
        loss, other = case.kernel.step(rows, batch, case.rate), case.reference(case.kernel, theirs, batch, case.rate)
        expect(abs(loss - other) <= TOLERANCE * max(1.0, abs(other)), f"the loss is {loss}, by the reference {other}")
    for name in rows:
        off = float(np.abs(rows[name] - theirs[name]).max())
        expect(off <= TOLERANCE * max(1.0, float(np.abs(theirs[name]).max())), f"{name} is off the reference by {off}")
    began = _tables(case)
    expect(any(not np.array_equal(rows[name], began[name]) for name in rows), "no row has moved")


def check_other_rows_stay(case: KernelCase) -> None:
    batch, rows, before = _prepared(case), _tables(case), _tables(case)
    case.kernel.step(rows, batch, case.rate)
    for name, declared in case.kernel.tables().items():
        if declared.fields:
            moved = np.flatnonzero((rows[name] != before[name]).any(1))
            known = np.concatenate([batch[field].ravel() for field in declared.fields])
            others = np.setdiff1d(moved, known)
            expect(not len(others), f"{name}: rows {others[:5]} have moved, and their keys stand in no field")


def check_a_kernel_cannot_tell_which_rows_it_has(case: KernelCase) -> None:
    """It takes the rows of a batch alone, renumbered, as it takes whole tables."""
    kernel, batch, whole = case.kernel, _prepared(case), _tables(case)
    tables = kernel.tables()
    fields = {field for rows in tables.values() for field in rows.fields}
    groups = {frozenset(rows.fields) for rows in tables.values() if rows.fields}
    together = [set(group) for group in groups]
    while any(a & b for a in together for b in together if a is not b):  # fields that share a table share its numbers
        a, b = next((a, b) for a in together for b in together if a is not b and a & b)
        together.remove(b)
        a |= b
    renumbered, keys_of = dict(batch), {}
    for group in together:
        keys = np.unique(np.concatenate([batch[field].ravel() for field in group]))
        for field in group:
            renumbered[field] = np.searchsorted(keys, batch[field]).astype(batch[field].dtype)
            keys_of[field] = keys
    expect(fields == set(keys_of), f"fields {fields}")
    some = {
        name: whole[name][keys_of[rows.fields[0]]].copy() if rows.fields else whole[name].copy()
        for name, rows in tables.items()
    }
    losses = kernel.step(whole, batch, case.rate), kernel.step(some, renumbered, case.rate)
    expect(losses[0] == losses[1], f"the loss is {losses[0]} with whole tables, {losses[1]} with the rows of the batch")
    for name, rows in tables.items():
        part = whole[name][keys_of[rows.fields[0]]] if rows.fields else whole[name]
        expect(np.array_equal(part, some[name]), f"{name} ends otherwise where it has the rows of the batch alone")


def check_a_measure_changes_nothing(case: KernelCase) -> None:
    batch, rows, before = _prepared(case), _tables(case), _tables(case)
    found = case.kernel.measure(rows, batch)
    expect(isinstance(found.get("loss"), tuple), f"it measures {list(found)}, and no loss that is (mean, weight)")
    weights = {name: one[1] for name, one in found.items() if isinstance(one, tuple)}
    expect(all(weight > 0 for weight in weights.values()), f"metrics without weight: {found}")
    values = _values(found)
    expect(values == _values(case.kernel.measure(rows, batch)), "a second measure is another one")
    expect(all(np.array_equal(rows[name], before[name]) for name in rows), "a measure has moved rows")
    case.kernel.step(rows, batch, case.rate)
    expect(values != _values(case.kernel.measure(rows, batch)), "after a step it measures the same")


def check_what_is_not_finite_is_found(case: KernelCase) -> None:
    for name, declared in case.kernel.tables().items():
        batch, rows = _prepared(case), _tables(case)
        key = int(batch[declared.fields[0]].ravel()[0]) if declared.fields else 0
        rows[name][key] = np.nan
        losses = [case.kernel.step(rows, batch, case.rate) for _ in range(2)]
        expect(not np.isfinite(losses[1]), f"{name} holds NaN, and the losses of two steps are {losses}")


def check_it_travels(case: KernelCase) -> None:
    other = pickle.loads(pickle.dumps(case.kernel))  # noqa: S301 - its own bytes
    expect(other == case.kernel, "a pickled kernel is another one")


def check_the_weight_of_a_batch_is_positive(case: KernelCase) -> None:
    weight = case.kernel.weight(_prepared(case), len(case.batch))
    expect(weight > 0, f"a batch weighs {weight}")


def _prepared(case: KernelCase) -> Arrays:
    return case.kernel.prepare(case.batch, RANDOM)


def _values(measures: Measures) -> dict[str, list[float]]:
    """What can be compared: means with their weights, and sums."""
    return {name: one.sums.tolist() if isinstance(one, Summed) else list(one) for name, one in measures.items()}


def _tables(case: KernelCase) -> Arrays:
    """As they begin, but moved a little: rules differ from each other only away from zero."""
    random = np.random.default_rng(SEED)
    tables = {name: table.copy() for name, table in case.kernel.module(SEED).tables().items()}
    return {name: table + 0.1 * random.random(table.shape) for name, table in tables.items()}


KERNEL_SUITE: dict[str, Callable[[KernelCase], None]] = checks_of(globals())
