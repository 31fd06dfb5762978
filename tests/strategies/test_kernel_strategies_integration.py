"""Every strategy that exchanges parameters or updates trains a kernel: rows once, it learns, and what is exact stays exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from products import Products, rows_of_products

import manyhands as mh
from manyhands.strategies import CATALOGUE, strategy_of

ABLE = [name for name in CATALOGUE if not strategy_of(name).exchanges_gradients() and name not in ("solo", "ensemble")]

ROWS, EPOCHS = 120, 4


def trained(strategy: str, workers: int = 2, **options: Any) -> mh.Run:
    fields: dict[str, Any] = {
        "kernel": Products(),
        "rate": 0.03,
        "last_rate": 0.01,
        "train_data": rows_of_products(ROWS),
        "batch_size": 12,
        "epochs": EPOCHS,
        "engine": "local",
    }
    return mh.train(strategy=strategy, workers=workers, **(fields | options))


def same(one: mh.Run, other: mh.Run) -> bool:
    theirs = other.model.tables()
    return all(np.array_equal(table, theirs[name]) for name, table in one.model.tables().items())


def test_all_but_those_that_average_gradients_or_outputs_are_here() -> None:
    assert set(CATALOGUE) - set(ABLE) == {"solo", "allreduce", "quorum", "ensemble"}


@pytest.mark.parametrize("strategy", ABLE)
def test_each_row_is_trained_once_an_epoch_and_the_loss_falls(strategy: str) -> None:
    began = Products().measure(Products().module(0).tables(), rows_of_products(ROWS))["loss"][0]
    engine = "local" if strategy == "hogwild" else "sim"
    run = trained(strategy, engine=engine, validation_data=rows_of_products(ROWS), validate_every=10)
    assert run.rows["total"] == EPOCHS * ROWS
    assert run.rows["unused"] == 0
    assert run.metrics["validation_loss"] < began
    if strategy in ("hogwild", "rotate"):  # nothing is averaged: all moves of all rows are in the tables
        lost = EPOCHS * ROWS - run.model.tables()["user_moves"].sum()
        assert 0 <= lost <= (20 if strategy == "hogwild" else 0)


def test_steps_without_locks_report_how_rarely_rows_meet() -> None:
    """A row touches a user and an item; it meets those that have one of the two."""
    run, data = trained("hogwild", workers=1), rows_of_products(ROWS)
    meets = [
        np.mean((data["user"] == u) | (data["item"] == i)) for u, i in zip(data["user"], data["item"], strict=True)
    ]
    most = max(np.bincount(data[field]).max() for field in ("user", "item")) / ROWS
    expected = {"omega": 2, "delta": most, "rho": max(meets), "rho_at_most": max(meets), "rows": ROWS}
    assert run.info["sparsity"] == pytest.approx(expected)
    assert "Ω 2" in run.summary()
    assert "sparsity" not in trained("solo", workers=1).info


def test_one_worker_of_solo_hogwild_and_local_sgd_has_the_kernels_bits() -> None:
    solo, hogwild, local_sgd = (trained(strategy, workers=1) for strategy in ("solo", "hogwild", "local-sgd"))
    assert same(solo, hogwild)
    assert same(solo, local_sgd)


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """On processes as simulated."""
    for strategy, workers in (("hogwild", 1), ("local-sgd:period=3", 2)):
        engine = "sim" if workers > 1 else "local"
        folder, options = tmp_path / strategy[:3], {"last_rate": None, "rate_decay": 0.9, "engine": engine}
        trained(strategy, workers, **options, run_dir=folder, checkpoint_every=1, max_steps=13)
        run = trained(strategy, workers, **options, run_dir=folder, resume=True, max_steps=None)
        assert same(run, trained(strategy, workers, **options | {"engine": "local"})), strategy


def test_an_asynchronous_run_is_replayed_with_the_same_bits(tmp_path: Path) -> None:
    trained("dynsgd:window=3", servers=2, run_dir=tmp_path / "run")
    task = mh.Task(
        kernel=Products(), rate=0.03, last_rate=0.01, train_data=rows_of_products(ROWS), batch_size=12, epochs=EPOCHS
    )
    assert mh.replay(tmp_path / "run", task=task, strategy="dynsgd:window=3").identical


def test_a_lost_worker_costs_no_row(tmp_path: Path) -> None:
    run = trained("local-sgd:period=2", survive="max_losses=1", engine=mh.Local(faults="kill=1@step:4"), batch_size=6)
    assert [loss["cause"] for loss in run.losses]
    assert run.rows["total"] == EPOCHS * ROWS
