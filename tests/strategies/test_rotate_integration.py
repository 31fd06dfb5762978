"""Rotate: what one worker computes cell by cell, whatever the number of workers, engine, checkpoint or stop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from products import Products, rows_of_products

import manyhands as mh
from manyhands.data.open_source import open_source
from manyhands.data.strata import KeyBlocks, count_keys
from manyhands.sparse.initial import initial_rows

EPOCHS, BLOCKS, RATE, SEED = 3, 4, 0.02, 5
Tables = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Unpaired(Products):
    paired: ClassVar[bool] = False


def trained(workers: int = 1, **options: Any) -> mh.Run:
    return mh.train(
        **{
            "kernel": Products(),
            "rate": RATE,
            "train_data": rows_of_products(),
            "validation_data": rows_of_products(90, seed=3),
            "epochs": EPOCHS,
            "seed": SEED,
            "strategy": f"rotate:blocks={BLOCKS}",
            "engine": "sim",
            **options,
        },
        workers=workers,
    )


def cell_by_cell(steps: int = EPOCHS * BLOCKS) -> Tables:
    """The same by hand: whole tables, keys as they are."""
    kernel, data = Products(), rows_of_products()
    tables = {name: initial_rows(rows, name, SEED, range(rows.rows)) for name, rows in kernel.tables().items()}
    counts = count_keys(open_source(data), {"user": 40, "item": 30}, lambda batch: kernel.prepare(batch, 0))
    blocks = KeyBlocks.of(counts, BLOCKS, SEED)
    (user_block, _), (item_block, _) = blocks.places("user"), blocks.places("item")
    for step in range(steps):
        epoch, stratum = divmod(step, BLOCKS)
        for i in range(BLOCKS):
            j = (i + stratum) % BLOCKS
            own = np.flatnonzero((user_block[data["user"]] == i) & (item_block[data["item"]] == j))
            own = own[np.random.default_rng([SEED, epoch, i, j]).permutation(len(own))]
            kernel.step(tables, {name: column[own] for name, column in data.items()}, RATE)
    return tables


def same(one: mh.Run, tables: Tables) -> bool:
    return all(np.array_equal(table, tables[name]) for name, table in one.model.tables().items())


def test_any_number_of_workers_computes_what_one_does_by_hand() -> None:
    expected = cell_by_cell()
    off = Products().measure(expected, rows_of_products(90, seed=3))["loss"][0]
    for workers in (1, 2, 4):
        run = trained(workers, engine="local" if workers == 2 else "sim")
        assert same(run, expected), workers
        assert expected["user_moves"].sum() == EPOCHS * 400 == run.rows["total"]
        assert run.metrics["validation_loss"] == pytest.approx(off, rel=1e-12)
        assert run.info["parameters"] == 40 * 4 + 30 * 4  # without the row by which some blocks are longer
        if workers == 2:  # each holds its share and sends blocks of columns alone: three factors and a count each
            items, users = (-(-keys // BLOCKS) * 4 * 8 for keys in (30, 40))
            passes = 2 * EPOCHS * BLOCKS  # training and validation
            answer = BLOCKS // 2 * (items + users)  # worker 1's, at the end
            assert run.ledger["send"]["bytes"] == 2 * passes * items + answer


def test_eight_blocks_have_the_same_bits_for_1_and_8_workers() -> None:
    runs = [trained(workers, strategy="rotate:blocks=8") for workers in (1, 8)]
    first = runs[0].model.tables()
    assert all(same(run, first) for run in runs)
    assert not same(trained(1, strategy="rotate:blocks=4"), first)


@pytest.mark.parametrize(("before", "after"), [(1, 1), pytest.param(4, 2, marks=pytest.mark.slow), (2, 1)])
def test_a_run_stopped_within_an_epoch_goes_on_with_the_same_bits(tmp_path: Path, before: int, after: int) -> None:
    options = {"run_dir": tmp_path / "run", "checkpoint_every": 1, "validate_every": 2}
    stopped = trained(before, **options, max_steps=BLOCKS + 3)  # after a checkpoint that no validation comes before
    assert same(stopped, cell_by_cell(BLOCKS + 3))
    run = trained(after, **options, max_steps=None, resume=True)
    assert same(run, cell_by_cell())
    assert same(trained(after, **options, max_steps=None, resume=True), cell_by_cell())  # the finished run's files


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_starts_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    engine = mh.Local(faults=f"kill=1@step:{BLOCKS + 2}")
    options = {"run_dir": tmp_path / "run", "checkpoint_every": 1, "survive": "max_restarts=1"}
    run = trained(2, engine=engine, **options)
    assert len(run.restarts) == 1
    assert same(run, cell_by_cell())


def test_a_model_of_the_middle_of_an_epoch_is_kept_whole() -> None:
    data, expected = rows_of_products(90, seed=3), cell_by_cell(3)
    off = Products().measure(expected, data)["loss"][0]
    for workers in (1, 2):
        kept = trained(workers, keep="best:max:validation_loss", validate_every=3, test_data=data)
        assert same(kept, expected), workers
        assert kept.metrics["validation_loss"] == kept.metrics["test_loss"] == pytest.approx(off, rel=1e-12), workers


def test_what_cannot_be_is_refused() -> None:
    unpaired = (mh.kernels.Linear(features=3), mh.kernels.Cuts(known=[0, 1]), Unpaired())
    rows = {"user": 1, "item": 1, "number": 1.0}
    for options, text in [
        ({"strategy": "rotate:blocks=8", "workers": 3}, "blocks=8"),
        ({"strategy": "rotate:blocks=0"}, "blocks"),
        ({"strategy": "rotate", "survive": "max_losses=1", "workers": 2}, "rotate"),
        ({"strategy": "rotate", "model_parallel": "stages=2", "workers": 2}, "model_parallel"),
        ({"strategy": "rotate", "evaluate": lambda model, batch: {"loss": 0.0}}, "evaluate"),
        ({"strategy": "rotate", "order": lambda epoch: [0]}, "order"),
        ({"workers": 2, "train_data": iter([rows]), "validation_data": None}, "stream"),  # known before workers start
        ({"train_data": lambda: iter([rows]), "validation_data": None}, "stream"),
        ({"strategy": "rotate:blocks=31"}, "31 blocks"),
        *(({"kernel": kernel}, "two fields") for kernel in unpaired),
    ]:
        with pytest.raises((mh.BadInput, mh.Unsupported), match=text):
            trained(**{"workers": 1, **options})
    with pytest.raises(mh.Unsupported, match="kernel"):
        mh.train("digits", strategy="rotate", workers=1)
